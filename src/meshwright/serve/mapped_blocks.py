"""Direct copies of cache blocks from the memory of one engine into the cache of another engine, without a staging buffer.

The engine that owns the blocks exports the tensors of its cache, and does not change the blocks until they are copied. The other engine
maps these tensors. One kernel copies the blocks into the cache of this engine and computes their checksums, so each byte is read and
written only once. The owner computes the checksums too, to compare them.

The argument `tables` of the functions is a list `(blocks, groups)`: for each block, its number in each group of layers.
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
    """The blocks of this engine's cache. Other engines can map them, and blocks of other engines can be copied into them."""

    def __init__(self, contents: Sequence[Tensor]) -> None:
        """`contents` has, for each group of layers, the bytes of all its blocks, `(blocks, bytes)` uint8."""
        self._contents = contents
        self._device = contents[0].device
        self.sizes = np.array([content.shape[1] for content in contents])
        """`(groups,)`: bytes of a block of each group."""
        self._starts = np.array([content.data_ptr() for content in contents])

    @property
    def host(self) -> str:
        """Name of this host, if other processes on it can map the blocks; else an empty string."""
        aligned = not (self.sizes % ALIGNMENT).any() and not (self._starts % ALIGNMENT).any()
        return mapped_memory.host_name() if aligned and mapped_memory.mappable(self._device) else ""

    def offer(self) -> list[dict[str, Any]] | None:
        """Return what another engine needs to map this cache: for each group a handle, an offset and the number of blocks.

        Returns None if the blocks cannot be mapped.
        """
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
        """Map the blocks of another engine. `offer` is the result of `offer` of that engine.

        Raises NotMappable if the memory cannot be mapped; KeyError, TypeError or ValueError if the offer is malformed.
        """
        mapped = MappedBlocks(offer, self.sizes.tolist(), self._device)
        self._load_kernel()
        return mapped

    def sums(self, tables: Sequence[Sequence[int]]) -> Integers:
        """Return checksums of blocks, `(blocks, sums)`. It waits until the device has computed the steps that were launched before."""
        return self._copy(self._starts + np.array(tables) * self.sizes, np.int64(0))

    def copy(self, source: MappedBlocks, tables: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Integers:
        """Copy the blocks `tables` of another engine into the blocks `targets` of this engine. Both are `(blocks, groups)`.

        Returns checksums of the copied bytes, `(blocks, sums)`. Raises ValueError if `tables` has another shape, or a block that the other
        engine does not have.
        """
        return self._copy(source.addresses(tables), self._starts + np.array(targets) * self.sizes)

    def _copy(self, sources: Integers, targets: Integers | np.int64) -> Integers:
        ranges = np.stack(np.broadcast_arrays(sources, targets, self.sizes), axis=-1).reshape(-1, 3)
        return copy_ranges(torch.from_numpy(ranges), self._device).cpu().numpy().reshape(len(sources), -1)

    def _load_kernel(self) -> None:
        """Run the kernel once on block 0, so that it is compiled before a request needs it."""
        self.sums([[0] * len(self.sizes)])


class MappedBlocks:
    """The blocks of another engine's cache, mapped into this process."""

    def __init__(self, offer: Sequence[Mapping[str, Any]], sizes: Sequence[int], device: torch.device) -> None:
        """`offer` is the result of `OwnBlocks.offer`; `sizes` has the bytes of a block of each group. Raises as `OwnBlocks.map`."""
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
        """Return the address of each block in each group, `(blocks, groups)`.

        Raises ValueError if `tables` has another shape, or a block that the other engine does not have.
        """
        blocks = np.array(tables)
        if blocks.ndim != 2 or blocks.shape[1] != len(self._counts) or blocks.dtype != np.int64:
            raise ValueError("tables: expected a list of integers for each block, one for each group")
        if (blocks < 0).any() or (blocks >= self._counts).any():
            raise ValueError("tables: a block that is not there")
        return self._starts + blocks * self._sizes

    def close(self) -> None:
        """Unmap the memory of the other engine."""
        for memory in self._memories:
            memory.close()
        self._memories = []
