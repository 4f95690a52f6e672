"""Result of a simulated step: records of all actions, and totals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.events.span import Span
from meshwright.schedules.action import Action
from meshwright.schedules.activation_residency import peak_in_flight
from meshwright.schedules.schedule import Schedule

Record = tuple[int, str, Action, float, float]
"""(rank, lane, action, start, end)."""
AXES = ("pipeline", "shard", "replicate")
"""Axes whose communication is part of the schedule. Other axes communicate inside compute actions."""


@dataclass(frozen=True)
class Timeline:
    """Times of a step by pipeline rank, in seconds since the start of the step.

    1F1B with 2 stages and 4 micro-batches of 3 seconds each: a rank waits 3 of 15 seconds.

    >>> from meshwright.schedules.registry import build
    >>> from meshwright.simulator.simulate import simulate
    >>> from meshwright.simulator.timing import uniform_timing
    >>> timeline = simulate(build("1f1b", 2, 4), uniform_timing(2))
    >>> timeline.step_seconds, round(timeline.bubble, 6)
    (15.0, 0.2)
    """

    schedule: Schedule
    step_seconds: float
    compute_seconds: tuple[float, ...]
    """By rank, time in forward and backward."""
    exposed_seconds: tuple[dict[str, float], ...]
    """By rank and axis, time in which compute waited for communication in progress."""
    closing_seconds: tuple[float, ...]
    """By rank, time in the gradient norm and the optimizer."""
    start_seconds: tuple[float, ...]
    """By rank, the start of its first forward."""
    window_seconds: float
    """Seconds from the first forward to the end of the last backward and of the copy of its gradients, over all ranks."""
    records: tuple[Record, ...]

    @property
    def bubble(self) -> float:
        """1 − compute time ÷ time from first forward to last backward, mean over ranks."""
        return max(
            0.0, 1 - sum(self.compute_seconds) / (self.schedule.ranks * self.window_seconds)
        )  # not below 0 by rounding

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed communication by axis, mean over ranks."""
        return {axis: sum(exposed[axis] for exposed in self.exposed_seconds) / self.schedule.ranks for axis in AXES}

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step, mean over ranks: compute, exposed communication by axis, closing (norm, optimizer), idle."""
        ranks = self.schedule.ranks
        parts = {
            "compute": sum(self.compute_seconds) / ranks,
            **self.exposed,
            "closing": sum(self.closing_seconds) / ranks,
        }
        return {**parts, "idle": max(0.0, self.step_seconds - sum(parts.values()))}  # not below 0 by rounding

    @property
    def own_seconds(self) -> tuple[float, ...]:
        """By rank, the step without waits for other ranks: compute, exposed communication, closing."""
        parts = zip(self.compute_seconds, self.exposed_seconds, self.closing_seconds, strict=True)
        return tuple(compute + sum(exposed.values()) + closing for compute, exposed, closing in parts)

    @property
    def peak_in_flight(self) -> tuple[float, ...]:
        """By rank, the maximum number of stage forwards in flight."""
        return peak_in_flight(self.schedule)

    def spans(self, step: int = 0) -> Iterator[Span]:
        """Every action as a span named by op, stage, micro-batch and unit: `forward 3.2`, `forward 3.2/1`."""
        for rank, lane, action, start, end in self.records:
            yield Span(action.label, start, end - start, step, rank, lane)
