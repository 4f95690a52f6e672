"""Activations a rank holds: how many at most, played from the schedule itself."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedules.action import COMPUTE, Action
from meshwright.schedules.schedule import ComputeOrder, Schedule


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
        if action.op not in COMPUTE:
            continue
        for part in action.parts:
            stage, first = part.stage, not part.unit
            if part.op == "forward" and first:
                alive += held[stage]
        most = max(most, alive)
        for part in action.parts:
            stage, first = part.stage, not part.unit
            if part.op == "backward" and first:
                alive -= held[stage]
            elif part.op == "backward_input" and first:
                alive -= held[stage] - kept[stage]
            elif part.op == "backward_weight" and first:
                alive -= kept[stage]
    return most


ForwardCounts = tuple[tuple[tuple[int, ...], ...], ...]
"""By rank, moments at which it may hold the most: how many forwards of each of its stages are alive then."""


def peak_candidates(order: ComputeOrder) -> ForwardCounts:
    """Candidate moments of `peak_in_flight`, for any size of a stage's activations: no other moment has more of any stage."""
    return tuple(map(_fullest, *order))


def _fullest(stages: Sequence[int], mine: Sequence[Action]) -> tuple[tuple[int, ...], ...]:
    places = {stage: place for place, stage in enumerate(stages)}
    alive, found = [0] * len(places), dict[tuple[int, ...], None]()
    rising = False
    for action in mine:
        forwards = [part.stage for part in action.parts if part.op == "forward"]
        for stage in forwards:
            alive[places[stage]] += 1
        backwards = [part.stage for part in action.parts if part.op in ("backward", "backward_weight")]
        if backwards and (rising or forwards):
            found[tuple(alive)] = None
        rising = bool(forwards) or (rising and not backwards)
        for stage in backwards:
            alive[places[stage]] -= 1
    if rising:
        found[tuple(alive)] = None
    return tuple(moment for moment in found if not any(_below(moment, other) for other in found))


def _below(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))
