"""Slices of cache blocks by key/value heads, which tensor ranks have, and whole blocks, which engines exchange.

A whole block of a group is `(layers, 2, kv_heads, tokens, head_dim)`; a rank has `kv_heads / ranks` of the heads, or one head that several
ranks have alike. Latents have no heads: every rank has the whole block. Here blocks are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.spec.model import ModelSpec
from meshwright.workload.cache_size import block_shape, layer_groups


class GroupSlices(NamedTuple):
    """How ranks divide a block of one group of layers."""

    runs: int
    """Runs of heads in a block: one of the keys and one of the values of each layer."""
    slices: int
    """Different parts of a run."""
    bytes: int
    """Bytes of a part of a run."""


class HeadSlices:
    """Cuts and joins the blocks of one model for a number of tensor ranks."""

    def __init__(self, spec: ModelSpec, ranks: int, tokens_per_block: int, itemsize: int) -> None:
        """`spec` has the dimensions of the whole model, `itemsize` is that of a number in the cache."""
        self.ranks = ranks
        self.shapes = [block_shape(group, tokens_per_block) for group in layer_groups(spec)]
        """Shapes of the whole blocks of each group."""
        self._groups: list[GroupSlices] = []
        for group, shape in zip(layer_groups(spec), self.shapes, strict=True):
            runs, slices = (1, 1) if group.latent else (2 * len(group.layers), min(ranks, spec.kv_heads))
            self._groups.append(GroupSlices(runs, slices, math.prod(shape) * itemsize // (runs * slices)))
        self.block_bytes = sum(group.runs * group.slices * group.bytes for group in self._groups)
        """Bytes of a whole block of all groups."""

    def cut(self, blocks: Tensor, rank: int) -> Tensor:
        """The part of a rank of whole blocks `(blocks, bytes)`, with fewer bytes."""
        sizes = [group.runs * group.slices * group.bytes for group in self._groups]
        parts = []
        for group, whole in zip(self._groups, blocks.split(sizes, dim=1), strict=True):
            pieces = whole.reshape(len(blocks), group.runs, group.slices, group.bytes)
            parts.append(pieces[:, :, rank * group.slices // self.ranks].flatten(1))
        return torch.cat(parts, dim=1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Whole blocks `(blocks, bytes)` of the parts of all ranks, in order."""
        sizes = [group.runs * group.bytes for group in self._groups]
        by_rank = [part.split(sizes, dim=1) for part in parts]
        whole = []
        for number, group in enumerate(self._groups):
            different = [ranks[number] for ranks in by_rank[:: self.ranks // group.slices]]
            runs = [part.reshape(len(part), group.runs, group.bytes) for part in different]
            whole.append(torch.stack(runs, dim=2).flatten(1))
        return torch.cat(whole, dim=1)
