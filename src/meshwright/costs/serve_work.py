"""Bytes that one device of a serving instance reads in a step, and FLOPs that it computes.

An instance has `expert` groups of `tensor` devices each (`spec.inference_layout`). The devices of a group divide every layer. Each group
has its own requests, with their attention, cache and head; the routed experts are divided among all groups. The formulas assume that all
experts get equally many tokens, and that the experts of one token do not depend on those of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Protocol

from meshwright.spec.deployment import PricedFormat, weight_bytes
from meshwright.spec.inference_layout import rank_dimensions, rank_shape
from meshwright.spec.layout import AxisPart
from meshwright.spec.model import SCORE, ModelSpec, ParameterSpec, parameters
from meshwright.workload.cache_size import bytes_per_block, cache_bytes_per_block, layer_groups

ROUNDED_MODULES = ("qkv", "out", "gate_up", "up", "down", "q", "kv_down")
"""Linear layers of a block that `serve.formats` rounds to 8 bits, in addition to routed experts.

Experts are rounded to fp8 only if they are not divided among devices.
"""


LAYER_KERNELS = 8
"""Kernels that a step launches for a dense layer."""
LATENT_KERNELS = 5
"""Further kernels of a layer with latent attention."""
ROUTED_KERNELS = 12
"""Further kernels of an MoE layer: they route, permute, multiply and combine."""


class PromptPart(Protocol):
    """Consecutive tokens of one prompt that a step computes (a prompt chunk)."""

    @property
    def start(self) -> int:
        """Number of the prompt's positions before the part."""

    @property
    def count(self) -> int:
        """Number of tokens of the part."""


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """Sizes from which the time of a step on one device follows: bytes to read, FLOPs to compute, bytes in memory."""

    stored_bytes: float
    """Bytes of all weights in the device's memory."""
    dense_bytes: float
    """Bytes of the blocks' weights outside routed experts, which every step reads."""
    dense_flops: float
    """FLOPs of one token in the blocks' linear layers, without routed experts."""
    head_bytes: float
    """Bytes of the head's weights."""
    head_flops: float
    """FLOPs of the head for one token whose logits are computed."""
    expert_bytes: float
    """Bytes of one routed expert's weights in one layer."""
    expert_flops: float
    """FLOPs of one token in all routed experts that it is sent to, over all layers."""
    expert_slots: float
    """Number of routed experts on the device, counted over all layers."""
    routed_layers: int
    """Number of layers with routed experts."""
    chosen_share: float
    """Share of a layer's experts that a token is sent to; 8 of 128 experts: 0.0625."""
    cache_bytes: float
    """Bytes of keys and values of one position, in all layers."""
    kv_heads: int
    """Heads of keys and values on the device; 1 with latent attention."""
    attention_flops: float
    """FLOPs of attention for one query and one position that it attends to, in all layers."""
    expanded_flops: float = 0.0
    """As `attention_flops`, for prompts with latent attention, where latents are first expanded to keys and values."""
    kernels: int = 0
    """Kernels that the layers launch in a step: one for each matmul, norm, rotation, attention, activation and step of routing."""
    windows: tuple[tuple[int | None, float], ...]
    """Attention windows of the layers: (positions that a query attends to at most, or None for all; share of the cache's bytes)."""

    @cached_property
    def attends_to_all(self) -> bool:
        """Whether no layer has a window."""
        return self.windows == ((None, 1.0),)

    def read_expert_bytes(self, tokens: float) -> float:
        """Return the bytes of routed experts' weights that the device reads in a step of `tokens` tokens over all groups.

        It reads each expert that gets at least one token once. An expert gets none with probability `(1 - chosen_share) ** tokens`.
        """
        return self.expert_slots * (1.0 - (1.0 - self.chosen_share) ** tokens) * self.expert_bytes

    def pairs(self, chunks: Sequence[PromptPart]) -> float:
        """Return how many pairs of a query and a position that it attends to the chunks have, mean over the cache's bytes.

        Without windows, a chunk of 3 tokens after 2 positions has 3 + 4 + 5 = 12 pairs.
        """
        if self.attends_to_all:
            return sum([(2 * chunk.start + 1 + chunk.count) * chunk.count for chunk in chunks]) / 2
        return sum(share * _pairs(chunks, window) for window, share in self.windows)

    def attended(self, decodes: int, positions: float) -> float:
        """Return how many positions `decodes` queries attend to, mean over the cache's bytes, if they have `positions` before them in all.

        A layer with a window limits each query to the window.
        """
        if self.attends_to_all:
            return positions
        return sum(
            share * (positions if window is None else min(positions, decodes * window))
            for window, share in self.windows
        )


