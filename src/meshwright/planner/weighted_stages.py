"""Cuts layers that take unlike times into the stages of a pipeline."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwright.workload.rank_layers import StageTable

DIGITS = 9
"""Digits to which times are compared; a layer takes about 1."""
BISECTIONS = 40
LEAST_GAIN = 0.01
"""Share of the slowest rank's time that other stages must save: a prediction cannot tell plans apart that are closer."""


@lru_cache(maxsize=1024)  # the search asks for the same stages under every batch and strategy
def balanced_by_weight(
    table: StageTable, weights: tuple[float, ...], head: float, speeds: tuple[float, ...]
) -> StageTable:
    """The stages of `table`, or if that saves time other numbers of layers: the slowest rank takes the least time.

    `weights` are times of the layers, 1 on average, and `head` that of the head after the last, on a rank of speed 1. The cut is the best
    if every rank has one stage, else within a layer's time of it.

    Eight equal layers and a head that takes as long as two: 5 layers, and 3 with the head.

    >>> balanced_by_weight(((range(0, 4),), (range(4, 8),)), weights=(1.0,) * 8, head=2.0, speeds=(1.0, 1.0))
    ((range(0, 5),), (range(5, 8),))
    """
    stages = sorted((stage.start, len(stage), rank) for rank, of_rank in enumerate(table) for stage in of_rank)
    times = _Times(weights, head, speeds, tuple(rank for *_, rank in stages))
    given = [size for _, size, _ in stages]
    sizes = min((_improved(start, times) for start in (given, _even_stages(times))), key=times.slowest)
    if times.slowest(sizes)[0] > (1 - LEAST_GAIN) * times.slowest(given)[0]:
        return table
    cut: list[list[range]] = [[] for _ in speeds]
    for owner, (first, stop) in zip(times.owners, pairwise(accumulate(sizes, initial=0)), strict=True):
        cut[owner].append(range(first, stop))
    return tuple(map(tuple, cut))


class _Times:
    """Times of stages of so many layers; `owners` has the rank of each stage in order."""

    def __init__(self, weights: Sequence[float], head: float, speeds: Sequence[float], owners: Sequence[int]) -> None:
        self.speeds = speeds
        self.owners = owners
        self.layers = len(weights)
        self.before = [0.0, *accumulate(weights)]
        self.before[-1] += head

    def of_ranks(self, sizes: Sequence[int]) -> tuple[list[float], float]:
        """The time of each rank, and that of the slowest stage."""
        ranks = [0.0] * len(self.speeds)
        slowest_stage = 0.0
        for owner, (first, stop) in zip(self.owners, pairwise(accumulate(sizes, initial=0)), strict=True):
            seconds = (self.before[stop] - self.before[first]) / self.speeds[owner]
            ranks[owner] += seconds
            slowest_stage = max(slowest_stage, seconds)
        return [round(seconds, DIGITS) for seconds in ranks], round(slowest_stage, DIGITS)

    def slowest(self, sizes: Sequence[int]) -> tuple[float, float]:
        """Times of the slowest rank and of the slowest stage."""
        ranks, stage = self.of_ranks(sizes)
        return max(ranks), stage


def _even_stages(times: _Times) -> list[int]:
    """Sizes of stages of which the slowest takes the least time, by bisection of the time in which every stage takes all that it can."""
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
    """Sizes of stages that take as many layers as fit into the time `limit`: at least one, and one is left to each later stage."""
    sizes = list[int]()
    first = 0
    for later, owner in zip(reversed(range(len(times.owners))), times.owners, strict=True):
        room = times.before[first] + limit * times.speeds[owner]
        fitting = bisect_right(times.before, room, lo=first) - 1 - first
        sizes.append(min(max(1, fitting), times.layers - later - first))
        first += sizes[-1]
    return sizes


def _improved(sizes: list[int], times: _Times) -> list[int]:
    """Sizes after moves of single layers that each make the slowest rank, or then the slowest stage, faster.

    A layer goes from a stage of the slowest rank to the stage where it helps most; the stages between move on by one layer.
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
