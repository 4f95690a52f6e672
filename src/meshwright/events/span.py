"""The terms of timelines: phases of a step, spans of time, and the Recorder protocol, to which events are reported.

The training loop, the executor and the checkpoint writer use only the `Recorder` protocol. `observe.recorder` implements it by measuring;
`NullRecorder` does nothing. Predicted timelines use the same spans and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

Phase = Literal["data", "rollout", "forward", "backward", "reduce", "optim", "checkpoint", "validate", "host"]
"""Phases of a training step:

- data: waiting for the next batch.
- rollout: only with `rl`, in place of data: hand-over of weights, sampling and rewards.
- reduce: gradient norm and clipping.
- optim: the optimizer's update.
- host: time of the step in which no phase was open."""

PHASES: tuple[Phase, ...] = get_args(Phase)
"""All phases in the order of execution, which is also their order in stacked charts."""

SpanPhase = Literal[
    "step",
    "data",
    "forward",
    "backward",
    "weight_gradient",
    "collective_wait",
    "send",
    "receive",
    "gradient_norm",
    "optimizer",
    "checkpoint",
    "validation",
    "garbage_collection",
    "clock",
    "attention_work",
]
"""What a recorded span of a rank measures (`SpanRecord`). Names that need an explanation:

- weight_gradient: the part of a split backward that computes gradients of weights.
- collective_wait: compute waits for a collective.
- send: a message was posted. receive: compute waits for a message.
- clock: the error bound of the step's times.
- attention_work: no time, but the sum of the squared document lengths of a micro-batch."""

SPAN_PHASES: tuple[SpanPhase, ...] = get_args(SpanPhase)

_SPAN_PHASE_OF: dict[str, SpanPhase] = {
    "forward_only": "forward",
    "backward_input": "backward",
    "backward_weight": "weight_gradient",
    "norm_barrier": "gradient_norm",
    "optim": "optimizer",
    "validate": "validation",
}
_STEP_PHASE_OF: dict[str, Phase] = {
    "weight_gradient": "backward",
    "gradient_norm": "reduce",
    "optimizer": "optim",
    "validation": "validate",
}


def span_phase(name: str) -> SpanPhase | None:
    """The phase of a span with this name, which may be the op of an action. None for spans that are only drawn, not recorded."""
    phase = _SPAN_PHASE_OF.get(name, name)
    return phase if phase in SPAN_PHASES else None


def step_phase(phase: SpanPhase) -> str:
    """The phase of the step (`PHASES`) in which a span of `phase` is counted."""
    return _STEP_PHASE_OF.get(phase, phase)


class ScheduledAction(Protocol):
    """The fields of a schedule's action (`schedules.action.Action`) that a recorder reads."""

    @property
    def op(self) -> str: ...
    @property
    def stage(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def unit(self) -> int | None: ...
    @property
    def peer(self) -> int: ...
    @property
    def label(self) -> str: ...


class SpanRecord(NamedTuple):
    """A recorded span of one rank.

    `action` is the index of the action in the rank's schedule; if the span covers several units, of the first one. Indices that do not
    apply are -1. `peer` is the stage with which a message is exchanged.
    """

    start_ns: int
    """Unix time on the host's clock at which the span began on the device."""
    duration_ns: int
    amount: int = 0
    """What was handled: bytes of a collective or message; valid tokens of a forward, a backward or a step; the generation of a garbage
    collection; squared tokens of attention work."""
    step: int = 0
    action: int = -1
    stage: int = -1
    micro_batch: int = -1
    unit: int = -1
    peer: int = -1
    count: int = 1
    """Number of spans that this record represents. The sum of duration × count over records is the time of all spans."""
    phase: SpanPhase = "step"


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time on one rank.

    `start` is in seconds since the recorder's first event. A mark is a span of duration 0. `lane` is the row of the timeline in which the
    span is drawn.
    """

    name: str
    start: float
    duration: float
    step: int
    rank: int = 0
    lane: str = "step"


@dataclass(frozen=True, slots=True)
class StepSpans:
    """The spans of one rank in one step, in the order in which they were issued. Their times are on the clock of `start`.

    Spans that were recorded between steps belong to step 0.
    """

    step: int
    start: float
    seconds: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of one step by phase. With `host`, they add up to `total`."""

    step: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class MessageTransfer(Protocol):
    """A message in transfer between two ranks."""

    @property
    def timed_from_posting(self) -> bool:
        """Whether `seconds` count from the posting of the message. If not, they count from the start of its transfer in the channel."""
        ...

    def seconds(self) -> float | None:
        """Seconds of the transfer; None while it is in progress; 0 if only the other rank can measure it."""
        ...


class Recorder(Protocol):
    """Receives events. Every call returns at once, and does not wait for a device.

    Neighbouring units of one action are recorded as one span, unless `detail` is on.
    """

    @property
    def detail(self) -> bool:
        """Whether every action of this step is recorded separately, and communication too. `concurrent_span` and `message` need this."""
        ...

    def begin_step(self, step: int, tokens: int = 0) -> None:
        """Begin a step on this number of tokens. Later events belong to it, until `end_step`."""

    def attention_work(self, work: Sequence[int | None]) -> None:
        """Record, for each micro-batch, the sum of the squared document lengths; None if it is not counted."""

    def end_step(self) -> None:
        """End the step."""

    def begin(self, name: str, lane: str = "step") -> None:
        """Open a span inside the innermost open one."""

    def end(self) -> None:
        """Close the innermost open span."""

    def span(self, name: str, lane: str = "step") -> AbstractContextManager[None]:
        """`begin` and `end` around a block of code."""
        ...

    def action(self, index: int, action: ScheduledAction, tokens: int = 0) -> AbstractContextManager[None]:
        """A span around the compute of action number `index` of the schedule."""
        ...

    def waiting(
        self, phase: SpanPhase, index: int = -1, action: ScheduledAction | None = None, size: int = 0
    ) -> AbstractContextManager[None]:
        """A span around a wait of compute for a message or collective of `size` bytes.

        `action` is the action of the schedule that sends or receives it, and `index` its number; None outside of the schedule.
        """
        ...

    def posted(self, index: int, action: ScheduledAction, size: int) -> None:
        """Record that the message of the send `action`, of `size` bytes, is sent after all work that was launched so far."""

    def gap(self) -> None:
        """Record that compute waits for another rank until the next span begins. No phase counts this time."""

    def concurrent_span(self, name: str, lane: str) -> AbstractContextManager[None]:
        """A span around operations on the current stream that run at the same time as other work. No phase counts it."""
        ...

    def message(self, name: str, lane: str, transfer: MessageTransfer) -> None:
        """Record that a message was posted now in the channel `lane`. A channel transfers its messages one after another."""

    def mark(self, name: str) -> None:
        """Record an event without duration, such as a committed checkpoint or a signal."""


class NullRecorder:
    """Records nothing: for ranks and tools without observation."""

    detail = False

    def begin_step(self, step: int, tokens: int = 0) -> None:
        del step, tokens

    def attention_work(self, work: Sequence[int | None]) -> None:
        del work

    def end_step(self) -> None:
        pass

    def begin(self, name: str, lane: str = "step") -> None:
        del name, lane

    def end(self) -> None:
        pass

    def span(self, name: str, lane: str = "step") -> AbstractContextManager[None]:
        del name, lane
        return nullcontext()

    def action(self, index: int, action: ScheduledAction, tokens: int = 0) -> AbstractContextManager[None]:
        del index, action, tokens
        return nullcontext()

    def waiting(
        self, phase: SpanPhase, index: int = -1, action: ScheduledAction | None = None, size: int = 0
    ) -> AbstractContextManager[None]:
        del phase, index, action, size
        return nullcontext()

    def posted(self, index: int, action: ScheduledAction, size: int) -> None:
        del index, action, size

    def gap(self) -> None:
        pass

    def concurrent_span(self, name: str, lane: str) -> AbstractContextManager[None]:
        del name, lane
        return nullcontext()

    def message(self, name: str, lane: str, transfer: MessageTransfer) -> None:
        del name, lane, transfer

    def mark(self, name: str) -> None:
        del name
