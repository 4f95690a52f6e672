"""Times the matmuls and the attention of a step in a mix like that of the step, with memory-bound operations between
them.

A GPU at its power limit computes matmuls more slowly the longer it computes nothing else. In a training step, attention
and memory-bound operations draw less power, so matmuls run at higher clocks than in a benchmark of matmuls alone. Rates
for the prediction of a step are therefore measured in such a mix.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from meshwright.profile import attention_times as attention
from meshwright.profile import matmul_times as matmuls
from meshwright.profile.call_timing import Call, TeamClock
from meshwright.profile.team import Team
from meshwright.spec.profile import AttentionTime, MatmulTime
from meshwright.workload.device_work import Work

ROUNDS = 5
"""Minimum number of rounds; the first half of the rounds is warm-up."""


def mixed_times(
    team: Team,
    clock: TeamClock,
    work: Work,
    matmul_cases: Sequence[matmuls.Case],
    attention_cases: Sequence[attention.Case],
    budget: float,
) -> tuple[list[MatmulTime], list[AttentionTime]]:
    """Return the times of each matmul and of each kind of attention.

    Each round runs all of them, and one layer's share of the memory-bound operations.
    """
    calls = [matmuls.call_of(case, team) for case in matmul_cases]
    bursts = [clock.burst_seconds(call) for call in calls]
    attends = [call for case in attention_cases for call in attention.calls_of(team, case)]
    seconds_by_call = _median_seconds(team, [*calls, *attends, _pass_call(team, work)], budget)
    attended = iter(seconds_by_call[len(calls) : -1])
    measured = [
        matmuls.matmul_time_of(case, seconds, burst)
        for case, seconds, burst in zip(matmul_cases, seconds_by_call[: len(calls)], bursts, strict=True)
    ]
    return measured, [
        attention.attention_time_of(team, case, forward, backward)
        for case, (forward, backward) in zip(attention_cases, zip(attended, attended, strict=True), strict=True)
    ]


def _pass_call(team: Team, work: Work) -> Call:
    """Return a call that copies as many bytes as the memory-bound operations of the step move for each attention."""
    size_bytes = (work.elementwise_bytes + work.quantise_bytes + work.loss_bytes + work.copy_bytes) / max(
        1.0, sum(attention.count for attention in work.attention)
    )
    source = torch.ones(max(1, int(size_bytes / 4)), device=team.device, dtype=torch.bfloat16)
    return partial(torch.empty_like(source).copy_, source)


def _median_seconds(team: Team, calls: Sequence[Call], budget: float) -> list[float]:
    """Return the median seconds of each call over the second half of the rounds, on the slowest rank."""
    for call in calls:
        call()
    team.meet()
    (first_round,) = _time_rounds(team, calls, 1)
    rounds_run = max(ROUNDS, int(budget / team.largest(max(1e-6, sum(first_round)))))
    rounds = _time_rounds(team, calls, rounds_run)[rounds_run // 2 :]
    return [team.largest(statistics.median(times[index] for times in rounds)) for index in range(len(calls))]


def _time_rounds(team: Team, calls: Sequence[Call], rounds: int) -> list[list[float]]:
    """Return the seconds of each call in each round: `result[round][call]`.

    On a GPU, all calls are queued before the first event is read.
    """
    if not team.cuda:
        return [[_call_seconds(call) for call in calls] for _ in range(rounds)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(calls) + 1)]
    team.finish()
    events[0].record()
    for index, event in enumerate(events[1:]):
        calls[index % len(calls)]()
        event.record()
    team.finish()
    durations = [start_event.elapsed_time(end_event) / 1e3 for start_event, end_event in pairwise(events)]
    return [durations[start : start + len(calls)] for start in range(0, len(durations), len(calls))]


def _call_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
