"""A step's products and attention in the company they have there: one after another, with passes over memory between them.

A GPU at its power limit runs products slower the longer nothing else runs. In a training step attention and memory-bound passes draw less
power and leave products higher clocks than products alone would have, so the rates that a step is held against are measured in such a mix.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from meshwright.profile import attention_times as attention
from meshwright.profile import product_times as products
from meshwright.profile.call_timing import Call, Clock
from meshwright.profile.team import Team
from meshwright.spec.profile import AttentionTime, ProductTime
from meshwright.workload.device_work import Work

ROUNDS = 5
"""At least, of which the first half only warms up."""


def mixed_times(
    team: Team, clock: Clock, work: Work, shapes: Sequence[products.Case], scores: attention.Case, budget: float
) -> tuple[list[ProductTime], list[AttentionTime]]:
    """Every product and the attention, in rounds that each hold all of them once and one layer's share of the step's passes."""
    calls = [products.call_of(case, team) for case in shapes]
    bursts = [clock.burst_seconds(call) for call in calls]
    forward, backward = attention.calls_of(team, scores)
    found = _rounds(team, [*calls, forward, backward, _passes(team, work)], budget)
    rows = [
        products.row_of(case, seconds, burst)
        for case, seconds, burst in zip(shapes, found[: len(calls)], bursts, strict=True)
    ]
    return rows, [attention.row_of(team, scores, found[-3], found[-2])]


def _passes(team: Team, work: Work) -> Call:
    """A copy of as many bytes as the step moves for each of its attentions."""
    size = (work.elementwise_bytes + work.quantise_bytes + work.loss_bytes + work.copy_bytes) / max(
        1.0, work.attention.count
    )
    source = torch.ones(max(1, int(size / 4)), device=team.device, dtype=torch.bfloat16)
    return partial(torch.empty_like(source).copy_, source)


def _rounds(team: Team, calls: Sequence[Call], budget: float) -> list[float]:
    """Median seconds of each call over the later half of the rounds, on the slowest rank."""
    for call in calls:
        call()
    team.meet()
    (first,) = _timed(team, calls, 1)
    count = max(ROUNDS, int(budget / team.slowest(max(1e-6, sum(first)))))
    rounds = _timed(team, calls, count)[count // 2 :]
    return [team.slowest(statistics.median(row[place] for row in rounds)) for place in range(len(calls))]


def _timed(team: Team, calls: Sequence[Call], rounds: int) -> list[list[float]]:
    """Seconds by round and call; on a device everything is queued before anything is read."""
    if not team.cuda:
        return [[_seconds(call) for call in calls] for _ in range(rounds)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(calls) + 1)]
    team.finish()
    marks[0].record()
    for place, mark in enumerate(marks[1:]):
        calls[place % len(calls)]()
        mark.record()
    team.finish()
    each = [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return [each[start : start + len(calls)] for start in range(0, len(each), len(calls))]


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
