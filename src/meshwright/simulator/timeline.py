"""The result of a simulated step: the times of all actions, and sums of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.events.span import Span
from meshwright.schedules.action import Action
from meshwright.schedules.activation_residency import peak_in_flight
from meshwright.schedules.schedule import Schedule

Record = tuple[int, str, Action, float, float]
"""A simulated action: (rank, lane, action, start, end). Times are in seconds since the start of the step.

Actions in one lane of a rank run one after another; actions in different lanes overlap.
"""
AXES = ("pipeline", "shard", "replicate")
"""Axes whose communication has actions of its own in the schedule.

The communication of other axes is part of compute actions.
"""


@dataclass(frozen=True)
class Timeline:
    """Times of a simulated step, in seconds; tuples have one element per pipeline rank.

    1F1B with 2 stages and 4 micro-batches of 3 seconds each: a rank waits for 3 of 15 seconds.

    >>> from meshwright.schedules.registry import build
    >>> from meshwright.simulator.simulate import simulate
    >>> from meshwright.simulator.timing import uniform_timing
    >>> timeline = simulate(build("1f1b", 2, 4), uniform_timing(2))
    >>> timeline.step_seconds, round(timeline.bubble, 6)
    (15.0, 0.2)
    """

    schedule: Schedule
    step_seconds: float
    """Seconds of the whole step."""
    compute_seconds: tuple[float, ...]
    """Seconds in forwards and backwards, by rank."""
    exposed_seconds: tuple[dict[str, float], ...]
    """Seconds in which compute waited for running communication, by rank and axis."""
    closing_seconds: tuple[float, ...]
    """Seconds in the gradient norm and the optimizer, by rank."""
    start_seconds: tuple[float, ...]
    """Start of the first forward, by rank."""
    window_seconds: float
    """Seconds from the first forward to the end of the last backward and of the copy of its gradients, over all ranks.
    """
    records: tuple[Record, ...]
    """All actions with their times."""

    @property
    def bubble(self) -> float:
        """Return the share of the time from the first forward to the last backward in which a rank does not compute, as
        a mean over ranks.
        """
        # Rounding could make the difference slightly negative.
        return max(0.0, 1 - sum(self.compute_seconds) / (self.schedule.ranks * self.window_seconds))

    @property
    def exposed(self) -> dict[str, float]:
        """Return the seconds of exposed communication by axis, as a mean over ranks."""
        return {axis: sum(exposed[axis] for exposed in self.exposed_seconds) / self.schedule.ranks for axis in AXES}

    @property
    def breakdown(self) -> dict[str, float]:
        """Return the seconds of a step by part, as a mean over ranks.

        The parts are "compute", exposed communication under the name of its axis, "closing" (gradient norm and
        optimizer) and "idle".
        """
        ranks = self.schedule.ranks
        parts = {
            "compute": sum(self.compute_seconds) / ranks,
            **self.exposed,
            "closing": sum(self.closing_seconds) / ranks,
        }
        return {**parts, "idle": max(0.0, self.step_seconds - sum(parts.values()))}  # rounding could make it negative

    @property
    def own_seconds(self) -> tuple[float, ...]:
        """Return the seconds of the step by rank without waits for other ranks: compute, exposed communication and
        closing.
        """
        parts = zip(self.compute_seconds, self.exposed_seconds, self.closing_seconds, strict=True)
        return tuple(compute + sum(exposed.values()) + closing for compute, exposed, closing in parts)

    @property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Return the largest number of stage forwards whose backward has not ended, by rank."""
        return peak_in_flight(self.schedule)

    def spans(self, step: int = 0) -> Iterator[Span]:
        """Yield every action as a span.

        Its name has the operation, the stage, the micro-batch and, if there is one, the unit: `forward 3.2`, `forward
        3.2/1`.
        """
        for rank, lane, action, start, end in self.records:
            yield Span(action.label, start, end - start, step, rank, lane)
