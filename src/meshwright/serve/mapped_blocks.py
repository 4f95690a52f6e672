"""Cache blocks that one engine copies out of the memory of another one, without a staging buffer in between.

The owner exports the tensors of its cache, and keeps blocks unchanged until they are copied. The other engine maps them, and one kernel
copies blocks into its own cache and computes their checksums, which the owner has computed too: each byte is read and written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.range_copies import ALIGNMENT, Range, copy_ranges
from meshwright.parallel import mapped_memory
from meshwright.parallel.mapped_memory import ExportedMemory, MappedMemory, NotMappable

Table = Sequence[int]
"""The block of each group of layers."""


class OwnBlocks:
    """The blocks of this engine's cache, for engines that map them or whose blocks are copied into them."""

    def __init__(self, contents: Sequence[Tensor]) -> None:
        """`contents` are the bytes of all blocks of each group, `(blocks, bytes)`."""
        self._contents, self._device = contents, contents[0].device
        self.sizes = [content.shape[1] for content in contents]
        """Bytes of a block of each group."""

    @property
    def host(self) -> str:
        """Name of the host if blocks can be mapped by other processes there; else empty."""
        aligned = all(size % ALIGNMENT == 0 for size in self.sizes)
        return mapped_memory.host_name() if aligned and mapped_memory.mappable(self._device) else ""

    def offer(self) -> list[dict[str, Any]] | None:
        """What `map` needs, for a message; None if the blocks cannot be mapped."""
        if not self.host:
            return None
        try:
            exported = [mapped_memory.export(content) for content in self._contents]
        except NotMappable:
            return None
        self._load_kernel()
        return [
            {"handle": memory.handle.hex(), "offset": memory.offset, "blocks": len(content)}
            for memory, content in zip(exported, self._contents, strict=True)
        ]

    def addresses(self, table: Table) -> list[int]:
        """Of one block."""
        return [
            content.data_ptr() + block * content.shape[1] for content, block in zip(self._contents, table, strict=True)
        ]

    def sums(self, tables: Sequence[Table]) -> list[list[int]]:
        """Checksums of blocks, once the steps before are computed."""
        ranges = [
            Range(address, 0, size)
            for table in tables
            for address, size in zip(self.addresses(table), self.sizes, strict=True)
        ]
        return self._copy(ranges, len(tables))

    def copy(self, source: MappedBlocks, tables: Sequence[Table], targets: Sequence[Table]) -> list[list[int]]:
        """Copy blocks of another engine over blocks of this one; the checksums of what was copied."""
        ranges = [
            Range(*addresses)
            for table, target in zip(tables, targets, strict=True)
            for addresses in zip(source.addresses(table), self.addresses(target), self.sizes, strict=True)
        ]
        return self._copy(ranges, len(tables))

    def map(self, offer: Sequence[Mapping[str, Any]]) -> MappedBlocks:
        """Map the blocks of another engine by what it offers. Raises NotMappable, KeyError, TypeError or ValueError."""
        mapped = MappedBlocks(offer, self.sizes, self._device)
        self._load_kernel()
        return mapped

    def _load_kernel(self) -> None:
        """Compile the kernel, so that no request waits for it."""
        self.sums([[0] * len(self.sizes)])

    def _copy(self, ranges: Sequence[Range], blocks: int) -> list[list[int]]:
        return copy_ranges(ranges, self._device).view(blocks, -1).tolist()


class MappedBlocks:
    """The blocks of another engine's cache."""

    def __init__(self, offer: Sequence[Mapping[str, Any]], sizes: Sequence[int], device: torch.device) -> None:
        """`sizes` are bytes of a block of each group. Raises as `OwnBlocks.map`."""
        self._sizes, self._counts = sizes, [int(group["blocks"]) for group in offer]
        self._memories: list[MappedMemory] = []
        try:
            for group, size, count in zip(offer, sizes, self._counts, strict=True):
                exported = ExportedMemory(bytes.fromhex(group["handle"]), int(group["offset"]))
                self._memories.append(MappedMemory(exported, count * size, device))
        except BaseException:
            self.close()
            raise

    def addresses(self, table: Table) -> list[int]:
        """Of one block. Raises ValueError for a block that is not there."""
        if not all(type(block) is int and 0 <= block < count for block, count in zip(table, self._counts, strict=True)):
            raise ValueError(f"blocks {table}: not there")
        memories = zip(self._memories, table, self._sizes, strict=True)
        return [memory.address + block * size for memory, block, size in memories]

    def close(self) -> None:
        """Unmap them."""
        for memory in self._memories:
            memory.close()
        self._memories = []
