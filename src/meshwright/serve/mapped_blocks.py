"""Cache blocks that one engine copies out of the memory of another one, without a staging buffer in between.

The owner exports the tensors of its cache, and does not change blocks until they are copied. The other engine maps these tensors. One
kernel copies blocks into its own cache and computes their checksums, so each byte is read and written once. The owner computes the
checksums too. Block tables are int arrays `(blocks, groups)` with the block of each group of layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.kernels.range_copies import ALIGNMENT, copy_ranges
from meshwright.parallel import mapped_memory
from meshwright.parallel.mapped_memory import ExportedMemory, MappedMemory, NotMappable

log = logging.getLogger("meshwright.server")
Integers = NDArray[np.int64]


class OwnBlocks:
    """The blocks of this engine's cache, for engines that map them or whose blocks are copied into them."""

    def __init__(self, contents: Sequence[Tensor]) -> None:
        """`contents` are the bytes of all blocks of each group, `(blocks, bytes)`."""
        self._contents = contents
        self._device = contents[0].device
        self.sizes = np.array([content.shape[1] for content in contents])
        """Bytes of a block of each group."""
        self._starts = np.array([content.data_ptr() for content in contents])

    @property
    def host(self) -> str:
        """Name of the host if blocks can be mapped by other processes there; else empty."""
        aligned = not (self.sizes % ALIGNMENT).any() and not (self._starts % ALIGNMENT).any()
        return mapped_memory.host_name() if aligned and mapped_memory.mappable(self._device) else ""

    def offer(self) -> list[dict[str, Any]] | None:
        """Return the handles of this cache's blocks, which `map` needs; None if the blocks cannot be mapped."""
        if not self.host:
            return None
        try:
            exported = [mapped_memory.export(content) for content in self._contents]
        except NotMappable as error:
            log.warning("cache blocks go through host memory: this cache cannot be mapped (%s)", error)
            return None
        self._load_kernel()
        return [
            {"handle": memory.handle.hex(), "offset": memory.offset, "blocks": len(content)}
            for memory, content in zip(exported, self._contents, strict=True)
        ]

    def map(self, offer: Sequence[Mapping[str, Any]]) -> MappedBlocks:
        """Map the blocks of another engine from its offer. Raises NotMappable, KeyError, TypeError or ValueError."""
        mapped = MappedBlocks(offer, self.sizes.tolist(), self._device)
        self._load_kernel()
        return mapped

    def sums(self, tables: Sequence[Sequence[int]]) -> Integers:
        """Checksums of blocks `(blocks, sums)`, once the steps before are computed."""
        return self._copy(self._starts + np.array(tables) * self.sizes, np.int64(0))

    def copy(self, source: MappedBlocks, tables: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Integers:
        """Copy blocks of another engine over blocks of this one; returns checksums `(blocks, sums)` of the copied content.

        Raises ValueError for tables of other shapes, and for blocks that the other engine does not have.
        """
        return self._copy(source.addresses(tables), self._starts + np.array(targets) * self.sizes)

    def _copy(self, sources: Integers, targets: Integers | np.int64) -> Integers:
        ranges = np.stack(np.broadcast_arrays(sources, targets, self.sizes), axis=-1).reshape(-1, 3)
        return copy_ranges(torch.from_numpy(ranges), self._device).cpu().numpy().reshape(len(sources), -1)

    def _load_kernel(self) -> None:
        """Compile the kernel, so that no request waits for it."""
        self.sums([[0] * len(self.sizes)])


class MappedBlocks:
    """The blocks of another engine's cache."""

    def __init__(self, offer: Sequence[Mapping[str, Any]], sizes: Sequence[int], device: torch.device) -> None:
        """`sizes` are bytes of a block of each group. Raises as `OwnBlocks.map`."""
        self._sizes = np.array(sizes)
        self._counts = [int(group["blocks"]) for group in offer]
        self._memories: list[MappedMemory] = []
        try:
            for group, size, count in zip(offer, sizes, self._counts, strict=True):
                if int(group["offset"]) % ALIGNMENT:
                    raise ValueError(f"offset: expected a multiple of {ALIGNMENT}")
                exported = ExportedMemory(bytes.fromhex(group["handle"]), int(group["offset"]))
                self._memories.append(MappedMemory(exported, count * size, device))
        except BaseException:
            self.close()
            raise
        self._starts = np.array([memory.address for memory in self._memories])

    def addresses(self, tables: Sequence[Sequence[int]]) -> Integers:
        """Return the addresses of blocks, `(blocks, groups)`.

        Raises ValueError for a table of another shape and for a block that is not there.
        """
        blocks = np.array(tables)
        if blocks.ndim != 2 or blocks.shape[1] != len(self._counts) or blocks.dtype != np.int64:
            raise ValueError("tables: expected a list of integers for each block, one for each group")
        if (blocks < 0).any() or (blocks >= self._counts).any():
            raise ValueError("tables: a block that is not there")
        return self._starts + blocks * self._sizes

    def close(self) -> None:
        """Unmap them."""
        for memory in self._memories:
            memory.close()
        self._memories = []
