"""Copy the elements that a block of a file holds into the tensors that need them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.checkpoint.contents import Chunk
from meshwright.checkpoint.header import ITEM_BYTES, Entry
from meshwright.checkpoint.shards import DTYPES


class Destination:
    """A box of a stored entry, and the elements of a rank's tensor that it fills.

    `offsets` is where the box begins in the entry; `target` has the box's shape, on any device, with any dtype and stride. Bytes `start`
    to `end` of the file cover the box; `fill` takes them in pieces, in any order, from several threads.
    """

    def __init__(self, entry: Entry, offsets: tuple[int, ...], target: Tensor) -> None:
        shape = entry.shape or (1,)
        offsets, target = offsets or (0,), target if target.dim() else target.view(1)
        row = math.prod(shape[1:]) * ITEM_BYTES[entry.dtype]
        self.start, self.end = entry.start + offsets[0] * row, entry.start + (offsets[0] + target.shape[0]) * row
        if target.is_contiguous() and tuple(target.shape[1:]) == shape[1:]:  # whole rows: one run of elements
            offsets, target = (offsets[0] * math.prod(shape[1:]),), target.view(-1)
            shape = (math.prod(shape),)
        self._entry, self._shape, self._offsets, self._target = entry, shape, offsets, target
        self._lock = threading.Lock()
        self._missing = self.end - self.start
        self._staged: Tensor | None = None
        """All bytes of an entry that is not aligned to its elements, which blocks may cut apart."""

    def fill(self, block: Tensor, first: int) -> None:
        """Copy what `block`, the bytes of the file from `first` on, holds of the box. Copies to a device may still run on return."""
        start, end = max(self.start, first), min(self.end, first + block.numel())
        if start >= end:
            return
        data = block[start - first : end - first]
        if self._entry.start % ITEM_BYTES[self._entry.dtype]:
            staged = self._stage(data, start - self.start)
            if staged is None:
                return
            data, start = staged, self.start
        values = data.view(DTYPES[self._entry.dtype])
        position = (start - self._entry.start) // ITEM_BYTES[self._entry.dtype]
        _scatter(values, position, self._shape, self._offsets, self._target)

    def _stage(self, data: Tensor, at: int) -> Tensor | None:
        """Keep the bytes; return all bytes of the box's rows once they are complete."""
        with self._lock:
            if self._staged is None:
                self._staged = torch.empty(self.end - self.start, dtype=torch.uint8)
            self._staged[at : at + data.numel()].copy_(data)
            self._missing -= data.numel()
            return self._staged if self._missing == 0 else None


def boxes_in(chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """Intersection of a box with a stored chunk: first element in chunk, first element in box, sizes; None if empty."""
    starts = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    return (
        tuple(start - a for start, a in zip(starts, chunk.offsets, strict=True)),
        tuple(start - a for start, a in zip(starts, offsets, strict=True)),
        tuple(end - start for start, end in zip(starts, ends, strict=True)),
    )


def _scatter(values: Tensor, position: int, shape: tuple[int, ...], offsets: tuple[int, ...], target: Tensor) -> None:
    """Copy consecutive elements of a tensor of `shape`, from flat `position` on, into the box at `offsets` that `target` is."""
    first, size = offsets[0], target.shape[0]
    row = math.prod(shape[1:])
    while values.numel():
        index, inside = divmod(position, row)
        rows = 0 if inside else values.numel() // row
        used = rows * row or min(row - inside, values.numel())
        start, end = max(index, first), min(index + max(rows, 1), first + size)
        if start < end and rows:
            part = values[(start - index) * row : (end - index) * row].view(end - start, *shape[1:])
            for dim in range(1, len(shape)):
                part = part.narrow(dim, offsets[dim], target.shape[dim])
            target[start - first : end - first].copy_(part, non_blocking=True)
        elif start < end:
            _scatter(values[:used], inside, shape[1:], offsets[1:], target[index - first])
        values, position = values[used:], position + used
