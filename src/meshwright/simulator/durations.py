"""Seconds of one action on one rank, looked up from a Timing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from meshwright.schedules.action import Action
from meshwright.simulator.timing import Table, Timing

Busy = tuple[float, float, float]
"""(begin, end, how many times as long compute takes in it)."""


class Durations:
    """Compute seconds by action. An entry holds the units, then their sum for actions on the whole stage."""

    def __init__(self, timing: Timing) -> None:
        forward, inputs, weights = (_summed(t) for t in (timing.forward, timing.backward_input, timing.backward_weight))
        backward = [[i + w for i, w in zip(*halves, strict=True)] for halves in zip(inputs, weights, strict=True)]
        self._seconds_by_op = {
            "forward": forward,
            "forward_only": forward,
            "backward": backward,
            "backward_input": inputs,
            "backward_weight": weights,
        }
        self._shown = 1.0 - timing.overlap_hidden

    def compute(self, action: Action) -> float:
        """Seconds of a compute action on a device of ordinary speed that does nothing else."""
        if action.pair:
            shorter, longer = sorted(self.compute(part) for part in action.pair)
            return longer + self._shown * shorter
        return self._seconds_by_op[action.op][action.stage][-1 if action.unit is None else action.unit]


def stretched(start: float, work: float, busy: Iterable[Busy]) -> float:
    """When `work` seconds begun at `start` end, if inside each `busy` interval they pass that many times slower.

    Where two overlap the slower one counts.
    """
    now = start
    for first, last, factor in _apart(busy):
        if last <= now:
            continue
        if first > now:
            free = first - now
            if work <= free:
                return now + work
            work, now = work - free, first
        if work * factor <= last - now:
            return now + work * factor
        work, now = work - (last - now) / factor, last
    return now + work


def _apart(busy: Iterable[Busy]) -> list[Busy]:
    """The intervals cut so that none overlaps another, in order; the larger factor holds where two did."""
    rows = sorted(busy)
    if all(one[1] <= other[0] for one, other in pairwise(rows)):
        return rows
    edges = sorted({edge for first, last, _ in rows for edge in (first, last)})
    cut = []
    for first, last in pairwise(edges):
        factors = [factor for begin, end, factor in rows if begin <= first and end >= last]
        if factors:
            cut.append((first, last, max(factors)))
    return cut


def _summed(table: Table) -> list[list[float]]:
    return [[*row, sum(row)] for row in table]
