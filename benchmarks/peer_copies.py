"""Gathers and sums by copies from peers' memory, an implementation in the gather benchmark (gathers.py).

The ranks of a host write data for others into memory that all of them map, and copy data from the others' memory. Flags in the same memory
order the copies in stream order: 4-byte copies to the peers set them, and the driver's stream memory operations (CUDA driver API, "Stream
Memory Operations") wait for them, so neither the host nor a kernel waits. A slot is overwritten only after every peer has copied its
contents. On 2 H200s its gathers were slower than NCCL's copy engines, and its sums faster than NCCL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.stream_memory import wait_at_least, write

STAGING_BYTES = 256 << 20
"""Bytes of all ranks' data that a sum processes at a time."""
ALIGNMENT = 256
"""Alignment of slots in bytes, so that copies run at full width."""
READY, COPIED = 0, 1
"""Flags of a ring: a rank has written its slot; a rank has copied its data from all slots."""
Pairs = Sequence[tuple[Tensor, Tensor]]
"""(target, source)."""
Event = Any


class Ring:
    """`slots` slots of `size` bytes in a window from byte `first`, used cyclically by all ranks; `flags` are its two flags."""

    def __init__(self, window: DeviceWindow, first: int, size: int, slots: int, flags: tuple[int, int]) -> None:
        self.window, self._first, self._size, self._slots, self._flags = window, first, size, slots, flags
        self._uses = 0

    def begin(self) -> None:
        """Advance to the next slot: the current stream waits until every peer has copied its contents."""
        self._uses += 1
        if self._uses > self._slots:
            self.window.wait_for_flags(self._flags[COPIED], self._uses - self._slots)

    def exchange_ready(self) -> None:
        """Signal that this rank's slot is written; the current stream waits until those of the peers are."""
        self.window.set_flags(self._flags[READY], self._uses)
        self.window.wait_for_flags(self._flags[READY], self._uses)

    def signal_copied(self) -> None:
        """Signal that this rank has copied its data from the peers' slots."""
        self.window.set_flags(self._flags[COPIED], self._uses)

    def slot(self, owner: int, start: int, like: Tensor) -> Tensor:
        """A view of `owner`'s current slot from element `start`, with the dtype and number of elements of `like`."""
        size = like.element_size()
        first = self._first + (self._uses - 1) % self._slots * self._size
        return self.window.bytes_of(owner, first + start * size, like.numel() * size).view(like.dtype)


class Copies:
    """Copies from peers' memory, distributed over `streams` streams in addition to the current one."""

    def __init__(self, device: torch.device, streams: int) -> None:
        count = streams if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(count)]

    def run(self, pairs: Pairs) -> None:
        """Copy every (target, source); the current stream waits for all copies."""
        self.join(self.start(pairs))

    def start(self, pairs: Pairs) -> list[Event]:
        """Start the copies after the current stream's work without blocking it; returns events for `join`."""
        if not self._streams:
            for target, source in pairs:
                target.copy_(source)
            return []
        start_event = torch.cuda.current_stream().record_event()
        parts = split_over_streams(pairs, len(self._streams))
        return [self._copy(stream, start_event, part) for stream, part in zip(self._streams, parts, strict=True)]

    def _copy(self, stream: torch.cuda.Stream, begin: Event, pairs: Pairs) -> Event:
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def join(self, started: Sequence[Event]) -> None:
        """Make the current stream wait for copies."""
        for event in started:
            torch.cuda.current_stream().wait_event(event)


def split_over_streams(pairs: Pairs, count: int) -> list[Pairs]:
    """Lists of copies for `count` streams: whole copies round-robin, or parts of each copy if there are fewer copies than streams."""
    if len(pairs) >= count:
        return [pairs[number::count] for number in range(count)]
    split_pairs = [[tensor.tensor_split(count) for tensor in pair] for pair in pairs]
    return [[(target[number], source[number]) for target, source in split_pairs] for number in range(count)]


class PeerGather:
    """An all-gather through a window: each rank writes its shard and copies those of the others."""

    def __init__(self, ring: Ring, copies: Copies) -> None:
        self._ring, self._copies = ring, copies

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> None:
        """Fill `output_tensor` `(ranks × n,)` with every rank's `input_tensor` `(n,)`, in rank order."""
        ring, window = self._ring, self._ring.window
        ring.begin()
        ring.slot(window.rank, 0, input_tensor).copy_(input_tensor)
        ring.exchange_ready()
        shards = output_tensor.view(window.ranks, -1)
        self._copies.run([(shards[peer], ring.slot(peer, 0, input_tensor)) for peer in peers_of(window)])
        ring.signal_copied()
        if shards[window.rank].data_ptr() != input_tensor.data_ptr():
            shards[window.rank].copy_(input_tensor)


