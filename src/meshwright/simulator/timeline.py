"""What a simulated step looked like: spans in the vocabulary of measured timelines, and the totals people ask for."""

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
"""Axes whose communication a schedule plays, and so can leave exposed."""


@dataclass(frozen=True)
class Timeline:
    """One step of every pipeline rank, in seconds from its begin."""

    schedule: Schedule
    step_seconds: float
    compute_seconds: tuple[float, ...]
    """By rank, time in forward and backward."""
    exposed_seconds: tuple[dict[str, float], ...]
    """By rank and axis, time in which compute stood still and only waited for bytes on the way."""
    closing_seconds: tuple[float, ...]
    """By rank, time in the gradient norm and the optimizer."""
    start_seconds: tuple[float, ...]
    """By rank, when its first forward began."""
    window_seconds: float
    """From the first forward to the end of the last backward and of laying out what it made, over all ranks."""
    records: tuple[Record, ...]

    @property
    def bubble(self) -> float:
        """1 − compute time ÷ time from first forward to last backward, mean over ranks."""
        return max(0.0, 1 - sum(self.compute_seconds) / (self.schedule.ranks * self.window_seconds))  # but for rounding

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed communication by axis, mean over ranks."""
        return {axis: sum(mine[axis] for mine in self.exposed_seconds) / self.schedule.ranks for axis in AXES}

    @property
    def breakdown(self) -> dict[str, float]:
        """Where a rank's step goes, mean over ranks: compute, each axis exposed, closing (norm, optimizer), and idle."""
        ranks = self.schedule.ranks
        parts = {
            "compute": sum(self.compute_seconds) / ranks,
            **self.exposed,
            "closing": sum(self.closing_seconds) / ranks,
        }
        return {**parts, "idle": max(0.0, self.step_seconds - sum(parts.values()))}  # but for rounding

    @property
    def own_seconds(self) -> tuple[float, ...]:
        """By rank, all that it does not wait for other ranks: compute, exposed communication, closing."""
        rows = zip(self.compute_seconds, self.exposed_seconds, self.closing_seconds, strict=True)
        return tuple(compute + sum(exposed.values()) + closing for compute, exposed, closing in rows)

    @property
    def peak_in_flight(self) -> tuple[float, ...]:
        """By rank, the most stage forwards alive at once."""
        return peak_in_flight(self.schedule)

    def spans(self, step: int = 0) -> Iterator[Span]:
        """Every action as a span called by its kind, stage and micro-batch: `forward 3.2`, unit 1 of it `forward 3.2/1`."""
        for rank, lane, action, start, end in self.records:
            yield Span(action.label, start, end - start, step, rank, lane)
