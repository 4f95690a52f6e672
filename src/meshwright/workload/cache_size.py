"""Size of the inference engine's key/value cache: groups of layers, bytes of a block, blocks that fit. Torch-free.

The engine allocates by these formulas (`serve.kv_cache`) and the cost model of deployments plans by them.
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
"""Share of a GPU's memory that weights, cache and activations take."""
HOST_SHARE = 0.25
"""Share of a host's memory that the cache takes at most on a CPU."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share block tables; `window` is the number of tokens that a query attends to, None for all."""

    layers: tuple[int, ...]
    mixer: Mixer
    window: int | None

    @property
    def latent(self) -> bool:
        """Whether positions have a latent and a rotated key in place of keys and values of heads."""
        return isinstance(self.mixer, LatentAttentionSpec)


def layer_groups(spec: ModelSpec, predictions: int = 0) -> tuple[LayerGroup, ...]:
    """The groups of the model's layers by kind of attention; so many prediction modules are further layers."""
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
    """The shape of one block of a group's cache."""
    return len(group.layers), *group.mixer.cache_shape(tokens_per_block)


def bytes_per_block(group: LayerGroup, tokens_per_block: int, itemsize: int) -> int:
    """Bytes of one block of a group's cache, whose numbers have `itemsize` bytes."""
    return math.prod(block_shape(group, tokens_per_block)) * itemsize


def cache_bytes_per_block(spec: ModelSpec, tokens_per_block: int, itemsize: int) -> int:
    """Bytes that a block of every group takes together."""
    return sum(bytes_per_block(group, tokens_per_block, itemsize) for group in layer_groups(spec))


def most_blocks(context: int, sequences: int, tokens_per_block: int) -> int:
    """Blocks with which `sequences` requests of `context` tokens never wait; with the unused block 0.

    32 requests of 4,096 tokens take 256 blocks of 16 tokens each, and one block stays unused:

    >>> most_blocks(4096, 32, 16)
    8193
    """
    return 1 + sequences * -(-context // tokens_per_block)


@dataclass(frozen=True)
class CacheRoom:
    """What decides how many blocks each group of a cache needs."""

    context: int
    """Tokens of a text at most."""
    sequences: int
    """Requests that run at a time."""
    step_tokens: int
    """Tokens of a step at most."""
    tokens_per_block: int

    @property
    def most_blocks(self) -> int:
        """Blocks of a group with which requests never wait."""
        return most_blocks(self.context, self.sequences, self.tokens_per_block)

    def group_blocks(self, groups: Sequence[LayerGroup], blocks: int) -> list[int]:
        """Blocks of each group, of a cache with `blocks` of those groups that attend to whole texts.

        Beside such a group, one with a window has at most twice what running requests hold, the rest for prefixes: otherwise most of
        the memory of Gemma 3's local layers would stay empty. Without such a group all have equally many.
        """
        if all(group.window is not None for group in groups):
            return [blocks] * len(groups)
        size = self.tokens_per_block
        blocks_by_group = [self.sequences * (-(-(group.window or 0) // size) + 2) for group in groups]
        new = -(-self.step_tokens // size)  # of the step, and of the one in flight
        return [
            blocks if group.window is None else min(blocks, 1 + 2 * (count + new))
            for group, count in zip(groups, blocks_by_group, strict=True)
        ]

    def blocks_within(self, available_bytes: float, groups: Sequence[LayerGroup], block_bytes: Sequence[int]) -> int:
        """Most `blocks`, as in `group_blocks`, that `available_bytes` hold, at most `most_blocks`.

        `block_bytes` are those of a block of each group. The result is less than one request needs if it does not fit.
        """

        def total(blocks: int) -> int:
            counts = self.group_blocks(groups, blocks)
            return sum(count * size for count, size in zip(counts, block_bytes, strict=True))

        return bisect_right(range(self.most_blocks + 1), available_bytes, key=total) - 1


def device_cache_bytes(free_bytes: float, total_bytes: float, activations: float) -> float:
    """Bytes for the cache on a GPU with weights, of which `free_bytes` are free; `activations` are those of a step."""
    return free_bytes - (1 - DEVICE_SHARE) * total_bytes - activations


def activation_bytes(spec: ModelSpec, itemsize: int, samples: int, step_tokens: int) -> int:
    """Estimated bytes of one step beside weights and cache: the widest layer and three fp32 copies of the logits or scores."""
    width = 4 * spec.hidden + 2 * (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    width += 2 * spec.heads * spec.kv_rank  # absorbed queries, and the sums of latents
    width += 3 * max(*spec.dense_widths.values(), spec.experts_per_token * (spec.expert_hidden + spec.hidden))
    return 2 * step_tokens * width * itemsize + 3 * samples * spec.outputs * 4
