"""AdamW with its state in host memory: chunks are copied to the device, updated by the usual kernel, and copied back.

Moments, and master weights where weights are gathered in a narrower dtype, are flat buffers in host memory, parameter after parameter. A
chunk is a range of these buffers. While the device updates one chunk, one stream copies the next chunk to the device and another copies
the previous chunk to the host, so both directions of the link are busy. A chunk depends on the backward only through the gradients'
factor. So the first copies to the device overlap the end of the backward, and the last copies to the host overlap the next forward.
Streams wait for events; the host waits only when a checkpoint reads the state. A step beside the copies of a snapshot writes to a second
set of buffers, if there is one, and leaves the first to the snapshot; otherwise it waits for the copies, chunk by chunk.

The update uses the arithmetic of the optimizer on the device, so both give the same bits. Method: Ren et al. 2021 (ZeRO-Offload) for the
location of the state; Maurya et al. 2024 (Deep Optimizer States) for the update on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.pinned import allocate_pinned, slices_within_parts
from meshwright.optim.fused import MOMENTS, Coefficients, StepInputs, count_updates, new_count, update
from meshwright.state.snapshot import SnapshotCopies
from meshwright.workload.buffers import STAGED_ELEMENTS, STAGING_BUFFERS

MASTER = "weight"
CPU_CHUNK_ELEMENTS = 1 << 10
"""Elements per chunk on a CPU: few, so that tests with small models have several chunks."""
ALIGNED = 64
"""Alignment of segments in elements, so that kernels can load vectors from the start of each segment."""

SpanFactory = Callable[[str, str], AbstractContextManager[None]]
"""Creates the profiler span of a copy from its name and its lane."""
Release = Callable[[], Tensor]
"""Frees a parameter's master weight on the device; returns this rank's part in a narrower dtype, which remains."""


@dataclass(frozen=True)
class Segment:
    """`count` elements of the parameter `name`, from its element `first` on, at `offset` in their chunk."""

    name: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """`size` elements from offset `start` of the host buffers, all with one weight decay."""

    start: int
    size: int
    weight_decay: float
    segments: tuple[Segment, ...]


class HostBuffers:
    """The state after an update, as `HostState`: in `buffers`, while layouts refer to `first`, the buffers at the start."""

    def __init__(self, first: Tensor, buffers: Tensor, wait: Callable[[], object]) -> None:
        self._first, self._buffers, self._wait = first, buffers.view(-1).view(torch.uint8), wait

    def wait(self) -> None:
        """See `HostState`."""
        self._wait()

    def current(self, memory: Tensor) -> Tensor:
        """See `HostState`; memory outside of the buffers is returned as it is."""
        offset = memory.data_ptr() - self._first.data_ptr()
        if not 0 <= offset < self._first.nbytes:
            return memory
        return self._buffers[offset : offset + memory.nbytes]


def plan_chunks(groups: Sequence[tuple[float, Mapping[str, int]]], max_elements: int) -> list[Chunk]:
    """Chunks of at most `max_elements` elements, each with one weight decay; a parameter has one contiguous range in them."""
    assert max_elements % ALIGNED == 0
    chunks: list[Chunk] = []
    for weight_decay, sizes in groups:
        segments: list[Segment] = []
        used = 0
        for name, size in sizes.items():
            first = 0
            while first < size:
                if used == max_elements:
                    chunks.append(_chunk(chunks, used, weight_decay, segments))
                    segments, used = [], 0
                count = min(size - first, max_elements - used)
                segments.append(Segment(name, first, count, used))
                first, used = first + count, -(-(used + count) // ALIGNED) * ALIGNED
        if segments:
            chunks.append(_chunk(chunks, used, weight_decay, segments))
    return chunks


def _chunk(previous: Sequence[Chunk], size: int, weight_decay: float, segments: Sequence[Segment]) -> Chunk:
    start = previous[-1].start + previous[-1].size if previous else 0
    return Chunk(start, size, weight_decay, tuple(segments))


class HostAdamW:
    """AdamW of the `parts` of one rank, all of one dtype and device, whose state is in host memory.

    `decays` has the weight decay of each parameter; `release` has the function that releases its master weight, for all or for none. Raises
    OutOfResources when host memory cannot be pinned.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        decays: Mapping[str, float],
        release: Mapping[str, Release],
        *,
        coefficients: Coefficients,
        chunk: int | None = None,
    ) -> None:
        assert not release or release.keys() == parts.keys()
        self._parts, self._release, self._coefficients = dict(parts), dict(release), coefficients
        like = next(iter(parts.values()))
        self._device = like.device
        self._state_names = (*MOMENTS, MASTER) if release else MOMENTS
        groups = [
            (decay, {name: part.numel() for name, part in parts.items() if decays[name] == decay})
            for decay in sorted(set(decays.values()), reverse=True)
        ]
        default = STAGED_ELEMENTS if self._device.type == "cuda" else CPU_CHUNK_ELEMENTS
        self._chunks = plan_chunks(groups, chunk or default)
        length = sum(entry.size for entry in self._chunks)
        cuda, size = self._device.type == "cuda", len(self._state_names) * length
        buffers = (
            allocate_pinned(self, size * like.itemsize, "the optimizer").view(like.dtype)
            if cuda
            else like.new_zeros(size)
        )
        self._buffers = self._first_buffers = buffers.view(len(self._state_names), length)
        self._second_buffers: Tensor | None = None
        widest = max((entry.size for entry in self._chunks), default=0)
        self._staging = torch.zeros(
            STAGING_BUFFERS, len(self._state_names), widest, dtype=like.dtype, device=self._device
        )
        self._starts = {s.name: entry.start + s.offset for entry in self._chunks for s in entry.segments if not s.first}
        self._counts = {name: new_count(self._device) for name in parts}
        self._resident: dict[str, Tensor] = {}
        self._copy_streams = _CopyStreams(self._device, len(self._staging))

    @property
    def host_bytes(self) -> int:
        """Bytes of state in host memory."""
        return self._buffers.nbytes

    def release_master_weights(self) -> None:
        """Copy the current master weights to host memory and free them on the device, if they are offloaded."""
        for name, release in self._release.items():
            self._host_tensor(MASTER, name).copy_(self._parts[name])
            self._resident[name] = release().view(-1)

    def reload_weights(self) -> None:
        """Copy the master weights in host memory, which were overwritten, to the weights that the device computes with."""
        for name, weight in self._resident.items():
            weight.copy_(self._host_tensor(MASTER, name).view(-1))

    def step(
        self,
        gradients: Mapping[str, Tensor],
        inputs: StepInputs,
        concurrent_span: SpanFactory | None = None,
        copies: SnapshotCopies | None = None,
    ) -> None:
        """One update of the parameters that have a gradient.

        Beside `copies` of a snapshot it writes to the second buffers; without these each chunk waits for copies of its parameters' state.
        """
        self._copy_streams.begin()
        results = self._buffers if copies is None or self._second_buffers is None else self._second_buffers
        for number in range(min(len(self._staging), len(self._chunks))):
            self._fetch(number, concurrent_span)
        with count_updates([self._counts[name] for name in gradients], inputs.skip):
            for number, chunk in enumerate(self._chunks):
                if copies is not None:
                    copies.wait((segment.name for segment in chunk.segments), host=results is self._buffers)
                self._update(number, chunk, gradients, inputs)
                self._send(number, results, concurrent_span)
                if number + len(self._staging) < len(self._chunks):
                    self._fetch(number + len(self._staging), concurrent_span)
        if results is not self._buffers:
            self._buffers, self._second_buffers = results, self._buffers

    def state(self, state_name: str, name: str) -> Tensor:
        """A moment or the master weight of a parameter in host memory, in the layout of this rank's part.

        Waits for the copies to the host.
        """
        self._copy_streams.finish()
        return self._host_tensor(state_name, name)

    def allocate_second_buffers(self) -> None:
        """Allocate the buffers to which steps beside snapshots write. May run in a thread beside training.

        Does nothing on a CPU whose master weights are updated in place. Raises OutOfResources when host memory cannot be pinned.
        """
        if self._device.type != "cuda" and not self._release:
            return
        if self._device.type == "cuda":
            memory = allocate_pinned(self, self._buffers.nbytes, "snapshots of the optimizer", in_parts=True)
            self._second_buffers = memory.view(self._buffers.dtype).view(self._buffers.shape)
        else:
            self._second_buffers = torch.zeros_like(self._buffers)

    def host_state(self) -> HostBuffers:
        """The state as the updates given to the device so far leave it."""
        return HostBuffers(self._first_buffers, self._buffers, self._copy_streams.record_end())

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far, for the bias correction of the moments."""
        for count in self._counts.values():
            count.fill_(float(steps))

    @property
    def has_master_weights(self) -> bool:
        """Whether master weights are in host memory."""
        return bool(self._resident)

    def _host_tensor(self, state: str, name: str) -> Tensor:
        part = self._parts[name]
        start = self._starts.get(name, 0)  # an empty shard has no segment
        return self._buffers[self._state_names.index(state), start : start + part.numel()].view(part.shape)

    def _fetch(self, number: int, concurrent_span: SpanFactory | None) -> None:
        chunk = self._chunks[number]
        with self._copy_streams.copy_in(number, _span(concurrent_span, f"optimizer {number}", "fetch")):
            for state, buffer in enumerate(self._buffers):
                staged = self._staging_buffer(number, state)
                for part in self._slices(state, chunk):
                    staged[part].copy_(buffer[chunk.start : chunk.start + chunk.size][part], non_blocking=True)

    def _send(self, number: int, results: Tensor, concurrent_span: SpanFactory | None) -> None:
        chunk = self._chunks[number]
        with self._copy_streams.copy_out(number, _span(concurrent_span, f"optimizer {number}", "offload")):
            for state, buffer in enumerate(results):
                staged = self._staging_buffer(number, state)
                for part in self._slices(state, chunk):
                    buffer[chunk.start : chunk.start + chunk.size][part].copy_(staged[part], non_blocking=True)

    def _slices(self, state: int, chunk: Chunk) -> Iterator[slice]:
        """Slices of a chunk's elements in a state's buffer that cross no two pinned parts."""
        size, (_, length) = self._buffers.itemsize, self._buffers.shape
        for part in slices_within_parts((state * length + chunk.start) * size, chunk.size * size):
            yield slice(part.start // size, part.stop // size)

    def _staging_buffer(self, number: int, state: int) -> Tensor:
        return self._staging[number % len(self._staging), state, : self._chunks[number].size]

    def _update(self, number: int, chunk: Chunk, gradients: Mapping[str, Tensor], inputs: StepInputs) -> None:
        self._copy_streams.wait_for_chunk(number)
        segments = [segment for segment in chunk.segments if segment.name in gradients]
        if not segments:
            return
        first, second, *masters = (
            [
                self._staging_buffer(number, state)[segment.offset : segment.offset + segment.count]
                for segment in segments
            ]
            for state in range(len(self._state_names))
        )
        weights = masters[0] if masters else [_elements(self._parts[segment.name], segment) for segment in segments]
        update(
            weights, [_elements(gradients[segment.name], segment) for segment in segments], first, second,
            [self._counts[segment.name] for segment in segments],
            coefficients=self._coefficients, weight_decay=chunk.weight_decay, inputs=inputs,
        )  # fmt: skip
        if masters:
            torch._foreach_copy_([_elements(self._resident[segment.name], segment) for segment in segments], weights)


def _elements(whole: Tensor, segment: Segment) -> Tensor:
    return whole.view(-1)[segment.first : segment.first + segment.count]


def _span(concurrent_span: SpanFactory | None, name: str, lane: str) -> AbstractContextManager[None] | None:
    return None if concurrent_span is None else concurrent_span(name, lane)


class _CopyStreams:
    """The two copy streams, and the events that synchronise them per staging buffer.

    On a CPU all operations run in order, without streams.
    """

    def __init__(self, device: torch.device, buffers: int) -> None:
        cuda = device.type == "cuda"
        self._in, self._out = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self._in_events: list[Any] = [None] * buffers
        self._out_events: list[Any] = [None] * buffers
        if self._in is not None:
            self._in.wait_stream(torch.cuda.current_stream(device))  # the staging buffers were zeroed there

    def begin(self) -> None:
        """Start a step: copies to the device wait for the last step's copies to the host."""
        if self._in is not None and self._out is not None:
            self._in.wait_stream(self._out)

    def copy_in(self, number: int, span: AbstractContextManager[None] | None) -> AbstractContextManager[Any]:
        """Context of the copies of chunk `number` to the device, after the copies to the host from its staging buffer."""
        buffer = number % len(self._out_events)
        if self._in is not None and self._out_events[buffer] is not None:
            self._in.wait_event(self._out_events[buffer])
        return _on(self._in, span, self._in_events, buffer)

    def wait_for_chunk(self, number: int) -> None:
        """Make the compute stream wait for chunk `number`."""
        if self._in is not None:
            torch.cuda.current_stream(self._in.device).wait_event(self._in_events[number % len(self._in_events)])

    def copy_out(self, number: int, span: AbstractContextManager[None] | None) -> AbstractContextManager[Any]:
        """Context of the copies of chunk `number` to the host, after the work queued on the compute stream so far."""
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._out.device))
        return _on(self._out, span, self._out_events, number % len(self._out_events))

    def record_end(self) -> Callable[[], object]:
        """Return a function that waits until the copies to the host that were started so far have ended."""
        return (
            (lambda: None) if self._out is None else self._out.record_event(torch.cuda.Event(blocking=True)).synchronize
        )

    def finish(self) -> None:
        """Wait until every copy to the host has ended."""
        if self._out is not None:
            self._out.synchronize()


def _on(
    stream: torch.cuda.Stream | None, span: AbstractContextManager[None] | None, events: list[Any], buffer: int
) -> AbstractContextManager[Any]:
    """Run copies on `stream` inside `span`, and record an event after them in `events`."""
    stack = ExitStack()
    if stream is not None:
        stack.enter_context(torch.cuda.stream(stream))

        def record_event() -> None:
            events[buffer] = stream.record_event()

        stack.callback(record_event)
    if span is not None:
        stack.enter_context(span)
    return stack
