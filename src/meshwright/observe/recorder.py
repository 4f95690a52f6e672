"""Measures the device time of each span of a training step, without synchronising host and device.

On CUDA, a time stamp is an event on the stream; its time is read after the device has reached it. On a CPU, a stamp is
a time of the clock.

Phases in device time show only time that delays the device. For example, fetching a batch while the device computes
takes no time of the step.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from meshwright.events.progress import ProgressPage
from meshwright.events.span import (
    MessageTransfer,
    PhaseTimes,
    ScheduledAction,
    Span,
    SpanPhase,
    SpanRecord,
    StepSpans,
    span_phase,
    step_phase,
)
from meshwright.observe.device_clock import ClockReference, DeviceClock, DeviceTime, HostTime, clock_of
from meshwright.observe.open_span import OpenSpan, OpenWindow, PostedMessage, unit_of

KEPT_STEPS = 256
"""Newest steps whose times `step_times` can return."""
BETWEEN_STEPS = 0
"""Step number of detailed recordings of spans outside of steps."""
SAMPLED_WAITS = 40
"""About this many waits between the units of one action are measured in each step.

If there are n times as many, only every n-th wait is measured, and it counts as n.
"""
SHORTEST_COLLECTION_NS = 1_000_000
"""Shorter garbage collections are not recorded, in ns."""

Sink = Callable[[Sequence[SpanRecord]], None]
"""Receives the records of a step."""


class _SpanContext:
    """Context manager that calls `begin` and `end`. As a generator it would double the host's cost of a span."""

    __slots__ = ("_lane", "_name", "_recorder")

    def __init__(self, recorder: StepRecorder, name: str, lane: str) -> None:
        self._recorder = recorder
        self._name = name
        self._lane = lane

    def __enter__(self) -> None:
        self._recorder.begin(self._name, self._lane)

    def __exit__(self, *error: object) -> None:
        self._recorder.end()


class _ActionContext:
    """Context manager that calls `StepRecorder.begin_action` and `end`."""

    __slots__ = ("_action", "_index", "_recorder", "_tokens")

    def __init__(self, recorder: StepRecorder, index: int, action: ScheduledAction, tokens: int) -> None:
        self._recorder = recorder
        self._index = index
        self._action = action
        self._tokens = tokens

    def __enter__(self) -> None:
        self._recorder.begin_action(self._index, self._action, self._tokens)

    def __exit__(self, *error: object) -> None:
        self._recorder.end()


class _WaitContext:
    """Context manager of a wait. At its end, the span is finished, and the progress page no longer shows the wait."""

    __slots__ = ("_page", "_recorder", "_span")

    def __init__(self, recorder: StepRecorder, span: OpenSpan | None, page: ProgressPage | None) -> None:
        self._recorder = recorder
        self._span = span
        self._page = page

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if self._page is not None:
            self._page.end_wait()
        if self._span is not None:
            self._recorder.finish(self._span)


