"""Spans, messages and steps that are still open: their stamps are kept until the device has reached them
(`observe.recorder`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.events.span import MessageTransfer, ScheduledAction, SpanPhase, SpanRecord
from meshwright.observe.device_clock import ClockReference, DeviceClock

POLL_SECONDS = 1e-4
"""Seconds between two looks whether a transfer has finished."""


@dataclass(slots=True)
class OpenSpan:
    """A span and its stamps `first` and `last`.

    `counts` is the phase of the step to whose time the span is added; None for spans that are only drawn or recorded. A
    span with a `phase` is recorded, with the fields of `events.span.SpanRecord`.
    """

    name: str
    lane: str
    counts: str | None
    first: Any
    last: Any = None
    phase: SpanPhase | None = None
    # The next fields are described at `SpanRecord`; `action` is the scheduled action, whose stage and peer are
    # recorded.
    index: int = -1
    action: ScheduledAction | None = None
    amount: int = 0
    count: int = 1
    micro_batch: int = -1
    unit: int = -1

    def extends_to(self, action: ScheduledAction) -> bool:
        """Whether the span can include `action`, which follows it.

        Both must have the same op and stage. They must also have the same micro-batch (then the span covers several
        units), or the same unit. Then the span covers several micro-batches: in layered order, all of them run through a unit
        before the next unit.
        """
        mine = self.action
        if mine is None or mine.op != action.op or mine.stage != action.stage:
            return False
        # The same micro-batch, or the same unit if the action has a unit.
        return action.micro_batch == self.micro_batch or unit_of(action) == self.unit >= 0

    def extend(self, action: ScheduledAction, tokens: int) -> None:
        """Let the span include `action`, which has `tokens` tokens."""
        if unit_of(action) != self.unit:
            self.unit = -1
        if action.micro_batch != self.micro_batch:
            self.micro_batch = -1
            self.amount += tokens

    def record(self, step: int, start_ns: int, duration_ns: int) -> SpanRecord:
        """Return the record of this span. Stage and peer are -1 if it belongs to no action."""
        assert self.phase is not None
        stage, peer = (-1, -1) if self.action is None else (self.action.stage, self.action.peer)
        return SpanRecord(
            start_ns,
            duration_ns,
            self.amount,
            step,
            self.index,
            stage,
            self.micro_batch,
            self.unit,
            peer,
            self.count,
            self.phase,
        )

    def read(self, clock: DeviceClock, origin: Any, free: float) -> tuple[float, float] | None:
        """Return (start, end) in seconds after the stamp `origin`; None if the device has not reached the end of the
        span.

        `free` is not used here; see `PostedMessage`.
        """
        if not clock.ready(self.last):
            return None
        start = clock.seconds(origin, self.first)
        return start, start if self.lane == "mark" else start + clock.seconds(self.first, self.last)

    def wait(self, clock: DeviceClock) -> None:
        clock.wait(self.last)


@dataclass(slots=True)
class PostedMessage(OpenSpan):
    """A message between ranks. `first` is stamped when it was issued, and `transfer` knows how long the transfer takes."""

    transfer: MessageTransfer | None = None
    timed_from_posting: bool = False
    """Whether the measured duration begins when the message was issued."""
    took: float = 0.0
    """Seconds of the finished transfer."""

    def poll(self) -> bool:
        """Whether the transfer has finished. If so, its result is stored and the transfer is released."""
        if self.transfer is not None and (took := self.transfer.seconds()) is not None:
            self.took = took
            self.timed_from_posting = self.transfer.timed_from_posting
            self.transfer = None
        return self.transfer is None

    def read(self, clock: DeviceClock, origin: Any, free: float) -> tuple[float, float] | None:
        """Return (start, end) in seconds after the stamp `origin`; None if the message has not arrived.

        `free` is the time at which the channel had finished the message before.
        """
        if not self.poll() or not clock.ready(self.first):
            return None
        posted = clock.seconds(origin, self.first)
        start = posted if self.timed_from_posting else max(posted, free)
        return start, start + self.took

    def wait(self, clock: DeviceClock) -> None:
        clock.wait(self.first)
        while not self.poll():
            time.sleep(POLL_SECONDS)


@dataclass
class OpenWindow:
    """A step, or a span outside of any step, until its stamps can be read."""

    step: int
    # `counted`: whether it is a step, whose phases are added up; `detail`: whether its spans are returned by `take`.
    # `reference` relates the device's clock to the host's; None if nothing is recorded.
    first: Any
    counted: bool
    detail: bool
    reference: ClockReference | None
    tokens: int = 0
    attention_work: Sequence[int | None] = ()
    """Work of attention for each micro-batch, as in `events.span.Recorder.attention_work`."""
    last: Any = None
    spans: list[OpenSpan] = field(default_factory=list)

    def read(self, clock: DeviceClock) -> list[tuple[float, float]] | None:
        """Return (start, end) of each span in seconds after the window's begin; None if some span cannot be read yet."""
        if not clock.ready(self.last) or not (self.reference is None or clock.ready(self.reference.stamp)):
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


def unit_of(action: ScheduledAction) -> int:
    """Return the unit of an action; -1 if it has none."""
    return -1 if action.unit is None else action.unit
