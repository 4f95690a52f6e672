"""Peak memory of activations on a rank, computed from the schedule's actions."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedules.action import COMPUTE, Action
from meshwright.schedules.schedule import ComputeOrder, Schedule


def peak_in_flight(
    schedule: Schedule, stage_sizes: Sequence[float] | None = None, kept_for_weights: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return, for each rank, the peak size of the activations that forwards have saved and backwards have not freed.

    `stage_sizes`: size of one forward's activations, by stage (default 1 each: the peak counts forwards of stages).
    `kept_for_weights`: the part of this size that a split backward frees only after its weight half (default: all).

    In a schedule of units, a stage's activations count from the forward of its first unit until the backward of that unit,
    which is the stage's last.
    """
    stage_sizes = stage_sizes or [1.0] * schedule.stages
    kept_sizes = stage_sizes if kept_for_weights is None else kept_for_weights
    return tuple(_peak(schedule, rank, stage_sizes, kept_sizes) for rank in range(schedule.ranks))


def _peak(schedule: Schedule, rank: int, stage_sizes: Sequence[float], kept_sizes: Sequence[float]) -> float:
    """Return the peak of one rank, by going through its actions."""
    in_flight = peak = 0.0
    for action in schedule.actions[rank]:
        if action.op not in COMPUTE:
            continue
        for part in action.parts:
            stage = part.stage
            first = not part.unit
            if part.op == "forward" and first:
                in_flight += stage_sizes[stage]
        peak = max(peak, in_flight)
        for part in action.parts:
            stage = part.stage
            first = not part.unit
            if part.op == "backward" and first:
                in_flight -= stage_sizes[stage]
            elif part.op == "backward_input" and first:
                in_flight -= stage_sizes[stage] - kept_sizes[stage]
            elif part.op == "backward_weight" and first:
                in_flight -= kept_sizes[stage]
    return peak


ForwardCounts = tuple[tuple[tuple[int, ...], ...], ...]
"""For each rank, the candidates for its peak. A candidate has the number of forwards in flight of each of its stages."""


def peak_candidates(order: ComputeOrder) -> ForwardCounts:
    """Return, for each rank, all numbers of forwards in flight (one per stage) that can be its peak.

    Which of them is the peak depends on the sizes of the stages' activations. Example: (2, 1) means two forwards in flight
    of the rank's first stage and one of its second. (1, 1) is no candidate then, because it is never larger.
    """
    return tuple(map(_rank_candidates, *order))


def _rank_candidates(stages: Sequence[int], actions: Sequence[Action]) -> tuple[tuple[int, ...], ...]:
    """Return the candidates of one rank, from its stages and its actions in order."""
    index_of = {stage: index for index, stage in enumerate(stages)}
    in_flight = [0] * len(index_of)
    candidates = dict[tuple[int, ...], None]()
    has_grown = False
    for action in actions:
        forwards = [part.stage for part in action.parts if part.op == "forward"]
        for stage in forwards:
            in_flight[index_of[stage]] += 1
        backwards = [part.stage for part in action.parts if part.op in ("backward", "backward_weight")]
        # A peak can only be where the count has grown and the next action frees activations.
        if backwards and (has_grown or forwards):
            candidates[tuple(in_flight)] = None
        has_grown = bool(forwards) or (has_grown and not backwards)
        for stage in backwards:
            in_flight[index_of[stage]] -= 1
    if has_grown:
        candidates[tuple(in_flight)] = None
    return tuple(counts for counts in candidates if not any(_below(counts, other) for other in candidates))


def _below(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return whether `first` is nowhere larger than `second`, and differs from it."""
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))
