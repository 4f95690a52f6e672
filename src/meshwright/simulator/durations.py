"""Compute seconds of one action on one rank, from a Timing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from meshwright.schedules.action import Action
from meshwright.simulator.timing import Table, Timing

SlowInterval = tuple[float, float, float]
"""(start, end, factor on compute time in between)."""


class Durations:
    """Compute seconds by action. A stage's list has the seconds of its units, then their sum for actions of the whole stage."""

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
        """Seconds of a compute action beside which no collective runs."""
        if action.pair:
            return sum(map(self.compute, action.pair))
        return self._seconds_by_op[action.op][action.stage][-1 if action.unit is None else action.unit]


def end_with_slowdown(start: float, work: float, slow_intervals: Iterable[SlowInterval]) -> float:
    """End time of compute that starts at `start` and takes `work` seconds without slowdown.

    Where intervals overlap, the largest factor applies.

    4 of 6 seconds of work are done when a rank becomes three times slower; the other 2 take 6 seconds:

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
