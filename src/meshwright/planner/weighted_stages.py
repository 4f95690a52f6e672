"""Divides layers that take unequal times into the stages of a pipeline."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwright.workload.rank_layers import StageTable

DIGITS = 9
"""Decimal digits to which times are compared; a layer takes about 1."""
BISECTIONS = 40
"""Steps of the bisection in `_even_stages`."""
LEAST_GAIN = 0.01
"""A new division must save at least this share of the slowest rank's time. Predictions cannot distinguish smaller differences."""


@lru_cache(maxsize=1024)  # the search asks for the same stages under every batch and strategy
def balanced_by_weight(
    table: StageTable, weights: tuple[float, ...], head: float, speeds: tuple[float, ...]
) -> StageTable:
    """Divide the layers into stages so that the slowest rank takes as little time as possible. Returns `table` if that saves too little.

    - `table`: the stages of each rank.
    - `weights`: the time of each layer on a rank of speed 1; the mean is 1.
    - `head`: the time of the head on a rank of speed 1.
    - `speeds`: the speed of each rank.

    If every rank has one stage, no other division makes the slowest rank faster. If ranks have several stages, the slowest rank can take
    longer than in the best division, but at most by the time of one layer.

    Two ranks have eight equal layers, and a head that takes as long as two layers. The first gets 5 layers, the second 3 and the head:

    >>> balanced_by_weight(((range(0, 4),), (range(4, 8),)), weights=(1.0,) * 8, head=2.0, speeds=(1.0, 1.0))
    ((range(0, 5),), (range(5, 8),))
    """
    stages = sorted((stage.start, len(stage), rank) for rank, of_rank in enumerate(table) for stage in of_rank)
    times = _Times(weights, head, speeds, tuple(rank for *_, rank in stages))
    given = [size for _, size, _ in stages]
    sizes = min((_improved(start, times) for start in (given, _even_stages(times))), key=times.slowest)
    if times.slowest(sizes)[0] > (1 - LEAST_GAIN) * times.slowest(given)[0]:
        return table
    stages_of_ranks: list[list[range]] = [[] for _ in speeds]
    for owner, (first, stop) in zip(times.owners, pairwise(accumulate(sizes, initial=0)), strict=True):
        stages_of_ranks[owner].append(range(first, stop))
    return tuple(map(tuple, stages_of_ranks))


class _Times:
    """Computes the times of ranks for given numbers of layers in each stage (`sizes`). `owners` has the rank of each stage, in order."""

    def __init__(self, weights: Sequence[float], head: float, speeds: Sequence[float], owners: Sequence[int]) -> None:
        self.speeds = speeds
        self.owners = owners
        self.layers = len(weights)
        self.before = [0.0, *accumulate(weights)]
        """By n: the time of the first n layers on a rank of speed 1. The time of the head is added to the last value."""
        self.before[-1] += head

    def of_ranks(self, sizes: Sequence[int]) -> tuple[list[float], float]:
        """Return the time of each rank, and the time of the slowest stage."""
        ranks = [0.0] * len(self.speeds)
        slowest_stage = 0.0
        for owner, (first, stop) in zip(self.owners, pairwise(accumulate(sizes, initial=0)), strict=True):
            seconds = (self.before[stop] - self.before[first]) / self.speeds[owner]
            ranks[owner] += seconds
            slowest_stage = max(slowest_stage, seconds)
        return [round(seconds, DIGITS) for seconds in ranks], round(slowest_stage, DIGITS)

    def slowest(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Return the time of the slowest rank, and the time of the slowest stage."""
        ranks, stage = self.of_ranks(sizes)
        return max(ranks), stage


def _even_stages(times: _Times) -> list[int]:
    """Return numbers of layers for which the slowest stage takes the least time.

    By bisection, find the smallest time limit with which all layers find a place if each stage gets as many as fit (`_filled`).
    """
    low = 0.0
    high = times.before[-1] / min(times.speeds)
    for _ in range(BISECTIONS):
        limit = (low + high) / 2
        if sum(_filled(times, limit)) < times.layers:
            low = limit
        else:
            high = limit
    return _filled(times, high)


def _filled(times: _Times, limit: float) -> list[int]:
    """Give each stage as many layers as fit into the time `limit`, but at least one, and leave at least one for each later stage."""
    sizes = list[int]()
    first = 0
    for later, owner in zip(reversed(range(len(times.owners))), times.owners, strict=True):
        latest_end = times.before[first] + limit * times.speeds[owner]
        fitting = bisect_right(times.before, latest_end, lo=first) - 1 - first
        sizes.append(min(max(1, fitting), times.layers - later - first))
        first += sizes[-1]
    return sizes


def _improved(sizes: list[int], times: _Times) -> list[int]:
    """Improve `sizes` by moves of single layers until no move helps any more.

    A move makes a stage of a slowest rank one layer shorter, and another stage one layer longer. The stages between the two shift by one
    layer. A move helps if the slowest rank becomes faster. It also helps if the slowest rank takes the same time and the slowest stage
    becomes faster. Of all moves, the one that helps most is made.
    """
    while True:
        ranks, _ = times.of_ranks(sizes)
        givers = [at for at, owner in enumerate(times.owners) if ranks[owner] == max(ranks) and sizes[at] > 1]
        moved = (
            [size - (at == giver) + (at == taker) for at, size in enumerate(sizes)]
            for giver in givers
            for taker in range(len(sizes))
        )
        best = min(moved, key=times.slowest, default=sizes)
        if times.slowest(best) >= times.slowest(sizes):
            return sizes
        sizes = best
