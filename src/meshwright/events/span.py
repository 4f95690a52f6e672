"""Terms of timelines: phases of a step, spans of time, and the Recorder protocol that receives them.

The training loop, the executor and the checkpoint writer use only the `Recorder` protocol; `observe.recorder` measures,
`NullRecorder` does nothing. Predicted timelines use the same spans and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

Phase = Literal["data", "rollout", "forward", "backward", "reduce", "optim", "checkpoint", "validate", "host"]
"""Phases of a training step.
data: wait for the next batch. rollout: with `rl`, what takes its place: hand-over, sampling and rewards. reduce: gradient norm and
clipping. optim: the optimizer's update. host: the time of the step in which no phase was open."""

PHASES: tuple[Phase, ...] = get_args(Phase)
"""Every phase, in execution order and in the order in which a chart stacks them."""

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
"""Work that a recorded span of a rank measures (`SpanRecord`).
weight_gradient: the half of a split backward for the weights. collective_wait: compute waits for a collective. send: a
message was posted. receive: compute waits for a message. clock: the error bound of the step's times. attention_work: no
time, but the sum of the squared document lengths of a micro-batch."""

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
    """The phase of a span with this name or op of an action; None for spans that are only drawn."""
    phase = _SPAN_PHASE_OF.get(name, name)
    return phase if phase in SPAN_PHASES else None


def step_phase(phase: SpanPhase) -> str:
    """The phase of the step (`PHASES`) that counts a span of `phase`."""
    return _STEP_PHASE_OF.get(phase, phase)


class ScheduledAction(Protocol):
    """Fields of a schedule's action (`schedules.action.Action`) that a recorder reads."""

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

    `action` is the index of the action in the rank's schedule; for a span of several units, of the first. Indices that do
    not apply are -1. `peer` is the stage at the other end of a message.
    """

    start_ns: int
    """Unix time on the host's clock at which the span began on the device."""
    duration_ns: int
    amount: int = 0
    """Bytes of a collective or message; valid tokens of a forward, a backward or a step; the generation collected;
    squared tokens of attention work."""
    step: int = 0
    action: int = -1
    stage: int = -1
    micro_batch: int = -1
    unit: int = -1
    peer: int = -1
    count: int = 1
    """Number of spans for which this one stands: the sum of duration × count is the time of all of them."""
    phase: SpanPhase = "step"


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time on one rank.

    `start` is in seconds from the recorder's first event; a mark is a span of duration 0. `lane` is the lane of the
    timeline that shows the span.
    """

    name: str
    start: float
    duration: float
    step: int
    rank: int = 0
    lane: str = "step"


@dataclass(frozen=True, slots=True)
class StepSpans:
    """The spans of one rank in one step, in the order in which they were issued, on the clock of `start`.

    Step 0 holds the spans recorded between steps.
    """

    step: int
    start: float
    seconds: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of one step by phase, `host` included, so that they add up to `total`."""

    step: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class MessageTransfer(Protocol):
    """A message in transfer between two ranks."""

    @property
    def timed_from_posting(self) -> bool:
        """Whether `seconds` count from the posting of the message, not from the start of its transfer in the channel."""
        ...

    def seconds(self) -> float | None:
        """Seconds of the transfer; None while it is in progress, and 0 if only the other rank can measure it."""
        ...


class Recorder(Protocol):
    """Receiver of events. Every call returns at once, without synchronising with a device.

    Neighbouring units of one action are recorded as one span, unless `detail` is on.
    """

    @property
    def detail(self) -> bool:
        """Whether every action of this step is recorded, communication too. `concurrent_span` and `message` need it."""
        ...

    def begin_step(self, step: int, tokens: int = 0) -> None:
        """Begin a step on this number of tokens; later events belong to it until `end_step`."""

    def attention_work(self, work: Sequence[int | None]) -> None:
        """Record by micro-batch the sum of the squared lengths of the step's documents, None where it is not counted."""

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
        """A span around the compute of the schedule's action `index`."""
        ...

    def waiting(
        self, phase: SpanPhase, index: int = -1, action: ScheduledAction | None = None, size: int = 0
    ) -> AbstractContextManager[None]:
        """A span around a wait of compute for a message or collective of `size` bytes.

        `action` sends or receives it, and has the index `index` in the schedule; None outside of the schedule.
        """
        ...

    def posted(self, index: int, action: ScheduledAction, size: int) -> None:
        """Record that the send `action` of `size` bytes follows the work launched so far."""

    def gap(self) -> None:
        """Compute waits for another rank from now to the next span; no phase counts this time."""

    def concurrent_span(self, name: str, lane: str) -> AbstractContextManager[None]:
        """A span around operations on the current stream, concurrent with others; it counts for no phase."""
        ...

    def message(self, name: str, lane: str, transfer: MessageTransfer) -> None:
        """Record that a message was posted now in the channel `lane`, which transfers its messages one after another."""

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
