"""AdamW with its state in host memory: packed chunks are copied to the device, updated there, and copied back.

A *chunk* is a range of at most a fixed number of elements of the parameters, in the order of the next forward (`chunks`). Its *record* has
the packed state that is not in the device's parameters: moments, and a remainder of the master weights where weights are gathered in bf16
(`packing`). With `fraction` below 1 the records of the first chunks stay on the device; the other chunks are streamed. In each step a
streamed chunk passes through:

1. Fetch: its record is copied from host memory to the next staging buffer of a ring.
2. Update: a kernel updates the record in its buffer, and the weights, once the gradients' factor is known.
3. Send: the record is copied from its buffer to host memory; the buffer is free again.

Streams of their own fetch, update and send, so both directions of the link are busy and no forward delays an update (`copy_streams`). A
chunk is fetched as soon as its buffer is free: the first chunks of a step, as many as there are buffers, during the forward and backward
before their update. Copies are launched throughout the step by `launch_copies`, a few at a time, and all that are left before the host
launches updates that wait for the gradients' norm.

Over all steps, sent <= updated <= fetched <= sent + buffers. As there are at most as many buffers as streamed chunks, a chunk's result of
one step is on its way to the host before the chunk is fetched for the next step.

`complete_updates` makes the compute stream wait for the updates of the unit that is gathered next; later chunks are copied and updated
beside the forward. On a GPU the host launches chunks ahead of their use. It waits for copies in two cases: when the state is read, as for a
checkpoint, and in a step beside the copies of a snapshot without second buffers, chunk by chunk. With second buffers such a step sends its
results to these and leaves the first to the snapshot.

The update uses the arithmetic of the optimizer on the device, so both give the same bits. Method: Ren et al. 2021 (ZeRO-Offload) for the
location of the state; Maurya et al. 2024 (Deep Optimizer States) for the update on the device.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.pinned import slices_within_parts
from meshwright.optim.chunk_memory import ChunkMemory
from meshwright.optim.chunks import ALIGNED, ChunkSegment, OptimizerChunk, groups_in_order, plan_chunks
from meshwright.optim.copy_streams import CopyStreams
from meshwright.optim.fused import Coefficients, UpdateInputs, new_count
from meshwright.optim.host_snapshot import HostBuffers, SecondBuffers
from meshwright.optim.packed_update import StepTable, update_segment
from meshwright.optim.packing import BLOCK, MASTER, ChunkPacking
from meshwright.spec.plan import Moments
from meshwright.state.snapshot import SnapshotCopies
from meshwright.workload.buffers import STAGING_BUFFERS, staged_elements

LAUNCHED_AHEAD = 32
"""Chunks that the host launches on a GPU before they are needed, so that the link is busy while it launches other work.

A stream's launch queue holds about a thousand operations, and streams may share one: with all chunks launched at once the host would wait
for the queue, and kernels of the forward would queue behind updates that wait for copies.
"""
CPU_CHUNK_ELEMENTS = 1 << 16
"""Elements per chunk on a CPU: few, so that small models have several chunks."""

SpanFactory = Callable[[str, str], AbstractContextManager[None]]
"""Creates the profiler span of a copy from its name and its lane."""
Release = Callable[[], Tensor]
"""Frees a parameter's master weight on the device; returns this rank's part in a narrower dtype, which remains."""


@dataclass
class _PendingUpdate:
    """A step's update; `results` are the host records to write."""

    gradients: dict[str, Tensor]
    table: StepTable | None
    """None without gradients."""
    span: SpanFactory | None
    copies: SnapshotCopies | None
    results: Tensor
    events: list[Any] = field(default_factory=list)
    """The end of each chunk's update that was launched."""
    completed: int = 0
    """Chunks that the compute stream waits for."""


@dataclass(frozen=True)
class _UpdatedChunk:
    """A chunk whose update was launched, to be copied from its staging buffer to `target`, the records of all chunks."""

    number: int
    buffer: int
    update: Any
    """The event at the end of its update."""
    target: Tensor
    span: SpanFactory | None


