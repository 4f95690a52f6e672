"""Size of the inference engine's key/value cache: groups of layers, bytes of a block, number of blocks that fit.

The engine allocates its cache by these formulas (`serve.kv_cache`). The cost model of deployments uses the same
formulas.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.blocks.latent_attention import LatentAttentionSpec
from meshwright.spec.model import BlockRun, ModelSpec, sequence

Mixer = AttentionSpec | LatentAttentionSpec

DEVICE_SHARE = 0.92
"""Share of a GPU's memory that weights, cache and activations may use together."""
HOST_SHARE = 0.25
"""Share of a host's memory that the cache may use on a CPU."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same kind of attention; they share block tables."""

    layers: tuple[int, ...]
    """Numbers of the layers, counted from 0. Prediction modules follow the last layer."""
    mixer: Mixer
    """The attention of these layers."""
    window: int | None
    """Number of positions that a query attends to at most; None if it attends to all."""

    @property
    def latent(self) -> bool:
        """Return whether a position stores a latent and a rotated key (latent attention) instead of keys and values of
        heads.
        """
        return isinstance(self.mixer, LatentAttentionSpec)


def layer_groups(spec: ModelSpec, predictions: int = 0) -> tuple[LayerGroup, ...]:
    """Return the groups of the model's layers by kind of attention.

    `predictions` is the number of prediction modules, each a further layer.

    A window that is not shorter than the longest sequence counts as no window.
    """
    layers: dict[Mixer, list[int]] = {}
    modules = BlockRun(spec.block(spec.layers), spec.layers, predictions)
    for run in (*sequence(spec), modules):
        mixer = next(body for body in run.block.bodies if isinstance(body, AttentionSpec | LatentAttentionSpec))
        layers.setdefault(mixer, []).extend(range(run.first, run.first + run.count))
    return tuple(
        LayerGroup(tuple(found), mixer, mixer.window if (mixer.window or spec.max_seq_len) < spec.max_seq_len else None)
        for mixer, found in layers.items()
        if found
    )


def block_shape(group: LayerGroup, tokens_per_block: int) -> tuple[int, ...]:
    """Return the shape of one block of a group's cache: `(layers, …)`, where the mixer's `cache_shape` gives the other
    dimensions.
    """
    return len(group.layers), *group.mixer.cache_shape(tokens_per_block)


def bytes_per_block(group: LayerGroup, tokens_per_block: int, itemsize: int) -> int:
    """Return the bytes of one block of a group's cache, whose numbers have `itemsize` bytes each."""
    return math.prod(block_shape(group, tokens_per_block)) * itemsize


def cache_bytes_per_block(spec: ModelSpec, tokens_per_block: int, itemsize: int) -> int:
    """Return the bytes of one block of every group, added up."""
    return sum(bytes_per_block(group, tokens_per_block, itemsize) for group in layer_groups(spec))


def most_blocks(context: int, sequences: int, tokens_per_block: int) -> int:
    """Return the number of blocks with which `sequences` requests of `context` tokens never wait for a block.

    32 requests of 4,096 tokens need 32 × 256 blocks of 16 tokens each. Block 0 is never used, so there is one more:

    >>> most_blocks(4096, 32, 16)
    8193
    """
    return 1 + sequences * -(-context // tokens_per_block)


@dataclass(frozen=True)
class CacheRoom:
    """Limits of the engine that decide how many blocks each group of the cache needs."""

    context: int
    """Maximum number of tokens of a sequence."""
    sequences: int
    """Maximum number of requests that run at the same time."""
    step_tokens: int
    """Maximum number of tokens of a step."""
    tokens_per_block: int
    """Number of positions in a block."""

    @property
    def most_blocks(self) -> int:
        """Return the number of blocks of a group with which requests never wait for a block."""
        return most_blocks(self.context, self.sequences, self.tokens_per_block)

    def group_blocks(self, groups: Sequence[LayerGroup], blocks: int) -> list[int]:
        """Return the number of blocks of each group, if each group without a window has `blocks` blocks.

        A group with a window then has at most twice the blocks that running requests need there; the second half caches
        prefixes. With `blocks` blocks, most of the memory of such groups would stay empty (for example for the local
        layers of Gemma 3). If all groups have a window, each of them has `blocks` blocks.
        """
        if all(group.window is not None for group in groups):
            return [blocks] * len(groups)
        size = self.tokens_per_block
        blocks_by_group = [self.sequences * (-(-(group.window or 0) // size) + 2) for group in groups]
        # Blocks for the tokens of a step. Below, `2 *` also counts the step in flight.
        new = -(-self.step_tokens // size)
        return [
            blocks if group.window is None else min(blocks, 1 + 2 * (count + new))
            for group, count in zip(groups, blocks_by_group, strict=True)
        ]

    def blocks_within(self, available_bytes: float, groups: Sequence[LayerGroup], block_bytes: Sequence[int]) -> int:
        """Return the largest `blocks`, as in `group_blocks`, for which all groups together need at most
        `available_bytes`.

        `block_bytes` has the bytes of one block of each group. The result is at most `most_blocks`. If one request does
        not fit, it is smaller than the number of blocks that this request needs.
        """

        def total(blocks: int) -> int:
            counts = self.group_blocks(groups, blocks)
            return sum(count * size for count, size in zip(counts, block_bytes, strict=True))

        return bisect_right(range(self.most_blocks + 1), available_bytes, key=total) - 1


def device_cache_bytes(free_bytes: float, total_bytes: float, activations: float) -> float:
    """Return the bytes that the cache may use on a GPU that already stores the weights.

    `free_bytes` of the device's `total_bytes` are free. `activations` are the bytes of the activations of a step.
    """
    return free_bytes - (1 - DEVICE_SHARE) * total_bytes - activations


def activation_bytes(spec: ModelSpec, itemsize: int, samples: int, step_tokens: int) -> int:
    """Return an estimate of the bytes of one step in addition to weights and cache.

    It counts the activations of the widest layer for `step_tokens` tokens, and three fp32 copies of the logits (or
    scores) of `samples` tokens. `itemsize` is the number of bytes of an activation.
    """
    width = 4 * spec.hidden + 2 * (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    # Latent attention: queries multiplied into the latent space, and weighted sums of latents.
    width += 2 * spec.heads * spec.kv_rank
    width += 3 * max(*spec.dense_widths.values(), spec.experts_per_token * (spec.expert_hidden + spec.hidden))
    return 2 * step_tokens * width * itemsize + 3 * samples * spec.outputs * 4
