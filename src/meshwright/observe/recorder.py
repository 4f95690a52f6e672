"""Measures the device time of each phase of a training step, without synchronisation.

On CUDA a stamp is an event on the stream, read after the device has passed it; on CPU it is the clock. Phases on the
device's clock show exposed time: a batch fetched while the device computes costs nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from meshwright.events.ring_buffer import Ring
from meshwright.events.span import MessageTransfer, PhaseTimes, Span, StepSpans, phase_of

KEPT_STEPS = 256
KEPT_SPANS = 8192
BETWEEN_STEPS = 0
OUTSIDE_PHASES = -1
"""Depth of a concurrent span, which counts for no phase."""
POLL_SECONDS = 1e-4


class Clock(Protocol):
    """Makes stamps, and later returns the seconds between two of them."""

    def stamp(self) -> Any:
        """A stamp of the current time, without waiting."""

    def ready(self, stamp: Any) -> bool:
        """Whether the device has passed the stamp."""
        ...

    def wait(self, stamp: Any) -> None:
        """Block until the device has passed the stamp."""

    def seconds(self, first: Any, second: Any) -> float:
        """Time from one ready stamp to another."""
        ...

    def recycle(self, stamp: Any) -> None:
        """Release a stamp that is not needed any more."""


class HostClock:
    """Stamps of time.perf_counter."""

    def stamp(self) -> float:
        return time.perf_counter()

    def ready(self, stamp: float) -> bool:
        return True

    def wait(self, stamp: float) -> None:
        pass

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def recycle(self, stamp: float) -> None:
        pass


class CudaClock:
    """CUDA events on the current stream, reused after reading (creating one costs more than recording it)."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def stamp(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ready(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def wait(self, stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1000.0

    def recycle(self, stamp: torch.cuda.Event) -> None:
        self._free.append(stamp)


def clock_of(device: torch.device) -> Clock:
    """The clock for operations of `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass
class _Open:
    """A span with its stamps; `depth` 0 counts as a phase of the step, others are only drawn."""

    name: str
    lane: str
    depth: int
    first: Any
    last: Any = None

    def read(self, clock: Clock, origin: Any, free: float) -> tuple[float, float] | None:
        """(start, end) in seconds from `origin`; None if the device has not reached the end."""
        if not clock.ready(self.last):
            return None
        start = clock.seconds(origin, self.first)
        return start, start if self.lane == "mark" else start + clock.seconds(self.first, self.last)

    def wait(self, clock: Clock) -> None:
        clock.wait(self.last)


@dataclass
class _Message(_Open):
    """A message: `first` is when it was posted; `transfer` gives its duration."""

    transfer: MessageTransfer | None = None
    timed_from_posting: bool = False
    took: float = 0.0

    def poll(self) -> bool:
        """Whether the transfer is finished; then releases it."""
        if self.transfer is not None and (took := self.transfer.seconds()) is not None:
            self.took, self.timed_from_posting, self.transfer = took, self.transfer.timed_from_posting, None
        return self.transfer is None

    def read(self, clock: Clock, origin: Any, free: float) -> tuple[float, float] | None:
        """(start, end) as in `_Open.read`; `free` is when the channel finished the previous message."""
        if not self.poll() or not clock.ready(self.first):
            return None
        posted = clock.seconds(origin, self.first)
        start = posted if self.timed_from_posting else max(posted, free)
        return start, start + self.took

    def wait(self, clock: Clock) -> None:
        clock.wait(self.first)
        while not self.poll():
            time.sleep(POLL_SECONDS)


@dataclass
class _Window:
    """A step, or a span outside of any step, until its stamps can be read."""

    step: int
    first: Any
    counted: bool
    detail: bool
    last: Any = None
    spans: list[_Open] = field(default_factory=list)

    def read(self, clock: Clock) -> list[tuple[float, float]] | None:
        """(start, end) of its spans in seconds from its begin; None if one of them cannot be read yet."""
        if not clock.ready(self.last):
            return None
        free: dict[str, float] = {}
        times: list[tuple[float, float]] = []
        for span in self.spans:
            interval = span.read(clock, self.first, free.get(span.lane, 0.0))
            if interval is None:
                return None
            free[span.lane] = interval[1]
            times.append(interval)
        return times


class _SpanContext:
    """`begin` and `end` around a block. Not a generator, which would double the host's cost of a span."""

    __slots__ = ("_lane", "_name", "_recorder")

    def __init__(self, recorder: StepRecorder, name: str, lane: str) -> None:
        self._recorder, self._name, self._lane = recorder, name, lane

    def __enter__(self) -> None:
        self._recorder.begin(self._name, self._lane)

    def __exit__(self, *error: object) -> None:
        self._recorder.end()