class HostAdamW:
    """AdamW of the `parts` of one rank, of one dtype and device, in the order of the forward, with state in host memory.

    `decays` has the weight decay of each parameter; `release` has the function that releases its master weight, for all or for none.
    `fraction` of the elements have their record in host memory, the first ones on the device. `staging` is the size of the staging buffers
    in bytes; at least `STAGING_BUFFERS` of them are allocated, or one for each streamed chunk. `chunk` is the most elements of a chunk: by
    default `staged_elements` on a GPU. `ahead` chunks are launched before they are needed: by default `LAUNCHED_AHEAD` on a GPU, none on a
    CPU, which does not run them beside the forward. Raises OutOfResources when host memory cannot be pinned.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        decays: Mapping[str, float],
        release: Mapping[str, Release],
        *,
        coefficients: Coefficients,
        moments: Moments = "fp32",
        fraction: float = 1.0,
        staging: int = 0,
        chunk: int | None = None,
        ahead: int | None = None,
    ) -> None:
        assert not release or release.keys() == parts.keys()
        self._parts = dict(parts)
        self._release = dict(release)
        self._coefficients = coefficients
        like = next(iter(parts.values()))
        self._device = like.device
        self._dtype = like.dtype
        self._packing = ChunkPacking(bool(release), moments, like.dtype)
        default = CPU_CHUNK_ELEMENTS
        if self._device.type == "cuda":
            default = int(staged_elements(self._packing.bytes(BLOCK) / BLOCK))
        sizes = {name: part.numel() for name, part in parts.items()}
        self._chunks = plan_chunks(groups_in_order(sizes, decays), chunk or default)
        if ahead is None:
            ahead = LAUNCHED_AHEAD if self._device.type == "cuda" else 0
        self._ahead = ahead
        self._memory = ChunkMemory(
            self, self._device, self._packing, self._chunks, _chunks_on_device(self._chunks, fraction)
        )
        self._handle = self._memory.handle(like.dtype)
        self._second: SecondBuffers | None = None
        self._starts = {s.name: entry.start + s.offset for entry in self._chunks for s in entry.segments if not s.first}
        self._last_chunk = {s.name: number for number, entry in enumerate(self._chunks) for s in entry.segments}
        self._names_by_start = sorted((start, name) for name, start in self._starts.items())
        self._counts = {name: new_count(self._device) for name in parts}
        self._resident: dict[str, Tensor] = {}
        self._pending: _PendingUpdate | None = None
        self._span: SpanFactory | None = None
        self._snapshot_copied = False
        self._lock = threading.RLock()
        self._allocate_staging(staging)
        self._unsent: deque[_UpdatedChunk] = deque()
        self._steps_ended = 0
        """Steps of which all updates were launched."""
        self._fetched = self._updated = self._sent = 0
        """Streamed chunks whose fetch, update and send were launched, counted over all steps; a chunk counts once a step.

        sent <= updated <= fetched <= sent + buffers, and there are at most as many buffers as streamed chunks.
        """
        self.deferred = False
        """Whether later compute waits for updates only at `complete_updates`."""

    def _allocate_staging(self, size: int) -> None:
        """Allocate staging buffers of `size` bytes in all, but at least `STAGING_BUFFERS` where there are as many streamed chunks."""
        streamed = [entry.stop - entry.start for entry in self._memory.slices[self._memory.on_device :]]
        if size >= sum(streamed):  # one buffer for each chunk, as long as its record
            sizes = streamed
        else:
            widest = max(streamed)
            sizes = [widest] * min(max(STAGING_BUFFERS, size // widest), len(streamed))
        ends = list(accumulate(sizes))
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        self._staging = [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        self._copy_streams = CopyStreams(self._device, len(sizes))

    @property
    def host_bytes(self) -> int:
        """Bytes of state in host memory."""
        return self._memory.host_bytes

    @torch.no_grad()
    def release_master_weights(self) -> None:
        """Split the current master weights: the rounded value stays on the device, the remainder goes to the records."""
        for name, release in self._release.items():
            master = self._parts[name]
            self._resident[name] = torch.empty(master.numel(), dtype=torch.bfloat16, device=self._device)
            self.write(self.part(MASTER, name), master)
            self._resident[name] = release().view(-1)

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor],
        inputs: UpdateInputs,
        concurrent_span: SpanFactory | None = None,
        copies: SnapshotCopies | None = None,
    ) -> None:
        """Update the parameters that have a gradient; a `deferred` update is completed by `complete_updates`.

        Beside `copies` of a snapshot it writes to the second buffers; without these each chunk waits for copies of its parameters' state.
        """
        self.complete_updates()
        results = self._memory.host_records
        if copies is not None and self._second is not None:
            results = self._second.records
        table = None
        if gradients:
            counts = {name: self._counts[name] for name in gradients}
            torch._foreach_add_(list(counts.values()), 1)
            table = StepTable.of(counts, self._coefficients, inputs)
        self._pending = _PendingUpdate(dict(gradients), table, concurrent_span, copies, results)
        self._copy_streams.begin_updates()
        self._span = concurrent_span
        # The updates that follow wait for the gradients' norm, and a full launch queue makes the host wait too.
        self._launch_copies(0, every=True)
        self._launch(self._pending, 0)
        if not self.deferred:
            self.complete_updates()

    @torch.no_grad()
    def complete_updates(self, names: Iterable[str] | None = None) -> bool:
        """Make the compute stream wait for the updates of `names` (default: all) and of every earlier chunk.

        Launches those that were not launched yet. Returns whether it waited for a further chunk.
        """
        pending = self._pending
        if pending is None:
            return False
        before = pending.completed
        chunks = len(self._chunks)
        last = chunks if names is None else 1 + max((self._last_chunk.get(name, -1) for name in names), default=-1)
        self._launch(pending, last)
        if last > before:
            self._copy_streams.wait_for_update(pending.events[last - 1])
            # Only now may compute reuse the memory of gradients that the update stream reads.
            for chunk in self._chunks[before:last]:
                self._release_gradients(chunk, pending)
            pending.completed = last
        if pending.completed == chunks:
            self._end_update(pending)
        return pending.completed > before

    def _launch(self, pending: _PendingUpdate, needed: int) -> None:
        """Launch the updates of the first `needed` chunks and of those ahead, as far as that was not done."""
        # Where an update waits for a snapshot on the host, it is launched as late as possible.
        ahead = 0 if self._waits_for_snapshot(pending) else self._ahead
        for number in range(len(pending.events), min(needed + ahead, len(self._chunks))):
            self._run(number, pending)
            pending.events.append(self._copy_streams.latest_update)

    def _waits_for_snapshot(self, pending: _PendingUpdate) -> bool:
        """Whether the host waits for a snapshot's copies of records, which the update overwrites."""
        in_place = self._second is None or pending.results is not self._second.records
        return pending.copies is not None and in_place

    def _end_update(self, pending: _PendingUpdate) -> None:
        if pending.table is not None:
            counts = pending.table.counts
            torch._foreach_sub_(counts, [pending.table.inputs.skip] * len(counts))
        if self._second is not None and pending.results is self._second.records:
            self._memory.host_records, self._second.records = pending.results, self._memory.host_records
        self._pending = None
        self._steps_ended += 1
        self.launch_copies()

    def state(self, state_name: str, name: str) -> Tensor:
        """The values of a moment or master weight of a parameter, a copy in host memory; waits for the last update."""
        return self.read(self.part(state_name, name))

    def part(self, state_name: str, name: str) -> Tensor:
        """The tensor on the meta device that identifies a moment or master weight of a parameter, for `read` and `write`."""
        # an empty shard has no segment
        shape = self._parts[name].shape
        start = self._starts.get(name, 0)
        elements = self._handle[self._packing.states.index(state_name)]
        return elements[start : start + shape.numel()].view(shape)

    def read(self, part: Tensor) -> Tensor:
        """See `state.parts.EncodedState`. Waits for the last update."""
        self._finish()
        state, start = self._memory.locate(int(part.storage_offset()))
        values = self._memory.read(state, start, part.numel(), self._memory.record, self._rounded_range)
        return values.to(part.dtype).view(part.shape)

    @torch.no_grad()
    def write(self, part: Tensor, values: Tensor) -> None:
        """See `state.parts.EncodedState`. Chunks that were fetched before are fetched again."""
        if not part.numel():
            return
        with self._lock:
            self._finish()
            self._fetched = self._updated
            if not part.is_contiguous():
                part, values = self._with_gaps(part, values)
            state, start = self._memory.locate(int(part.storage_offset()))
            values = values.reshape(-1).to(self._dtype)
            self._memory.write(state, start, values, self._rounded_range)

    def _with_gaps(self, part: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The contiguous range that includes `part`, and its current values with `values` in their places."""
        last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        whole = self._handle.as_strided((last + 1,), (1,), part.storage_offset())
        current = self.read(whole)
        current.as_strided(part.shape, part.stride()).copy_(values)
        return whole, current

    def allocate_second_buffers(self) -> None:
        """Allocate the buffers to which steps beside snapshots write. May run in a thread beside training.

        Does nothing on a CPU whose master weights are updated in place. Raises OutOfResources when host memory cannot be pinned.
        """
        if self._device.type != "cuda" and not self._release:
            return
        rounded = 2 * self._memory.positions if self._packing.master else 0
        self._second = SecondBuffers(
            self._memory.allocate(self.host_bytes, "snapshots of the optimizer", in_parts=True),
            self._memory.allocate(self._memory.device_bytes + rounded, "snapshots of the optimizer", in_parts=True),
        )

    @torch.no_grad()
    def host_state(self) -> HostBuffers:
        """The state as the updates given to the device so far leave it, for a snapshot."""
        self.complete_updates()
        self._send_all()
        copied = None
        if self._second is not None:
            copied = self._second.on_device
            with self._copy_streams.snapshot():
                self._copy_device_state(copied)
            self._snapshot_copied = True
        return HostBuffers(
            self._memory, self._memory.host_records, copied, self._rounded_range, self._copy_streams.record_end()
        )

    def _copy_device_state(self, target: Tensor) -> None:
        """Copy the state that the records in host memory lack: records on the device, then the rounded weights by position."""
        records = self._memory.device_records
        for piece in slices_within_parts(0, len(records)):
            target[piece].copy_(records[piece], non_blocking=True)
        for name, weight in self._resident.items():
            source = weight.view(torch.uint8)
            start = len(records) + 2 * self._starts.get(name, 0)
            for piece in slices_within_parts(start, len(source)):
                target[start + piece.start : start + piece.stop].copy_(source[piece], non_blocking=True)

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far, for the bias correction of the moments."""
        self.complete_updates()
        for count in self._counts.values():
            count.fill_(float(steps))

    @property
    def has_master_weights(self) -> bool:
        """Whether master weights are split between the device and the records."""
        return bool(self._resident)

    def _rounded_range(self, start: int, count: int) -> Tensor:
        """The weights on the device at positions of one parameter."""
        first, name = self._names_by_start[bisect_right(self._names_by_start, (start, chr(0x10FFFF))) - 1]
        return self._resident[name][start - first : start - first + count]

    def _finish(self) -> None:
        """Complete the last update, and wait until the records in host memory have its results."""
        self.complete_updates()
        self._send_all()
        self._copy_streams.finish()

    def _send_all(self) -> None:
        while self._unsent:
            self._send(self._unsent.popleft())

    @property
    def fetched_ahead(self) -> int:
        """Chunks that are, or are being, fetched for updates that were not launched."""
        return self._fetched - self._updated

    def launch_copies(self) -> None:
        """Launch copies in both directions unless many are queued. To be called often during a step."""
        self._launch_copies(0)

    def _launch_copies(self, fetched: int, *, every: bool = False) -> None:
        """Launch copies until `fetched` chunks were fetched over all steps, or nothing is left; more while few are queued.

        `every`: launch all copies for which a buffer is free or an update was launched.
        """
        while every or self._fetched < fetched or not self._copy_streams.crowded():
            if self._fetched < self._sent + len(self._staging):
                self._fetch()
            elif self._unsent:
                self._send(self._unsent.popleft())
            else:
                return

    def _staged(self, number: int) -> Tensor:
        """The record on the device of the chunk that is updated next."""
        if number < self._memory.on_device:
            return self._memory.record(number)
        return self._buffer(number, self._updated % len(self._staging))

    def _buffer(self, number: int, buffer: int) -> Tensor:
        return self._staging[buffer][: self._packing.bytes(self._chunks[number].size)]

    def _fetch(self) -> None:
        """Fetch the next chunk. The send of its buffer, and of its result of the step before, was launched earlier."""
        streamed = len(self._chunks) - self._memory.on_device
        step, index = divmod(self._fetched, streamed)
        number = self._memory.on_device + index
        buffer = self._fetched % len(self._staging)
        # A chunk of the step after the pending update has its result of that update where the update sends it.
        follows = self._pending is not None and step > self._steps_ended
        records = self._pending.results if self._pending is not None and follows else self._memory.host_records
        where = self._memory.slices[number]
        staged = self._buffer(number, buffer)
        source = records[where]
        with self._copy_streams.copy_in(buffer, _span(self._span, number, "fetch")):
            for piece in slices_within_parts(where.start, len(staged)):
                staged[piece].copy_(source[piece], non_blocking=True)
        self._fetched += 1

    def _send(self, chunk: _UpdatedChunk) -> None:
        where = self._memory.slices[chunk.number]
        staged = self._buffer(chunk.number, chunk.buffer)
        target = chunk.target[where]
        with self._copy_streams.copy_out(chunk.buffer, chunk.update, _span(chunk.span, chunk.number, "offload")):
            for piece in slices_within_parts(where.start, len(staged)):
                target[piece].copy_(staged[piece], non_blocking=True)
        self._sent += 1

    def _run(self, number: int, pending: _PendingUpdate) -> None:
        """Update a chunk; if it is streamed, after its fetch, and before its copy to the host."""
        chunk = self._chunks[number]
        streamed = number >= self._memory.on_device
        if streamed:
            self._launch_copies(self._updated + 1)
        buffer = self._updated % max(1, len(self._staging))
        with self._copy_streams.update():
            if pending.copies is not None:
                names = (segment.name for segment in chunk.segments)
                pending.copies.wait(names, host=self._waits_for_snapshot(pending))
            if self._snapshot_copied:
                self._copy_streams.wait_for_copies_out()  # of what the update overwrites on the device
                self._snapshot_copied = False
            if streamed:
                self._copy_streams.wait_for_copy_in(buffer)
            self._update(number, pending)
        if streamed:
            event = self._copy_streams.latest_update
            self._unsent.append(_UpdatedChunk(number, buffer, event, pending.results, pending.span))
            self._updated += 1
            self.launch_copies()

    def _update(self, number: int, pending: _PendingUpdate) -> None:
        chunk = self._chunks[number]
        record = self._staged(number)
        for segment in chunk.segments:
            if (gradient := pending.gradients.get(segment.name)) is None:
                continue
            assert pending.table is not None
            end = segment.offset + -(-segment.count // ALIGNED) * ALIGNED
            weights = self._resident.get(segment.name, self._parts[segment.name])
            update_segment(
                self._packing,
                self._memory.fields(number, record, segment.offset, end),
                _elements(weights, segment),
                _elements(gradient, segment),
                pending.table,
                name=segment.name,
                position=chunk.start + segment.offset,
                weight_decay=chunk.weight_decay,
            )

    def _release_gradients(self, chunk: OptimizerChunk, pending: _PendingUpdate) -> None:
        """Forget the gradients of which no later chunk has a segment."""
        for segment in chunk.segments:
            if self._chunks[self._last_chunk[segment.name]] is chunk:
                pending.gradients.pop(segment.name, None)


def _chunks_on_device(chunks: Sequence[OptimizerChunk], fraction: float) -> int:
    """The most first chunks that together have at most `1 - fraction` of the elements."""
    # Exact, as `1 - 0.9` in binary is below 0.1.
    limit = (1 - Fraction(str(fraction))) * sum(chunk.size for chunk in chunks)
    return sum(chunk.start + chunk.size <= limit for chunk in chunks)


def _elements(whole: Tensor, segment: ChunkSegment) -> Tensor:
    return whole.view(-1)[segment.first : segment.first + segment.count]


def _span(span: SpanFactory | None, number: int, lane: str) -> AbstractContextManager[None] | None:
    return None if span is None else span(f"optimizer {number}", lane)