class PeerReduce:
    """A reduce-scatter through a window: each rank copies its part of every peer's gradient, and adds them in rank order.

    `allocate` returns the input buffer, which is memory of the window, so the input is not copied into it.
    """

    def __init__(self, ring: Ring, copies: Copies) -> None:
        self._ring, self._copies = ring, copies
        self._input_buffer: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input first, `(ranks × n,)`, then the output `(n,)`."""
        if self._input_buffer is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        self._ring.begin()
        shape_only = torch.empty((), dtype=dtype, device=device).expand(*size)
        self._input_buffer = self._ring.slot(self._ring.window.rank, 0, shape_only)
        return self._input_buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, op: Any = None, async_op: bool = False
    ) -> None:
        """Set `output_tensor` `(n,)` to the sum over ranks of this rank's part of their `input_tensor` `(ranks × n,)`."""
        buffer, self._input_buffer = self._input_buffer, None
        assert buffer is not None and buffer.data_ptr() == input_tensor.data_ptr(), (
            "the input is the buffer that `allocate` returned"
        )
        self._ring.exchange_ready()
        # The next piece is copied into one staging buffer while the piece in the other is summed.
        chunks = output_tensor.split(max(1, STAGING_BYTES // output_tensor.element_size() // self._ring.window.ranks))
        staging_buffers = [chunks[0].new_empty(self._ring.window.ranks, len(chunks[0])) for _ in chunks[:2]]
        next_copies = self._start(staging_buffers[0], chunks[0], output_tensor)
        for number, chunk in enumerate(chunks):
            copies_of_chunk, next_copies = next_copies, []
            if number + 1 < len(chunks):
                next_copies = self._start(staging_buffers[(number + 1) % 2], chunks[number + 1], output_tensor)
            self._copies.join(copies_of_chunk)
            torch.sum(
                staging_buffers[number % 2][:, : len(chunk)], 0, out=chunk
            )  # bf16 is added up in fp32 and rounded once
        self._ring.signal_copied()

    def _start(self, staging_buffer: Tensor, chunk: Tensor, output: Tensor) -> list[Event]:
        """Start to copy every rank's elements for `piece` of `output` into the rows of `staging_buffer`."""
        ring, window = self._ring, self._ring.window
        start = window.rank * output.numel() + int(chunk.storage_offset() - output.storage_offset())
        started = self._copies.start(
            [(staging_buffer[peer, : len(chunk)], ring.slot(peer, start, chunk)) for peer in peers_of(window)]
        )
        staging_buffer[window.rank, : len(chunk)].copy_(ring.slot(window.rank, start, chunk))
        return started


def peers_of(window: DeviceWindow) -> list[int]:
    """The other ranks, starting with the next one, so that at any time only one rank reads from each."""
    return [(window.rank + step) % window.ranks for step in range(1, window.ranks)]


class DeviceWindow:
    """A window of memory that the CUDA devices of a host map mutually. Collective over `group`; synchronises the device once."""

    def __init__(self, group: dist.ProcessGroup, size: int, flags: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.rank, self.ranks = group.rank(), group.size()
        self._words = flags * self.ranks
        self._flag_bytes = aligned(4 * self._words)
        memory = symmetric.empty(self._flag_bytes + size, dtype=torch.uint8, device=device)
        memory[: self._flag_bytes].zero_()
        torch.cuda.synchronize(device)  # flags are zero before a peer can write one
        self._handle = symmetric.rendezvous(memory, group.group_name)
        self._memory = [self._handle.get_buffer(peer, memory.shape, torch.uint8) for peer in range(self.ranks)]
        self._memory[self.rank] = memory
        self._flags = [memory[: 4 * self._words].view(torch.int32) for memory in self._memory]

    def bytes_of(self, owner: int, first: int, count: int) -> Tensor:
        return self._memory[owner][self._flag_bytes + first :][:count]

    def set_flags(self, flag: int, value: int) -> None:
        word = flag * self.ranks + self.rank
        own_flag = self._flags[self.rank][word : word + 1]
        write(own_flag, value)
        for peer in peers_of(self):
            self._flags[peer][word : word + 1].copy_(own_flag, non_blocking=True)

    def wait_for_flags(self, flag: int, value: int) -> None:
        first = flag * self.ranks
        wait_at_least([self._flags[self.rank][first + peer : first + peer + 1] for peer in peers_of(self)], value)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
