"""Seconds of one action on one rank, looked up from a Timing."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.schedules.action import Action
from meshwright.simulator.timing import Table, Timing


class Durations:
    """Compute seconds by action. A row holds its units, then their sum for actions on the whole stage."""

    def __init__(self, timing: Timing) -> None:
        forward, inputs, weights = (_summed(t) for t in (timing.forward, timing.backward_input, timing.backward_weight))
        backward = [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(inputs, weights, strict=True)]
        self._rows = {
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
        return self._rows[action.kind][action.stage][-1 if action.unit is None else action.unit]


def stretched(start: float, work: float, busy: Iterable[tuple[float, float]], factor: float) -> float:
    """When `work` seconds begun at `start` end, if they pass `factor` times slower inside the `busy` intervals."""
    now = start
    for first, last in _joined(busy):
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


def _joined(busy: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals in order, those that touch made one."""
    joined: list[tuple[float, float]] = []
    for first, last in sorted(busy):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined


def _summed(table: Table) -> list[list[float]]:
    return [[*row, sum(row)] for row in table]
