"""Compute seconds of one action on one rank, from a Timing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from meshwright.schedules.action import Action
from meshwright.simulator.timing import Table, Timing

SlowInterval = tuple[float, float, float]
"""(start, end, factor on compute time in between)."""


class Durations:
    """Compute seconds of actions, of one unit or of a whole stage.

    `_seconds_by_op[op][stage]` is a list: the seconds of each unit of the stage, and as last entry their sum for the whole stage.
    """

    def __init__(self, timing: Timing) -> None:
        forward, inputs, weights = (
            _with_stage_sum(t) for t in (timing.forward, timing.backward_input, timing.backward_weight)
        )
        backward = [[i + w for i, w in zip(*halves, strict=True)] for halves in zip(inputs, weights, strict=True)]
        self._seconds_by_op = {
            "forward": forward,
            "forward_only": forward,
            "backward": backward,
            "backward_input": inputs,
            "backward_weight": weights,
        }

    def compute(self, action: Action) -> float:
        """Return the seconds of a compute action while no collective runs. A pair of micro-batches takes the sum of both."""
        if action.pair:
            return sum(map(self.compute, action.pair))
        return self._seconds_by_op[action.op][action.stage][-1 if action.unit is None else action.unit]


def end_with_slowdown(start: float, work: float, slow_intervals: Iterable[SlowInterval]) -> float:
    """Return the time when compute ends that starts at `start` and would take `work` seconds without slowdown.

    In each of `slow_intervals`, compute takes longer by the interval's factor. Where intervals overlap, the largest factor applies.

    A rank has 6 seconds of work. After 4 seconds it becomes three times slower, so the other 2 seconds of work take 6 seconds:

    >>> end_with_slowdown(0.0, 6.0, [(4.0, 20.0, 3.0)])
    10.0
    """
    time = start
    for interval_start, interval_end, factor in _disjoint(slow_intervals):
        if interval_end <= time:
            continue
        if interval_start > time:
            full_speed_seconds = interval_start - time
            if work <= full_speed_seconds:
                return time + work
            work = work - full_speed_seconds
            time = interval_start
        if work * factor <= interval_end - time:
            return time + work * factor
        work = work - (interval_end - time) / factor
        time = interval_end
    return time + work


def _disjoint(slow_intervals: Iterable[SlowInterval]) -> list[SlowInterval]:
    """Return the slowdown as sorted intervals without overlap; the largest factor applies where intervals overlapped."""
    intervals = sorted(slow_intervals)
    if all(first[1] <= second[0] for first, second in pairwise(intervals)):
        return intervals
    boundaries = sorted(
        {boundary for interval_start, interval_end, _ in intervals for boundary in (interval_start, interval_end)}
    )
    disjoint = []
    for interval_start, interval_end in pairwise(boundaries):
        factors = [factor for begin, end, factor in intervals if begin <= interval_start and end >= interval_end]
        if factors:
            disjoint.append((interval_start, interval_end, max(factors)))
    return disjoint


def _with_stage_sum(table: Table) -> list[list[float]]:
    return [[*by_unit, sum(by_unit)] for by_unit in table]
