"""Spans, messages and steps in progress, until the device has passed their stamps (`observe.recorder`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.events.span import MessageTransfer, ScheduledAction, SpanPhase, SpanRecord
from meshwright.observe.device_clock import ClockReference, DeviceClock

POLL_SECONDS = 1e-4


@dataclass(slots=True)
class OpenSpan:
    """A span with its stamps.

    `counts` is the phase of the step that counts it; None for spans that are only drawn or recorded. Spans with a `phase`
    are recorded, with the fields of `events.span.SpanRecord`.
    """

    name: str
    lane: str
    counts: str | None
    first: Any
    last: Any = None
    phase: SpanPhase | None = None
    index: int = -1
    action: ScheduledAction | None = None
    amount: int = 0
    count: int = 1
    micro_batch: int = -1
    unit: int = -1

    def extends_to(self, action: ScheduledAction) -> bool:
        """Whether `action` has the op and stage of this span and follows it along units or along micro-batches.

        A span of several units has one micro-batch, and a span of several micro-batches (layered order) has one unit.
        """
        mine = self.action
        if mine is None or mine.op != action.op or mine.stage != action.stage:
            return False
        return action.micro_batch == self.micro_batch or unit_of(action) == self.unit >= 0

    def extend(self, action: ScheduledAction, tokens: int) -> None:
        """Let the span include `action`."""
        if unit_of(action) != self.unit:
            self.unit = -1
        if action.micro_batch != self.micro_batch:
            self.micro_batch = -1
            self.amount += tokens

    def record(self, step: int, start_ns: int, duration_ns: int) -> SpanRecord:
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
        """(start, end) in seconds from `origin`; None if the device has not reached the end."""
        if not clock.ready(self.last):
            return None
        start = clock.seconds(origin, self.first)
        return start, start if self.lane == "mark" else start + clock.seconds(self.first, self.last)

    def wait(self, clock: DeviceClock) -> None:
        clock.wait(self.last)


@dataclass(slots=True)
class PostedMessage(OpenSpan):
    """A message: `first` is when it was posted; `transfer` gives its duration."""

    transfer: MessageTransfer | None = None
    timed_from_posting: bool = False
    took: float = 0.0

    def poll(self) -> bool:
        """Whether the transfer is finished; then releases it."""
        if self.transfer is not None and (took := self.transfer.seconds()) is not None:
            self.took = took
            self.timed_from_posting = self.transfer.timed_from_posting
            self.transfer = None
        return self.transfer is None

    def read(self, clock: DeviceClock, origin: Any, free: float) -> tuple[float, float] | None:
        """(start, end) as in `OpenSpan.read`; `free` is when the channel finished the previous message."""
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
    first: Any
    counted: bool
    detail: bool
    reference: ClockReference | None
    tokens: int = 0
    attention_work: Sequence[int | None] = ()
    """By micro-batch, as in `events.span.Recorder.attention_work`."""
    last: Any = None
    spans: list[OpenSpan] = field(default_factory=list)

    def read(self, clock: DeviceClock) -> list[tuple[float, float]] | None:
        """(start, end) of its spans in seconds from its begin; None if one of them cannot be read yet."""
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
    """The unit of an action; -1 without one."""
    return -1 if action.unit is None else action.unit