def _pairs(chunks: Sequence[PromptPart], window: int | None) -> float:
    total = 0.0
    for chunk in chunks:
        first = chunk.start + 1
        last = chunk.start + chunk.count
        inside = last if window is None else min(last, window)
        total += (last - max(first, inside + 1) + 1) * (window or 0)
        if inside >= first:
            total += (first + inside) * (inside - first + 1) / 2
    return total


@lru_cache(maxsize=256)
def device_work(
    spec: ModelSpec,
    tensor: int = 1,
    expert: int = 1,
    *,
    weights: PricedFormat | None = None,
    experts: PricedFormat | None = None,
    item: int = 2,
    cache_item: int = 2,
) -> DeviceWork:
    """Return the work of one device of an instance with `expert` groups of `tensor` devices.

    `item` and `cache_item` are the bytes of a number in weights and in the cache. `weights` is the format of the blocks' linear layers.
    `experts` is the format of routed experts; None: the same as `weights`.
    """
    part = AxisPart(0, tensor)
    rank = rank_dimensions(spec, tensor)
    rounded = weight_bytes(weights, item)
    expert_item = weight_bytes(experts or weights, item)
    dense = expert_weights = embedding = 0.0
    dense_bytes = head_count = 0.0
    for parameter in parameters(spec):
        count = prod(rank_shape(spec, parameter, part) or ()) if not parameter.predicts else 0
        if not count or parameter.before_blocks:
            embedding += count
        elif parameter.expert:
            expert_weights += count / expert
        elif parameter.inside:
            dense += count if len(parameter.shape) > 1 else 0
            dense_bytes += count * (rounded if _is_rounded(parameter) else item)
        elif parameter.name in ("head.weight", SCORE):
            head_count = count
        else:
            dense_bytes += count * item
    stored = dense_bytes + expert_item * expert_weights + item * (embedding + head_count)
    head_count = head_count or spec.outputs * spec.hidden / tensor
    routed = spec.routed_layers
    slots = routed * spec.experts / expert
    one_expert = expert_weights / slots if slots else 0.0
    latent = sum(len(group.layers) for group in layer_groups(spec) if group.latent)
    return DeviceWork(
        stored_bytes=stored,
        dense_bytes=dense_bytes,
        dense_flops=2.0 * dense,
        head_bytes=item * head_count,
        head_flops=2.0 * head_count,
        expert_bytes=expert_item * one_expert,
        expert_flops=2.0 * routed * spec.experts_per_token * one_expert,
        expert_slots=slots,
        routed_layers=routed,
        chosen_share=spec.experts_per_token / spec.experts if spec.experts else 0.0,
        cache_bytes=float(cache_bytes_per_block(rank, 1, cache_item)),
        kv_heads=1 if rank.kv_rank else rank.kv_heads,
        attention_flops=_attention_flops(rank),
        expanded_flops=2.0 * rank.layers * (rank.heads * rank.head_dim + rank.value_width),
        kernels=spec.layers * LAYER_KERNELS + latent * LATENT_KERNELS + routed * ROUTED_KERNELS,
        windows=_windows(rank, cache_item),
    )


def _windows(spec: ModelSpec, item: int) -> tuple[tuple[int | None, float], ...]:
    """Return `DeviceWork.windows` for the part of the model on one device."""
    groups = layer_groups(spec)
    sizes = [bytes_per_block(group, 1, item) for group in groups]
    return tuple((group.window, size / sum(sizes)) for group, size in zip(groups, sizes, strict=True))


def _is_rounded(parameter: ParameterSpec) -> bool:
    module = parameter.module
    return len(parameter.shape) > 1 and module.rpartition(".")[2] in ROUNDED_MODULES and module != "moe.router"


def _attention_flops(rank: ModelSpec) -> float:
    """Return the FLOPs of scores and weighted sums in all layers, for one query and one position.

    With latent attention both are computed on the latents themselves (absorbed matmuls).
    """
    if rank.kv_rank:
        return 2.0 * rank.layers * rank.heads * (2 * rank.kv_rank + rank.rope_head_dim)
    return 4.0 * rank.layers * rank.heads * rank.head_dim
