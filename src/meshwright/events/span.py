"""The vocabulary of timelines: named phases of a step, spans of time, and the Recorder they are emitted through.

The training loop, the executor and the checkpoint writer see only the `Recorder` protocol; `observe.recorder` measures,
`NullRecorder` does nothing. A predicted timeline is made of the same spans under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Phase = Literal["data", "forward", "backward", "reduce", "optim", "checkpoint", "validate", "host"]
"""Parts of a training step. data: waiting for the next batch. reduce: gradient norm and clipping. optim: the
optimizer's update. host: the rest of the step, when no phase was open."""

PHASES: tuple[Phase, ...] = get_args(Phase)
"""Every phase, in the order a step runs them and a chart stacks them."""

_PHASE_OF_ACTION = {
    "forward_only": "forward",
    "backward_input": "backward",
    "backward_weight": "backward",
    "norm_barrier": "reduce",
}


def phase_of(name: str) -> str:
    """The phase a span counts for: `backward_input 3.2/1`, an action of the executor, counts for backward."""
    kind = name.partition(" ")[0]
    return _PHASE_OF_ACTION.get(kind, kind)


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time on one rank.

    `start` counts seconds from the recorder's first event; a mark is a span of duration 0. `lane` is the row it is
    drawn in.
    """

    name: str
    start: float
    duration: float
    step: int
    rank: int = 0
    lane: str = "step"


@dataclass(frozen=True, slots=True)
class StepSpans:
    """Everything one rank did in one step: `spans` in the order they were issued, on the time line that `start` is on.

    Step 0 stands for what was recorded between steps.
    """

    step: int
    start: float
    seconds: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Where one step's time went: seconds by phase, `host` included, so that they add up to `total`."""

    step: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class MessageTransfer(Protocol):
    """A message on its way between two ranks."""

    @property
    def timed_from_posting(self) -> bool:
        """Whether `seconds` count from when the message was posted, or from when its channel began to move it."""
        ...

    def seconds(self) -> float | None:
        """How long it took; None while it is under way. 0 when only the other end can tell."""
        ...


class Recorder(Protocol):
    """Where events go. Every call returns at once: nothing here waits for a device.

    Spans of the lane `compute` may be joined with their neighbours of the same phase, unless `detail` is on.
    """

    @property
    def detail(self) -> bool:
        """Whether this step's every action is wanted, communication too: `concurrent_span` and `message` are for such steps alone."""
        ...

    def begin_step(self, step: int) -> None:
        """The step starts; what follows belongs to it until `end_step`."""

    def end_step(self) -> None:
        """The step is over."""

    def begin(self, name: str, lane: str = "step") -> None:
        """Open a span inside the innermost open one."""

    def end(self) -> None:
        """Close the innermost open span."""

    def span(self, name: str, lane: str = "step") -> AbstractContextManager[None]:
        """`begin` and `end` around a block of code."""
        ...

    def gap(self) -> None:
        """Compute waits for another rank from here to the next span: no phase is to be charged with it."""

    def concurrent_span(self, name: str, lane: str) -> AbstractContextManager[None]:
        """A span around what is given to the current stream, whatever else runs meanwhile; it counts for no phase."""
        ...

    def message(self, name: str, lane: str, travel: MessageTransfer) -> None:
        """A message was posted now in the channel `lane`, which moves its messages one after another."""

    def mark(self, name: str) -> None:
        """Something happened now: a checkpoint was committed, a signal arrived."""


class NullRecorder:
    """Records nothing: for ranks and tools that are not watched."""

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

    def message(self, name: str, lane: str, travel: MessageTransfer) -> None:
        del name, lane, travel

    def mark(self, name: str) -> None:
        del name
