"""The recorder a training loop makes: how long each phase of a step took on the device, without ever waiting for it.

On CUDA a stamp is an event put into the stream; it is read later, once the device has passed it. On CPU it is the
clock. Phases measured on the device's own time line show what is exposed: a batch fetched while the device computes
costs nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from meshwright.events.ring import Ring
from meshwright.events.span import PhaseTimes, Span, phase_of

KEPT_STEPS = 256
KEPT_SPANS = 8192


class Clock(Protocol):
    """Makes stamps, and later tells the seconds between two of them."""

    def stamp(self) -> Any:
        """A mark in time, set without waiting."""

    def ready(self, stamp: Any) -> bool:
        """Whether the device has passed the stamp."""
        ...

    def wait(self, stamp: Any) -> None:
        """Block until the device has passed the stamp."""

    def seconds(self, first: Any, second: Any) -> float:
        """Time from one ready stamp to another."""
        ...

    def recycle(self, stamp: Any) -> None:
        """The stamp will not be asked about again."""


class HostClock:
    """perf_counter."""

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
    """CUDA events on the current stream, used again once read (making one costs more than recording it)."""

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
    """The clock that times what `device` does."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass
class _Open:
    """A span as stamps; `depth` 0 counts as a phase of the step, deeper ones are only drawn."""

    name: str
    lane: str
    depth: int
    first: Any
    last: Any = None


@dataclass
class _Window:
    """A step, or a span outside of any step, until its stamps can be read."""

    step: int
    first: Any
    counted: bool
    last: Any = None
    spans: list[_Open] = field(default_factory=list)


class StepRecorder:
    """Measures steps and their phases; see `events.span.Recorder` for what is emitted.

    Spans inside a span are drawn but not counted twice. A span outside of a step (a last checkpoint) is drawn, and
    belongs to the step before it.
    """

    def __init__(self, device: torch.device, rank: int = 0, clock: Clock | None = None) -> None:
        self._clock = clock or clock_of(device)
        self._rank = rank
        self._window: _Window | None = None
        self._stack: list[_Open] = []
        self._pending: deque[_Window] = deque()
        self._times: dict[int, PhaseTimes] = {}
        self._spans: Ring[Span] = Ring(KEPT_SPANS)
        self._last_step = 0
        self._origin: Any = None
        self._elapsed = 0.0

    def begin_step(self, step: int) -> None:
        if self._window is not None:
            raise RuntimeError(f"step {step} begins inside step {self._window.step}; call end_step first")
        self._window = _Window(step, self._clock.stamp(), counted=True)
        self._last_step = step

    def end_step(self) -> None:
        if self._window is None or self._stack:
            raise RuntimeError(f"end_step with no step open, or inside a span ({[s.name for s in self._stack]})")
        self._close_window()
        self._collect()

    def begin(self, name: str, lane: str = "step") -> None:
        if self._window is None:
            self._window = _Window(self._last_step, self._clock.stamp(), counted=False)
        self._stack.append(_Open(name, lane, len(self._stack), self._clock.stamp()))

    def end(self) -> None:
        if not self._stack or self._window is None:
            raise RuntimeError("end with no span open")
        span = self._stack.pop()
        span.last = self._clock.stamp()
        self._window.spans.append(span)
        if not self._stack and not self._window.counted:
            self._close_window()

    @contextmanager
    def span(self, name: str, lane: str = "step") -> Iterator[None]:
        self.begin(name, lane)
        try:
            yield
        finally:
            self.end()

    def mark(self, name: str) -> None:
        with self.span(name, "mark"):
            pass

    def step_times(self, step: int | None = None) -> dict[str, float]:
        """Seconds by phase of `step` (of the newest finished step when left out), adding up to the whole step.

        Empty while the device has not finished it, and for steps long past. Never waits.
        """
        self._collect()
        wanted = next(reversed(self._times), None) if step is None else step
        return dict(self._times[wanted].seconds) if wanted in self._times else {}

    def spans(self) -> tuple[Span, ...]:
        """The newest finished spans, in the order they ended."""
        self._collect()
        return tuple(self._spans)

    def wait(self) -> None:
        """Block until every closed step can be read: for the end of a run."""
        for window in self._pending:
            self._clock.wait(window.last)
        self._collect()

    def _close_window(self) -> None:
        assert self._window is not None
        self._window.last = self._clock.stamp()
        self._pending.append(self._window)
        self._window = None

    def _collect(self) -> None:
        while self._pending and self._all_ready(self._pending[0]):
            self._read(self._pending.popleft())

    def _all_ready(self, window: _Window) -> bool:
        return self._clock.ready(window.last) and all(self._clock.ready(span.last) for span in window.spans)

    def _read(self, window: _Window) -> None:
        clock = self._clock
        start = self._start_of(window)
        phases: dict[str, float] = {}
        for span in window.spans:
            offset, duration = clock.seconds(window.first, span.first), clock.seconds(span.first, span.last)
            if span.lane == "mark":
                duration = 0.0
            elif span.depth == 0:
                phase = phase_of(span.name)
                phases[phase] = phases.get(phase, 0.0) + duration
            self._spans.append(Span(span.name, start + offset, duration, window.step, self._rank, span.lane))
        if window.counted:
            total = clock.seconds(window.first, window.last)
            phases["host"] = max(0.0, total - sum(phases.values()))
            self._keep(PhaseTimes(window.step, phases))
        for stamp in (window.last, *(s for span in window.spans for s in (span.first, span.last))):
            clock.recycle(stamp)

    def _start_of(self, window: _Window) -> float:
        """Seconds from the first window to this one, summed window by window: events far apart lose precision (float
        ms).
        """
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
