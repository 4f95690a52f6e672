"""Activations a rank holds: how many at most, played from the schedule itself."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedules.action import COMPUTE
from meshwright.schedules.schedule import Schedule


def peak_in_flight(
    schedule: Schedule, held: Sequence[float] | None = None, kept_for_weights: Sequence[float] | None = None
) -> tuple[float, ...]:
    """By rank, the most that is alive at once of what forwards leave for backwards.

    `held` is what one forward of each stage leaves (1 each: the peak counts stage forwards), `kept_for_weights` the part
    of it that stays from the input half of a backward until the weight half (all of it). A schedule cut into units is
    counted by stage: a stage's forward counts from its first unit, its backward from its last.
    """
    held = held or [1.0] * schedule.stages
    kept = held if kept_for_weights is None else kept_for_weights
    return tuple(_peak(schedule, rank, held, kept) for rank in range(schedule.ranks))


def _peak(schedule: Schedule, rank: int, held: Sequence[float], kept: Sequence[float]) -> float:
    alive = most = 0.0
    for action in schedule.actions[rank]:
        if action.kind not in COMPUTE:
            continue
        for part in action.parts:
            stage, first = part.stage, not part.unit
            if part.kind == "forward" and first:
                alive += held[stage]
        most = max(most, alive)
        for part in action.parts:
            stage, first = part.stage, not part.unit
            if part.kind == "backward" and first:
                alive -= held[stage]
            elif part.kind == "backward_input" and first:
                alive -= held[stage] - kept[stage]
            elif part.kind == "backward_weight" and first:
                alive -= kept[stage]
    return most
