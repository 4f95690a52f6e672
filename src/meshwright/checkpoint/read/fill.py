"""Copies the elements in a block of a file to the tensors that need them.

A block is a consecutive part of a file (16 MiB, `files.BLOCK_BYTES`) with its own digest. A box is a rectangular part of
a tensor. An entry is a tensor stored in a safetensors file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.checkpoint.format.contents import TensorChunk
from meshwright.checkpoint.format.header import ITEM_BYTES, TensorEntry
from meshwright.checkpoint.local_tensors import DTYPES

Store = Callable[[Tensor, Tensor], object]
"""`store(target, values)` copies values to a tensor, or to a part of it. The copy may still be running on return."""


def copy_values(target: Tensor, values: Tensor) -> None:
    """Copy values to a tensor in memory: the usual `Store`."""
    target.copy_(values, non_blocking=True)


class Destination:
    """A box of a stored entry, and the tensor that is filled with it.

    `offsets`: index of the box's first element in the entry, in elements per dimension.
    `target`: a tensor with the box's shape, on any device, of any dtype and strides.
    `store`: copies values to parts of `target`.
    `start`, `end`: the bytes [start, end) of the file contain all rows (dimension 0) that the box touches.

    `fill` accepts these bytes in parts, in any order and from several threads.
    """

    def __init__(
        self, entry: TensorEntry, offsets: tuple[int, ...], target: Tensor, store: Store = copy_values
    ) -> None:
        shape = entry.shape or (1,)
        offsets = offsets or (0,)
        target = target if target.dim() else target.view(1)
        row_bytes = math.prod(shape[1:]) * ITEM_BYTES[entry.dtype]
        self.start = entry.start + offsets[0] * row_bytes
        self.end = self.start + target.shape[0] * row_bytes
        if target.is_contiguous() and tuple(target.shape[1:]) == shape[1:]:
            # Whole rows are consecutive in the file, so they are copied as a vector.
            offsets = (offsets[0] * math.prod(shape[1:]),)
            target = target.view(-1)
            shape = (math.prod(shape),)
        self._consecutive = len(shape) == 1
        self._entry = entry
        self._shape = shape
        self._offsets = offsets
        self._target = target
        self._store = store
        self._lock = threading.Lock()
        self._missing_bytes = self.end - self.start
        self._collected: Tensor | None = None
        """The bytes of the box's rows so far, if the entry's file offset is not a multiple of its element size.

        An element can then begin in one block and end in the next, so nothing is copied before all bytes have arrived.
        """

    def fill(self, block: Tensor, block_start: int) -> None:
        """Copy the elements of the box that are in `block` to the target.

        `block` (uint8, on the host) has the bytes of the file from `block_start` on. A copy to a device may still be running
        on return.
        """
        start = max(self.start, block_start)
        end = min(self.end, block_start + block.numel())
        if start >= end:
            return
        data = block[start - block_start : end - block_start]
        if self._entry.start % ITEM_BYTES[self._entry.dtype]:
            complete = self._collect(data, start - self.start)
            if complete is None:
                return
            data = complete
            start = self.start
        values = data.view(DTYPES[self._entry.dtype])
        position = (start - self._entry.start) // ITEM_BYTES[self._entry.dtype]
        if self._consecutive:
            first = position - self._offsets[0]
            self._store(self._target[first : first + values.numel()], values)
        else:
            _scatter(values, position, self._shape, self._offsets, self._target, self._store)

    def _collect(self, data: Tensor, offset: int) -> Tensor | None:
        """Store `data` at byte `offset` of the box's rows. Return all bytes of these rows once they are complete, else None."""
        with self._lock:
            if self._collected is None:
                self._collected = torch.empty(self.end - self.start, dtype=torch.uint8)
            self._collected[offset : offset + data.numel()].copy_(data)
            self._missing_bytes -= data.numel()
            return self._collected if self._missing_bytes == 0 else None


def intersect(
    chunk: TensorChunk, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Return the intersection of a stored chunk with the box at `offsets` of `sizes`; None if it is empty.

    The result is (offsets within the chunk, offsets within the box, sizes), in elements per dimension. Example: a chunk
    with the rows 4 to 7 and a box with the rows 6 to 9 intersect in (2,), (0,), (2,).
    """
    starts = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    return (
        tuple(start - offset for start, offset in zip(starts, chunk.offsets, strict=True)),
        tuple(start - offset for start, offset in zip(starts, offsets, strict=True)),
        tuple(end - start for start, end in zip(starts, ends, strict=True)),
    )


def _scatter(
    values: Tensor, position: int, shape: tuple[int, ...], offsets: tuple[int, ...], target: Tensor, store: Store
) -> None:
    """Copy consecutive elements of a tensor of shape `shape` to a box of it.

    `values` are the elements from flat index `position` on. They may begin and end within a row. `target` is the box that
    begins at `offsets`. Whole rows are copied at once; a part of a row is handled as a tensor with one dimension less.
    """
    first_row = offsets[0]
    row_count = target.shape[0]
    row_elements = math.prod(shape[1:])
    while values.numel():
        row, column = divmod(position, row_elements)
        whole_rows = 0 if column else values.numel() // row_elements
        if whole_rows:
            used = whole_rows * row_elements
        else:  # The rest of the row, or as much of it as there is.
            used = min(row_elements - column, values.numel())
        start = max(row, first_row)
        end = min(row + max(whole_rows, 1), first_row + row_count)
        if start < end and whole_rows:
            part = values[(start - row) * row_elements : (end - row) * row_elements].view(end - start, *shape[1:])
            for dim in range(1, len(shape)):
                part = part.narrow(dim, offsets[dim], target.shape[dim])
            store(target[start - first_row : end - first_row], part)
        elif start < end:  # A part of a row.
            _scatter(values[:used], column, shape[1:], offsets[1:], target[row - first_row], store)
        values = values[used:]
        position = position + used
