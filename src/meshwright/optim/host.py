"""AdamW with its state in host memory: packed chunks are copied to the device, updated there, and copied back.

A *chunk* is a range of at most a fixed number of elements of the parameters; chunks are in the order of the next forward (`chunks`). The
*record* of a chunk has the packed state that is not in the device's parameters: the moments and, if weights are gathered in bf16, a
remainder of the master weights (`packing`). With `fraction` below 1 the records of the first chunks stay on the device. The other chunks
are streamed. In each step a streamed chunk passes through:

1. Fetch: its record is copied from host memory to the next staging buffer of a ring.
2. Update: a kernel updates the record in its buffer, and the weights, once the gradients' factor is known.
3. Send: the record is copied from its buffer to host memory; the buffer is free again.

Fetch, update and send have streams of their own, so both directions of the link are busy and no forward delays an update (`copy_streams`).
A chunk is fetched as soon as a buffer is free. The first chunks of a step, as many as there are buffers, are therefore fetched during the
forward and backward before their update. `launch_copies` launches a few copies at a time throughout the step. All remaining copies are
launched before the host launches updates that wait for the gradients' norm.

Over all steps, sent <= updated <= fetched <= sent + buffers. There are at most as many buffers as streamed chunks. So the send of a chunk
in one step is launched before the chunk is fetched for the next step.

`complete_updates` makes the compute stream wait for the updates of the unit that is gathered next. Later chunks are copied and updated
during the forward. On a GPU the host launches chunks before they are needed. It waits for copies in two cases: when the state is read, for
example for a checkpoint; and, chunk by chunk, in a step during which a snapshot is copied, if there are no second buffers. With second
buffers such a step sends its results to these and leaves the first buffers to the snapshot.

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
"""Number of chunks that the host launches on a GPU before they are needed, so that the link is busy while the host launches other work.

The launch queue of a stream holds about a thousand operations, and streams may share a queue. If all chunks were launched at once, the host
would wait for the queue, and kernels of the forward would be queued behind updates that wait for copies.
"""
CPU_CHUNK_ELEMENTS = 1 << 16
"""Number of elements per chunk on a CPU: few, so that even small models have several chunks."""

SpanFactory = Callable[[str, str], AbstractContextManager[None]]
"""A function that creates the profiler span of a copy, given its name and its lane."""
Release = Callable[[], Tensor]
"""A function that frees a parameter's master weight on the device. Returns this rank's part in a narrower dtype, which stays there."""


@dataclass
class _PendingUpdate:
    """The update of one step. `results` are the host records to which it writes; `copies` are those of a snapshot that still runs."""

    gradients: dict[str, Tensor]
    table: StepTable | None
    """Learning rates and counters of the step's parameters; None if the step has no gradients."""
    span: SpanFactory | None
    copies: SnapshotCopies | None
    results: Tensor
    events: list[Any] = field(default_factory=list)
    """For each chunk whose update was launched, the event at the end of the update."""
    completed: int = 0
    """Number of chunks for whose updates the compute stream waits."""


@dataclass(frozen=True)
class _UpdatedChunk:
    """A chunk whose update was launched. It is to be copied from its staging buffer to its place in `target`, the records of all chunks."""

    number: int
    buffer: int
    update: Any
    """The event at the end of the chunk's update."""
    target: Tensor
    span: SpanFactory | None


