"""Bytes and FLOPs of an engine's step on one of the devices of an instance.

`tensor` devices divide every layer and `expert` groups of them divide the routed experts (`spec.inference_layout`); each group has the
attention, the cache and the head of its own requests. Loads of experts are taken to be equal, routes of tokens independent.
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
"""Linear layers of a block that `serve.formats` rounds to 8 bits, beside routed experts; to fp8 only those that devices do not share."""


LAYER_KERNELS = 8
LATENT_KERNELS = 5
ROUTED_KERNELS = 12
"""Kernels of a dense layer, those that latent attention adds, and those that experts add to route, permute, multiply and combine."""


class PromptPart(Protocol):
    """Consecutive tokens of one prompt; a part of a step is one."""

    @property
    def start(self) -> int:
        """Number of positions before the part."""

    @property
    def count(self) -> int:
        """Number of tokens of the part."""


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """Bytes that a device reads and FLOPs that it computes in a step, and bytes in its memory."""

    stored_bytes: float
    """Weights in memory."""
    dense_bytes: float
    """Weights of the blocks that every step reads."""
    dense_flops: float
    """FLOPs of a token in these."""
    head_bytes: float
    """Weights of the head."""
    head_flops: float
    """FLOPs of a token that gives logits."""
    expert_bytes: float
    """Weights of one routed expert in one layer."""
    expert_flops: float
    """FLOPs of a token in the experts of all layers that it is sent to."""
    expert_slots: float
    """Routed experts of the device, over all layers."""
    routed_layers: int
    """Layers with routed experts."""
    chosen_share: float
    """Share of a layer's experts that a token is sent to."""
    cache_bytes: float
    """Keys and values of one position."""
    kv_heads: int
    """Heads of keys and values; 1 for latents."""
    attention_flops: float
    """FLOPs of one query and one position that it attends to."""
    expanded_flops: float = 0.0
    """The same where latents are expanded to keys and values first, as for prompts."""
    kernels: int = 0
    """Kernels of a step's layers, with one for each matmul, norm, rotation, attention, activation and step of routing.
    """
    windows: tuple[tuple[int | None, float], ...]
    """Positions that a query attends to at most, None for all, and the share of the cache's bytes with that limit."""

    @cached_property
    def attends_to_all(self) -> bool:
        """Whether no layer has a window."""
        return self.windows == ((None, 1.0),)

    def read_expert_bytes(self, tokens: float) -> float:
        """Weights of the routed experts that a step of `tokens` tokens over all groups reads: of those with a token, once."""
        return self.expert_slots * (1.0 - (1.0 - self.chosen_share) ** tokens) * self.expert_bytes

    def pairs(self, chunks: Sequence[PromptPart]) -> float:
        """Pairs of a query of the chunks and a position that it attends to."""
        if self.attends_to_all:
            return sum([(2 * chunk.start + 1 + chunk.count) * chunk.count for chunk in chunks]) / 2
        return sum(share * _pairs(chunks, window) for window, share in self.windows)

    def attended(self, decodes: int, positions: float) -> float:
        """Positions to which decodes with so many attend, mean over the cache's bytes."""
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
    """The work of a device of an instance; numbers have `item` bytes, those of the cache `cache_item`.

    Linear layers of the blocks have the format `weights`, routed experts `experts`, or `weights` if that is none.
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
    """`DeviceWork.windows` of a rank's dimensions."""
    groups = layer_groups(spec)
    sizes = [bytes_per_block(group, 1, item) for group in groups]
    return tuple((group.window, size / sum(sizes)) for group, size in zip(groups, sizes, strict=True))


def _is_rounded(parameter: ParameterSpec) -> bool:
    module = parameter.module
    return len(parameter.shape) > 1 and module.rpartition(".")[2] in ROUNDED_MODULES and module != "moe.router"


def _attention_flops(rank: ModelSpec) -> float:
    """Scores and weighted sums of all layers; with latents they are computed on the latents (absorbed matmuls)."""
    if rank.kv_rank:
        return 2.0 * rank.layers * rank.heads * (2 * rank.kv_rank + rank.rope_head_dim)
    return 4.0 * rank.layers * rank.heads * rank.head_dim
