"""Memory of the records of packed chunks (in host memory, or on the device for the first chunks), and access to their state by element.

The elements of all chunks are numbered; the number of an element is its position. A part of a state tensor is identified by a tensor on the
meta device (`state.parts.EncodedState`). Its storage offset is (index of the state) × (number of positions) + position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.kernels.pinned import allocate_pinned
from meshwright.optim.chunks import OptimizerChunk
from meshwright.optim.packing import (
    BLOCK,
    MASTER,
    NEAREST,
    SCALE,
    ChunkPacking,
    join_master,
    moment_of,
    put_master,
    put_moment,
    put_tie_bits,
    rounded_down_of,
)
from meshwright.spec.optimizers import MOMENTS

RecordOf = Callable[[int], Tensor]
"""A function that returns the record of a chunk as uint8, on any device."""
RoundedOf = Callable[[int, int], Tensor]
"""A function that returns the bf16 weights of a range (start, count) of positions inside one parameter, on any device."""


class ChunkMemory:
    """The records of `chunks`. The records of the first `on_device` chunks are on the device and are never copied.

    Raises OutOfResources if host memory cannot be pinned.
    """

    def __init__(
        self,
        owner: object,
        device: torch.device,
        packing: ChunkPacking,
        chunks: Sequence[OptimizerChunk],
        on_device: int,
    ) -> None:
        self._owner = owner
        self._device = device
        self.packing = packing
        self.chunks = list(chunks)
        self.on_device = on_device
        sizes = [packing.bytes(chunk.size) for chunk in chunks]
        self.positions = sum(chunk.size for chunk in chunks)
        self._starts = [chunk.start for chunk in chunks]
        self.slices: list[slice] = []
        """For each record, its range of bytes in `device_records` or `host_records`."""
        for number, size in enumerate(sizes):
            start = self.slices[-1].stop if self.slices and number != on_device else 0
            self.slices.append(slice(start, start + size))
        self.device_bytes = sum(sizes[:on_device])
        self.host_bytes = sum(sizes[on_device:])
        self.device_records = torch.zeros(self.device_bytes, dtype=torch.uint8, device=device)
        self.host_records = self.allocate(self.host_bytes, "the optimizer")

    def allocate(self, size: int, purpose: str, *, in_parts: bool = False) -> Tensor:
        """Return `size` zero bytes in host memory, which are pinned if the device is a GPU.

        `purpose` is named in the error if memory is short. `in_parts` as in `allocate_pinned`.
        """
        if self._device.type != "cuda":
            return torch.zeros(size, dtype=torch.uint8)
        return allocate_pinned(self._owner, size, purpose, in_parts=in_parts)

    def record(self, number: int) -> Tensor:
        """Return the record of a chunk where it is kept, on the device or in host memory."""
        return (self.device_records if number < self.on_device else self.host_records)[self.slices[number]]

    def handle(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor on the meta device that stands for all state, `(states, positions)`."""
        return torch.empty(len(self.packing.states), self.positions, dtype=dtype, device="meta")

    def locate(self, offset: int) -> tuple[str, int]:
        """Return the name of the state and the position that belong to an element of the `handle`, given its storage offset."""
        state, position = divmod(offset, max(1, self.positions))
        return self.packing.states[min(state, len(self.packing.states) - 1)], position

    def overlaps(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Divide a range of positions by chunks. Yields the number of the chunk, and the first and last index of the range in it."""
        end = start + count
        number = bisect_right(self._starts, start) - 1
        while start < end:
            chunk = self.chunks[number]
            stop = min(end, chunk.start + chunk.size)
            yield number, start - chunk.start, stop - chunk.start
            start = stop
            number = number + 1

    def fields(self, number: int, record: Tensor, first: int, last: int) -> dict[str, Tensor]:
        """Return views of elements [first, last) of a record, by field. Scales of 8-bit moments are given for whole blocks."""
        views = self.packing.fields(record, self.chunks[number].size)
        return {
            name: view[first // BLOCK : -(-last // BLOCK)]
            if view.numel() < self.chunks[number].size
            else view[first:last]
            for name, view in views.items()
        }

    def read(self, state: str, start: int, count: int, record_of: RecordOf, rounded_of: RoundedOf) -> Tensor:
        """Return the values of a state at `count` positions of one parameter, in host memory."""
        values = []
        for number, first, last in self.overlaps(start, count):
            begin, end = self._whole_blocks(state, first, last)
            fields = _on_host(self.fields(number, record_of(number), begin, end), state)
            if state == MASTER:
                position = self.chunks[number].start + first
                rounded = rounded_of(position, last - first).cpu()
                values.append(join_master(rounded, fields[MASTER], rounded_down_of(self.packing, fields)))
            else:
                values.append(moment_of(self.packing, state, fields)[first - begin : last - begin])
        return torch.cat(values) if values else torch.empty(0)

    def write(self, state: str, start: int, values: Tensor, rounded_of: RoundedOf) -> None:
        """Overwrite a state at positions of one parameter. Narrow moments are rounded to the nearest value."""
        done = 0
        for number, first, last in self.overlaps(start, values.numel()):
            begin, end = self._whole_blocks(state, first, last)
            live = self.fields(number, self.record(number), begin, end)
            fields = {name: field.to(values.device) for name, field in live.items()}
            part = values[done : done + last - first]
            if state == MASTER:
                rounded = rounded_of(self.chunks[number].start + first, last - first)
                updated = torch.empty_like(rounded, device=values.device)
                put_master(self.packing, part, fields, updated)
                rounded.copy_(updated)
            else:
                self._write_moment(state, part, fields, first - begin)
            for name, field in live.items():
                field.copy_(fields[name])
            done += last - first

    def _write_moment(self, state: str, values: Tensor, fields: Mapping[str, Tensor], offset: int) -> None:
        whole = moment_of(self.packing, state, fields).clone()
        down = rounded_down_of(self.packing, fields)
        whole[offset : offset + values.numel()] = values
        put_moment(self.packing, state, whole, fields, NEAREST.get(self.packing.moments, 0))
        if self.packing.tie_bits:
            put_tie_bits(self.packing, fields, down)

    def _whole_blocks(self, state: str, first: int, last: int) -> tuple[int, int]:
        if self.packing.moments != "int8" or state == MASTER:
            return first, last
        return first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK


def _on_host(fields: Mapping[str, Tensor], state: str) -> dict[str, Tensor]:
    """Return the fields that are needed to read a state, in host memory."""
    needed = (MASTER, MOMENTS[1]) if state == MASTER else (state, state + SCALE)
    return {name: field.cpu() for name, field in fields.items() if name in needed}