class StepRecorder:
    """Measures the steps of a rank, their phases and their spans. `events.span.Recorder` describes the methods.

    - A span inside another span is not added to the step's phases again. A span outside of a step, such as a last
      checkpoint, is recorded under the step before it.
    - A step of a large model has thousands of unit actions that take a few milliseconds each. Two events for each of
      them would slow down a step that is bound by the host. Therefore neighbouring units of one action share a span.
      The span ends where another action begins, or where a wait for another rank begins (`gap`). Of the many waits
      between units, only some are measured.
    - `sink` receives the records of a step when the device has finished the step.
    - With `detail`, no spans are joined, communication is recorded too, and `take` returns everything.
    """

    def __init__(
        self, device: torch.device, rank: int = 0, clock: DeviceClock | None = None, sink: Sink | None = None
    ) -> None:
        self._clock = clock or clock_of(device)
        self._rank = rank
        self._sink = sink
        self.page: ProgressPage | None = None
        """The page that shows which communication the host waits for; None if there is none."""
        self._window: OpenWindow | None = None
        """The step, or span outside of steps, that is being recorded."""
        self._stack: list[OpenSpan] = []
        self._joined: OpenSpan | None = None
        """The last action's span, which the next action may still extend."""
        self._in_transfer: list[PostedMessage] = []
        self._pending: deque[OpenWindow] = deque()
        self._unseen: ClockReference | None = None
        """A clock reference that the device had not reached when the host last looked."""
        self._host = HostTime()
        self._device_time = DeviceTime(self._clock)
        self._host_records: list[SpanRecord] = []
        self._waits = 0
        """Waits between units in this step; every `_every`-th is measured."""
        self._every = 1
        self._times: dict[int, PhaseTimes] = {}
        self._detail = False
        self._detailed: list[StepSpans] = []
        self._last_step = 0
        self._origin: Any = None
        self._elapsed = 0.0

    @property
    def detail(self) -> bool:
        """Whether actions are recorded separately, and all communication is recorded. It can be set between steps only."""
        return self._detail

    @detail.setter
    def detail(self, wanted: bool) -> None:
        if self._window is not None:
            raise RuntimeError(f"detail is set inside step {self._window.step}; it changes between steps")
        self._detail = wanted

    def take(self) -> list[StepSpans]:
        """Return the steps recorded with `detail` since the last call, in order. Call `wait` first to get all of them."""
        self._collect()
        taken = self._detailed
        self._detailed = []
        return taken

    def begin_step(self, step: int, tokens: int = 0) -> None:
        """Begin step `step`. `tokens` is its number of tokens on this rank; the method `tokens` can give it later."""
        if self._window is not None:
            raise RuntimeError(f"step {step} begins inside step {self._window.step}; call end_step first")
        self._last_step = step
        self._open_window(counted=True).tokens = tokens

    def tokens(self, tokens: int) -> None:
        """Record how many tokens the current step has on this rank."""
        if self._window is not None:
            self._window.tokens = tokens

    def attention_work(self, work: Sequence[int | None]) -> None:
        if self._window is not None:
            self._window.attention_work = work

    def end_step(self) -> None:
        if self._window is None or self._stack:
            raise RuntimeError(f"end_step with no step open, or inside a span ({[s.name for s in self._stack]})")
        self._close_window()
        self._every = max(1, math.ceil(self._waits / SAMPLED_WAITS))
        self._waits = 0
        self._collect()

    def begin(self, name: str, lane: str = "step") -> None:
        stamp = self._begin_stamp()
        outermost = not self._stack and lane != "mark"
        phase = span_phase(name) if outermost else None
        counted_name = step_phase(phase) if phase else name
        counts = counted_name if outermost else None
        self._stack.append(OpenSpan(name, lane, counts, stamp, phase=phase))

    def begin_action(self, index: int, action: ScheduledAction, tokens: int = 0) -> None:
        """Begin the span of an action's computation, or continue the span of the action before it."""
        joined = self._joined
        if joined is not None and joined.extends_to(action):
            joined.extend(action, tokens)
            self._stack.append(joined)
            self._joined = None
            return
        stamp = self._begin_stamp()
        phase = span_phase(action.op)
        assert phase is not None, action.op
        name = action.label if self._detail else phase
        counts = None if self._stack else step_phase(phase)
        unit = unit_of(action)
        self._stack.append(
            OpenSpan(name, "compute", counts, stamp, None, phase, index, action, tokens, 1, action.micro_batch, unit)
        )

    def end(self) -> None:
        if not self._stack or self._window is None:
            raise RuntimeError("end with no span open")
        span = self._stack.pop()
        if span.action is not None and not self._detail and not self._stack:
            self._joined = span
        else:
            self.finish(span)
        if not self._stack and not self._window.counted:
            self._close_window()

    def span(self, name: str, lane: str = "step") -> AbstractContextManager[None]:
        return _SpanContext(self, name, lane)

    def action(self, index: int, action: ScheduledAction, tokens: int = 0) -> AbstractContextManager[None]:
        return _ActionContext(self, index, action, tokens)

    def waiting(
        self, phase: SpanPhase, index: int = -1, action: ScheduledAction | None = None, size: int = 0
    ) -> AbstractContextManager[None]:
        page = self.page if self._clock.blocks_host else None
        if page is not None:
            page.begin_wait(action)
        span = self._wait_span(phase, index, action, size) if self._sink is not None else None
        if span is None and phase != "collective_wait":
            self.gap()
        return _WaitContext(self, span, page) if span is not None or page is not None else nullcontext()

    def posted(self, index: int, action: ScheduledAction, size: int) -> None:
        if self._sink is None or self._window is None:
            return
        span = self._recorded_wait("send", index, action, size, self._clock.stamp())
        self._end_joined(span.first)
        span.last = span.first
        self._window.spans.append(span)

    def gap(self) -> None:
        if self._joined is not None:
            self._end_joined(self._clock.stamp())

    @contextmanager
    def concurrent_span(self, name: str, lane: str) -> Iterator[None]:
        span = OpenSpan(name, lane, None, self._clock.stamp())
        try:
            yield
        finally:
            self.finish(span)

    def message(self, name: str, lane: str, transfer: MessageTransfer) -> None:
        assert self._window is not None, "messages are sent inside steps"
        self._in_transfer = [message for message in self._in_transfer if not message.poll()]
        message = PostedMessage(name, lane, None, self._clock.stamp(), transfer=transfer)
        self._in_transfer.append(message)
        self._window.spans.append(message)

    def mark(self, name: str) -> None:
        with self.span(name, "mark"):
            pass

    @contextmanager
    def garbage_collections(self) -> Iterator[None]:
        """Record Python's garbage collections during a `with` block, in host time."""
        began = 0

        def collection(event: str, details: dict[str, int]) -> None:
            nonlocal began
            now = self._host.now_ns()
            if event == "start":
                began = now
            elif self._sink is not None and now - began >= SHORTEST_COLLECTION_NS:
                record = SpanRecord(
                    began, now - began, details["generation"], self._last_step, phase="garbage_collection"
                )
                self._host_records.append(record)

        gc.callbacks.append(collection)
        try:
            yield
        finally:
            gc.callbacks.remove(collection)

    def step_times(self, step: int | None = None) -> dict[str, float]:
        """Return the seconds of each phase of a step; together they are the duration of the step.

        `step` is by default the newest finished step. Empty if the device has not finished the step, or if it is too
        old. This never waits.
        """
        self._collect()
        wanted = next(reversed(self._times), None) if step is None else step
        return dict(self._times[wanted].seconds) if wanted in self._times else {}

    def flush(self) -> None:
        """Give the records of all finished steps to the sink. This never waits."""
        self._collect()

    def wait(self) -> None:
        """Wait until the device has finished every step that has ended, at the end of a run."""
        for window in self._pending:
            self._clock.wait(window.last)
            for span in window.spans:
                span.wait(self._clock)
        self._collect()

    def finish(self, span: OpenSpan) -> None:
        """End a span now."""
        assert self._window is not None, "a span is inside a step, or makes a window of its own"
        span.last = self._clock.stamp()
        self._window.spans.append(span)

    def _begin_stamp(self) -> Any:
        """Return the stamp for a span that begins now. A span of earlier actions that is still open ends at the same stamp."""
        if self._window is None:
            self._open_window(counted=False)
        if self._unseen is not None and self._unseen.look(self._clock, self._host):
            self._unseen = None
        stamp = self._clock.stamp()
        self._end_joined(stamp)
        return stamp

    def _end_joined(self, stamp: Any) -> None:
        """End the span of the last action at `stamp`, if it is still open."""
        joined = self._joined
        self._joined = None
        if joined is not None:
            assert self._window is not None
            joined.last = stamp
            self._window.spans.append(joined)

    def _wait_span(self, phase: SpanPhase, index: int, action: ScheduledAction | None, size: int) -> OpenSpan | None:
        """Return the span of a wait that begins now; None if this wait is not measured."""
        if self._window is None:
            return None
        if self._stack:
            return self._recorded_wait(phase, index, action, size, self._clock.stamp())
        if phase != "collective_wait" or action is None:
            return self._recorded_wait(phase, index, action, size, self._begin_stamp())
        needs = span_phase(action.op)
        # A wait between two units of the same action: only every n-th of these is measured, and counts as n.
        if self._joined is not None and (needs is None or self._joined.extends_to(action)):
            self._waits += 1
            if (self._waits + self._last_step) % self._every:
                return None
            span = self._recorded_wait(phase, index, action, size, self._clock.stamp())
            span.count = self._every
            return span
        # A wait before another action is time of that action's phase.
        span = self._recorded_wait(phase, index, action, size, self._begin_stamp())
        span.counts = step_phase(needs) if needs else None
        return span

    def _recorded_wait(
        self, phase: SpanPhase, index: int, action: ScheduledAction | None, size: int, stamp: Any
    ) -> OpenSpan:
        micro_batch, unit = (-1, -1) if action is None else (action.micro_batch, unit_of(action))
        return OpenSpan(phase, "wait", None, stamp, None, phase, index, action, size, 1, micro_batch, unit)

    def _open_window(self, *, counted: bool) -> OpenWindow:
        """Begin a step (`counted`), or a span outside of steps, and keep its stamps until they can be read."""
        reference = self._clock.reference() if self._sink is not None else None
        if reference is not None and not reference.look(self._clock, self._host):
            self._unseen = reference
        self._window = OpenWindow(self._last_step, self._clock.stamp(), counted, self._detail, reference)
        return self._window

    def _close_window(self) -> None:
        """End the current step or span. It waits in `_pending` until the device has reached its stamps."""
        assert self._window is not None
        self.gap()
        self._window.last = self._clock.stamp()
        self._pending.append(self._window)
        self._window = None

    def _collect(self) -> None:
        while self._pending and (times := self._pending[0].read(self._clock)) is not None:
            self._take_in(self._pending.popleft(), times)

    def _take_in(self, window: OpenWindow, times: list[tuple[float, float]]) -> None:
        """Use a window whose times are known: send its records, add up its phases, and reuse its stamps.

        `times` has (start, end) of each span, in seconds after the window's begin. Time that no span counts is the
        phase "host".
        """
        if self._sink is not None:
            self._send_records(window, times, self._sink)
        start = self._start_of(window)
        total = self._clock.seconds(window.first, window.last)
        phases: dict[str, float] = {}
        for span, (first, last) in zip(window.spans, times, strict=True):
            if span.counts is not None:
                phases[span.counts] = phases.get(span.counts, 0.0) + last - first
        if window.counted:
            phases["host"] = max(0.0, total - sum(phases.values()))
            self._keep(PhaseTimes(window.step, phases))
        if window.detail:
            step = window.step if window.counted else BETWEEN_STEPS
            spans = (
                Span(span.name, start + first, last - first, window.step, self._rank, span.lane)
                for span, (first, last) in zip(window.spans, times, strict=True)
                if span.lane != "wait"
            )
            self._detailed.append(StepSpans(step, start, total, tuple(spans)))
        stamps = [window.last, *(stamp for span in window.spans for stamp in (span.first, span.last))]
        for stamp in {id(stamp): stamp for stamp in stamps if stamp is not None}.values():
            self._clock.recycle(stamp)

    def _send_records(self, window: OpenWindow, times: list[tuple[float, float]], sink: Sink) -> None:
        """Give the records of a window to `sink`, with times converted to the host's clock."""
        assert window.reference is not None
        window.reference.look(self._clock, self._host)
        reference_ns, error_ns = self._device_time.of(window.reference)
        origin = reference_ns + round(self._clock.seconds(window.reference.stamp, window.first) * 1e9)
        records = self._host_records
        self._host_records = []
        for span, (first, last) in zip(window.spans, times, strict=True):
            if span.phase is not None:
                records.append(span.record(window.step, origin + round(first * 1e9), round((last - first) * 1e9)))
        if window.counted:
            whole = round(self._clock.seconds(window.first, window.last) * 1e9)
            for number, work in enumerate(window.attention_work):
                if work is not None:
                    records.append(SpanRecord(origin, 0, work, window.step, micro_batch=number, phase="attention_work"))
            records.append(SpanRecord(reference_ns, error_ns, 0, window.step, phase="clock"))
            records.append(SpanRecord(origin, whole, window.tokens, window.step, phase="step"))
        sink(records)

    def _start_of(self, window: OpenWindow) -> float:
        """Return the seconds from the first window to this one.

        They are added up from window to window, because the time between distant events loses precision (32-bit float
        in ms).
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


class DetailRecorder(StepRecorder):
    """Measures only steps with `detail`. It is for a run that records no phases and spans, but may record a timeline."""

    def begin_step(self, step: int, tokens: int = 0) -> None:
        if self.detail:
            super().begin_step(step, tokens)

    def end_step(self) -> None:
        if self.detail:
            super().end_step()

    def begin(self, name: str, lane: str = "step") -> None:
        if self.detail:
            super().begin(name, lane)

    def begin_action(self, index: int, action: ScheduledAction, tokens: int = 0) -> None:
        if self.detail:
            super().begin_action(index, action, tokens)

    def end(self) -> None:
        if self.detail:
            super().end()
