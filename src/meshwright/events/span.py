"""Terms of timelines: phases of a step, spans of time, and the Recorder protocol that receives them.

The training loop, the executor and the checkpoint writer use only the `Recorder` protocol; `observe.recorder` measures,
`NullRecorder` does nothing. Predicted timelines use the same spans and names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Phase = Literal["data", "forward", "backward", "reduce", "optim", "checkpoint", "validate", "host"]
"""Phases of a training step.
data: wait for the next batch. reduce: gradient norm and clipping. optim: the optimizer's update. host: the time of the
step in which no phase was open."""

PHASES: tuple[Phase, ...] = get_args(Phase)
"""Every phase, in execution order and in the order in which a chart stacks them."""

_PHASE_OF_ACTION = {
    "forward_only": "forward",
    "backward_input": "backward",
    "backward_weight": "backward",
    "norm_barrier": "reduce",
}


def phase_of(name: str) -> str:
    """The phase of a span: `backward_input 3.2/1`, an action of the executor, belongs to backward."""
    first_word = name.partition(" ")[0]
    return _PHASE_OF_ACTION.get(first_word, first_word)


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

    Neighbouring spans of one phase in the lane `compute` may be joined, unless `detail` is on.
    """

    @property
    def detail(self) -> bool:
        """Whether every action of this step is recorded, communication too. `concurrent_span` and `message` need it."""
        ...

    def begin_step(self, step: int) -> None:
        """Begin a step; later events belong to it until `end_step`."""

    def end_step(self) -> None:
        """End the step."""

    def begin(self, name: str, lane: str = "step") -> None:
        """Open a span inside the innermost open one."""

    def end(self) -> None:
        """Close the innermost open span."""

    def span(self, name: str, lane: str = "step") -> AbstractContextManager[None]:
        """`begin` and `end` around a block of code."""
        ...

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

    def begin_step(self, step: int) -> None:
        del step

    def end_step(self) -> None:
        pass

    def begin(self, name: str, lane: str = "step") -> None:
        del name, lane

    def end(self) -> None:
        pass

    @contextmanager
    def span(self, name: str, lane: str = "step") -> Iterator[None]:
        del name, lane
        yield

    def gap(self) -> None:
        pass

    @contextmanager
    def concurrent_span(self, name: str, lane: str) -> Iterator[None]:
        del name, lane
        yield

    def message(self, name: str, lane: str, transfer: MessageTransfer) -> None:
        del name, lane, transfer

    def mark(self, name: str) -> None:
        del name
