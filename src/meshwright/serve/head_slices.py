"""Conversion between whole cache blocks and the slices that tensor ranks have. Engines exchange whole blocks.

A whole block of a group of layers is `(layers, 2, kv_heads, tokens, head_dim)`. A rank has `kv_heads / ranks` of the heads. If there are
more ranks than heads, several ranks have the same head. Latents have no heads, so every rank has the whole block. The functions work on
the bytes of blocks.
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
    """How ranks divide a block of one group of layers.

    A block is a sequence of `runs`. Each run has the keys, or the values, of all heads of one layer. It is divided into `slices` equal
    parts of `bytes` bytes. Example: 2 layers with 8 heads on 4 ranks have 4 runs of 4 slices, and each slice has 2 heads.
    """

    runs: int
    """Number of runs in a block: 2 for each layer; 1 in all for latents, which are not divided."""
    slices: int
    """Number of parts of a run: the number of ranks, or the number of heads if it is smaller; 1 for latents."""
    bytes: int
    """Bytes of one part of a run."""


class HeadSlices:
    """Cuts whole blocks into the slices of tensor ranks, and joins the slices of all ranks to whole blocks."""

    def __init__(self, spec: ModelSpec, ranks: int, tokens_per_block: int, itemsize: int) -> None:
        """`spec` has the dimensions of the whole model; `itemsize` is the number of bytes of one value in the cache."""
        self.ranks = ranks
        self.shapes = [block_shape(group, tokens_per_block) for group in layer_groups(spec)]
        """For each group of layers, the shape of a whole block."""
        self._groups: list[GroupSlices] = []
        for group, shape in zip(layer_groups(spec), self.shapes, strict=True):
            runs, slices = (1, 1) if group.latent else (2 * len(group.layers), min(ranks, spec.kv_heads))
            self._groups.append(GroupSlices(runs, slices, math.prod(shape) * itemsize // (runs * slices)))
        self.block_bytes = sum(group.runs * group.slices * group.bytes for group in self._groups)
        """Bytes of a whole block, added up over all groups."""

    def cut(self, blocks: Tensor, rank: int) -> Tensor:
        """Return the slices of one rank, `(blocks, bytes of a rank)`, of whole blocks `(blocks, bytes)`."""
        sizes = [group.runs * group.slices * group.bytes for group in self._groups]
        parts = []
        for group, whole in zip(self._groups, blocks.split(sizes, dim=1), strict=True):
            pieces = whole.reshape(len(blocks), group.runs, group.slices, group.bytes)
            parts.append(pieces[:, :, rank * group.slices // self.ranks].flatten(1))
        return torch.cat(parts, dim=1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return whole blocks `(blocks, bytes)`, joined from the slices of all ranks, in the order of the ranks."""
        sizes = [group.runs * group.bytes for group in self._groups]
        by_rank = [part.split(sizes, dim=1) for part in parts]
        whole = []
        for number, group in enumerate(self._groups):
            different = [ranks[number] for ranks in by_rank[:: self.ranks // group.slices]]
            runs = [part.reshape(len(part), group.runs, group.bytes) for part in different]
            whole.append(torch.stack(runs, dim=2).flatten(1))
        return torch.cat(whole, dim=1)