class HostAdamW:
    """AdamW for the parameters `parts` of one rank, with state in host memory.

    - `parts`: the rank's part of each parameter, with one dtype and device, in the order of the forward.
    - `decays`: the weight decay of each parameter.
    - `release`: a function for each parameter that releases its master weight; for all parameters or for none.
    - `fraction`: share of the elements whose records are in host memory; the records of the first elements are on the device.
    - `staging`: size of all staging buffers in bytes. At least `STAGING_BUFFERS` are allocated, or one for each streamed chunk if there are
      fewer.
    - `chunk`: the most elements of a chunk; None: `staged_elements` on a GPU, `CPU_CHUNK_ELEMENTS` on a CPU.
    - `ahead`: number of chunks that are launched before they are needed; None: `LAUNCHED_AHEAD` on a GPU, 0 on a CPU, which cannot run them
      during the forward.

    Raises OutOfResources if host memory cannot be pinned.
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
        self._starts: dict[str, int] = {}
        """Maps a parameter to the position of its first element among the elements of all chunks."""
        self._last_chunk: dict[str, int] = {}
        """Maps a parameter to the number of the last chunk that has elements of it."""
        for number, planned in enumerate(self._chunks):
            for segment in planned.segments:
                self._last_chunk[segment.name] = number
                if not segment.first:
                    self._starts[segment.name] = planned.start + segment.offset
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
        """Number of steps of which all updates were launched."""
        self._fetched = self._updated = self._sent = 0
        """Numbers of streamed chunks whose fetch, update and send were launched, over all steps. A chunk counts again in each step.

        sent <= updated <= fetched <= sent + buffers, and there are at most as many buffers as streamed chunks.
        """
        self.deferred = False
        """Whether compute waits for updates only when `complete_updates` is called, and not at the end of `step`."""

    def _allocate_staging(self, size: int) -> None:
        """Allocate staging buffers with `size` bytes together; more if needed for `STAGING_BUFFERS` buffers, or one per streamed chunk."""
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
        """Split the current master weights: the rounded value stays on the device, the remainder is written to the records."""
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
        """Update the parameters that have a gradient. If `deferred`, the update is completed by `complete_updates`.

        While `copies` of a snapshot run, the results are written to the second buffers. Without second buffers, each chunk waits for the
        copies of its parameters' state.
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
        # The updates launched next wait for the gradients' norm. A launch queue that is full of them would make the host wait too.
        self._launch_copies(0, every=True)
        self._launch(self._pending, 0)
        if not self.deferred:
            self.complete_updates()

    @torch.no_grad()
    def complete_updates(self, names: Iterable[str] | None = None) -> bool:
        """Make the compute stream wait for the updates of `names` (None: all parameters) and of every earlier chunk.

        Launches the updates that were not launched yet. Returns whether compute now waits for more chunks than before.
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
            # From here on compute may reuse the memory of gradients that the update stream reads.
            for chunk in self._chunks[before:last]:
                self._release_gradients(chunk, pending)
            pending.completed = last
        if pending.completed == chunks:
            self._end_update(pending)
        return pending.completed > before

    def _launch(self, pending: _PendingUpdate, needed: int) -> None:
        """Launch the updates of the first `needed` chunks, and of some chunks ahead, unless they were launched before."""
        # An update for which the host waits for a snapshot is launched as late as possible.
        ahead = 0 if self._waits_for_snapshot(pending) else self._ahead
        for number in range(len(pending.events), min(needed + ahead, len(self._chunks))):
            self._run(number, pending)
            pending.events.append(self._copy_streams.latest_update)

    def _waits_for_snapshot(self, pending: _PendingUpdate) -> bool:
        """Whether the host waits for a snapshot to copy records before the update overwrites them."""
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
        """Return a moment or the master weight of a parameter, as a copy in host memory. Waits for the last update."""
        return self.read(self.part(state_name, name))

    def part(self, state_name: str, name: str) -> Tensor:
        """Return the tensor on the meta device that stands for a moment or master weight of a parameter, for `read` and `write`."""
        # An empty shard has no segment, so it has no start either.
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
        """See `state.parts.EncodedState`. Chunks that were already fetched for the next update are fetched again."""
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
        """Return the contiguous range that includes `part`, and the current values of this range with `values` put in."""
        last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        whole = self._handle.as_strided((last + 1,), (1,), part.storage_offset())
        current = self.read(whole)
        current.as_strided(part.shape, part.stride()).copy_(values)
        return whole, current

    def allocate_second_buffers(self) -> None:
        """Allocate the buffers to which steps write while a snapshot is copied. It may run in a thread during training.

        Does nothing on a CPU whose master weights are updated in place. Raises OutOfResources if host memory cannot be pinned.
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
        """Return the state after all updates launched so far, for a snapshot."""
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
        """Copy to `target` what the records in host memory lack: the records on the device, then the rounded weights by position."""
        records = self._memory.device_records
        for piece in slices_within_parts(0, len(records)):
            target[piece].copy_(records[piece], non_blocking=True)
        for name, weight in self._resident.items():
            source = weight.view(torch.uint8)
            start = len(records) + 2 * self._starts.get(name, 0)
            for piece in slices_within_parts(start, len(source)):
                target[start + piece.start : start + piece.stop].copy_(source[piece], non_blocking=True)

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far, which the bias correction of the moments needs."""
        self.complete_updates()
        for count in self._counts.values():
            count.fill_(float(steps))

    @property
    def has_master_weights(self) -> bool:
        """Whether master weights are split: rounded on the device, remainders in the records."""
        return bool(self._resident)

    def _rounded_range(self, start: int, count: int) -> Tensor:
        """Return the weights on the device at `count` positions of one parameter."""
        first, name = self._names_by_start[bisect_right(self._names_by_start, (start, chr(0x10FFFF))) - 1]
        return self._resident[name][start - first : start - first + count]

    def _finish(self) -> None:
        """Complete the last update, and wait until its results are in the records in host memory."""
        self.complete_updates()
        self._send_all()
        self._copy_streams.finish()

    def _send_all(self) -> None:
        while self._unsent:
            self._send(self._unsent.popleft())

    @property
    def fetched_ahead(self) -> int:
        """Number of chunks whose fetch was launched but whose update was not."""
        return self._fetched - self._updated

    def launch_copies(self) -> None:
        """Launch copies in both directions, unless many are queued. Call it often during a step."""
        self._launch_copies(0)

    def _launch_copies(self, fetched: int, *, every: bool = False) -> None:
        """Launch copies until `fetched` chunks have been fetched over all steps, and more as long as few copies are queued.

        With `every`, launch all copies that are possible: all fetches with a free buffer and all sends of launched updates.
        """
        while every or self._fetched < fetched or not self._copy_streams.crowded():
            if self._fetched < self._sent + len(self._staging):
                self._fetch()
            elif self._unsent:
                self._send(self._unsent.popleft())
            else:
                return

    def _staged(self, number: int) -> Tensor:
        """Return the record on the device of the chunk that is updated next."""
        if number < self._memory.on_device:
            return self._memory.record(number)
        return self._buffer(number, self._updated % len(self._staging))

    def _buffer(self, number: int, buffer: int) -> Tensor:
        return self._staging[buffer][: self._packing.bytes(self._chunks[number].size)]

    def _fetch(self) -> None:
        """Launch the fetch of the next chunk. The send from its buffer, and the send of its previous result, were launched earlier."""
        streamed = len(self._chunks) - self._memory.on_device
        step, index = divmod(self._fetched, streamed)
        number = self._memory.on_device + index
        buffer = self._fetched % len(self._staging)
        # If the chunk belongs to the step after the pending update, its result is where the pending update sends it.
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
        """Launch the update of a chunk. A streamed chunk is fetched before and sent to the host afterwards."""
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
                self._copy_streams.wait_for_copies_out()  # copies of state on the device, which the update overwrites
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
        """Forget the gradients that no later chunk needs."""
        for segment in chunk.segments:
            if self._chunks[self._last_chunk[segment.name]] is chunk:
                pending.gradients.pop(segment.name, None)


def _chunks_on_device(chunks: Sequence[OptimizerChunk], fraction: float) -> int:
    """Return how many of the first chunks can stay on the device: together they have at most `1 - fraction` of the elements."""
    # With exact fractions, because `1 - 0.9` is below 0.1 in floating point.
    limit = (1 - Fraction(str(fraction))) * sum(chunk.size for chunk in chunks)
    return sum(chunk.start + chunk.size <= limit for chunk in chunks)


def _elements(whole: Tensor, segment: ChunkSegment) -> Tensor:
    return whole.view(-1)[segment.first : segment.first + segment.count]


def _span(span: SpanFactory | None, number: int, lane: str) -> AbstractContextManager[None] | None:
    return None if span is None else span(f"optimizer {number}", lane)