class StepRecorder:
    """Measures steps and their phases; see `events.span.Recorder` for the events.

    Spans inside a span are drawn but not counted twice. A span outside of a step (a last checkpoint) is drawn and
    belongs to the previous step. A step of a large model has thousands of actions of a few milliseconds, and two events
    for each would delay a host-bound step. So neighbouring spans of one phase in the lane `compute` share a span, which
    ends where another phase or a wait for another rank (`gap`) begins. With `detail` on nothing is joined,
    communication is recorded too, and `take` returns all of it.
    """

    def __init__(self, device: torch.device, rank: int = 0, clock: Clock | None = None) -> None:
        self._clock = clock or clock_of(device)
        self._rank = rank
        self._window: _Window | None = None
        self._stack: list[_Open] = []
        self._joined: _Open | None = None
        self._in_transfer: list[_Message] = []
        self._pending: deque[_Window] = deque()
        self._times: dict[int, PhaseTimes] = {}
        self._spans: Ring[Span] = Ring(KEPT_SPANS)
        self._detail = False
        self._detailed: list[StepSpans] = []
        self._last_step = 0
        self._origin: Any = None
        self._elapsed = 0.0

    @property
    def detail(self) -> bool:
        """Whether later actions and all communication are recorded separately. Set between steps."""
        return self._detail

    @detail.setter
    def detail(self, wanted: bool) -> None:
        if self._window is not None:
            raise RuntimeError(f"detail is set inside step {self._window.step}; it changes between steps")
        self._detail = wanted

    def take(self) -> list[StepSpans]:
        """Steps recorded with `detail` on since the last call, in order; call `wait` first to include all of them."""
        self._collect()
        taken, self._detailed = self._detailed, []
        return taken

    def begin_step(self, step: int) -> None:
        if self._window is not None:
            raise RuntimeError(f"step {step} begins inside step {self._window.step}; call end_step first")
        self._window = _Window(step, self._clock.stamp(), counted=True, detail=self._detail)
        self._last_step = step

    def end_step(self) -> None:
        if self._window is None or self._stack:
            raise RuntimeError(f"end_step with no step open, or inside a span ({[s.name for s in self._stack]})")
        self._close_window()
        self._collect()

    def begin(self, name: str, lane: str = "step") -> None:
        if self._window is None:
            self._window = _Window(self._last_step, self._clock.stamp(), counted=False, detail=self._detail)
        joins = lane == "compute" and not self._detail
        if joins and self._joined is not None and self._joined.name == phase_of(name):
            self._stack.append(self._joined)
            self._joined = None
            return
        self.gap()
        self._stack.append(_Open(phase_of(name) if joins else name, lane, len(self._stack), self._clock.stamp()))

    def end(self) -> None:
        if not self._stack or self._window is None:
            raise RuntimeError("end with no span open")
        span = self._stack.pop()
        if span.lane == "compute" and not self._detail and not self._stack:
            self._joined = span
        else:
            self._finish(span)
        if not self._stack and not self._window.counted:
            self._close_window()

    def span(self, name: str, lane: str = "step") -> AbstractContextManager[None]:
        return _SpanContext(self, name, lane)

    def gap(self) -> None:
        if self._joined is not None:
            joined, self._joined = self._joined, None
            self._finish(joined)

    @contextmanager
    def concurrent_span(self, name: str, lane: str) -> Iterator[None]:
        span = _Open(name, lane, OUTSIDE_PHASES, self._clock.stamp())
        try:
            yield
        finally:
            self._finish(span)

    def message(self, name: str, lane: str, transfer: MessageTransfer) -> None:
        assert self._window is not None, "messages are sent inside steps"
        self._in_transfer = [message for message in self._in_transfer if not message.poll()]
        message = _Message(name, lane, OUTSIDE_PHASES, self._clock.stamp(), transfer=transfer)
        self._in_transfer.append(message)
        self._window.spans.append(message)

    def mark(self, name: str) -> None:
        with self.span(name, "mark"):
            pass

    def step_times(self, step: int | None = None) -> dict[str, float]:
        """Seconds by phase of `step` (None: the newest finished step), adding up to the whole step.

        Empty if the device has not finished it, and for steps long past. Never waits.
        """
        self._collect()
        wanted = next(reversed(self._times), None) if step is None else step
        return dict(self._times[wanted].seconds) if wanted in self._times else {}

    def spans(self) -> tuple[Span, ...]:
        """The newest finished spans, in the order in which they ended."""
        self._collect()
        return tuple(self._spans)

    def wait(self) -> None:
        """Block until every closed step can be read, at the end of a run."""
        for window in self._pending:
            self._clock.wait(window.last)
            for span in window.spans:
                span.wait(self._clock)
        self._collect()

    def _finish(self, span: _Open) -> None:
        assert self._window is not None, "a span is inside a step, or makes a window of its own"
        span.last = self._clock.stamp()
        self._window.spans.append(span)

    def _close_window(self) -> None:
        assert self._window is not None
        self.gap()
        self._window.last = self._clock.stamp()
        self._pending.append(self._window)
        self._window = None

    def _collect(self) -> None:
        while self._pending and (times := self._pending[0].read(self._clock)) is not None:
            self._take_in(self._pending.popleft(), times)

    def _take_in(self, window: _Window, times: list[tuple[float, float]]) -> None:
        start, total = self._start_of(window), self._clock.seconds(window.first, window.last)
        phases: dict[str, float] = {}
        spans: list[Span] = []
        for span, (first, last) in zip(window.spans, times, strict=True):
            if span.depth == 0 and span.lane != "mark":
                phase = phase_of(span.name)
                phases[phase] = phases.get(phase, 0.0) + last - first
            spans.append(Span(span.name, start + first, last - first, window.step, self._rank, span.lane))
        if window.counted:
            phases["host"] = max(0.0, total - sum(phases.values()))
            self._keep(PhaseTimes(window.step, phases))
        if window.detail:
            step = window.step if window.counted else BETWEEN_STEPS
            self._detailed.append(StepSpans(step, start, total, tuple(spans)))
        for span in spans:
            self._spans.append(span)
        for stamp in (window.last, *(s for span in window.spans for s in (span.first, span.last))):
            if stamp is not None:
                self._clock.recycle(stamp)

    def _start_of(self, window: _Window) -> float:
        """Seconds from the first window to this one, summed over windows: distant events lose precision (float ms)."""
        if self._origin is not None:
            self._elapsed += self._clock.seconds(self._origin, window.first)
            self._clock.recycle(self._origin)
        self._origin = window.first
        return self._elapsed

    def _keep(self, times: PhaseTimes) -> None:
        self._times.pop(times.step, None)
        self._times[times.step] = times
        if len(self._times) > KEPT_STEPS:
            self._times.pop(next(iter(self._times)))


class DetailRecorder(StepRecorder):
    """Measures only steps with `detail` on, for a run without timed phases that may record a timeline."""

    def begin_step(self, step: int) -> None:
        if self.detail:
            super().begin_step(step)

    def end_step(self) -> None:
        if self.detail:
            super().end_step()

    def begin(self, name: str, lane: str = "step") -> None:
        if self.detail:
            super().begin(name, lane)

    def end(self) -> None:
        if self.detail:
            super().end()
