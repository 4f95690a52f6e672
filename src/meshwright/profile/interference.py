"""Times matmuls alone, a collective or a copy to the host alone, and both together, to find how much they slow each
other down.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from meshwright.profile.call_timing import TeamClock
from meshwright.profile.collective_times import gather_into, group_layouts, scatter_into
from meshwright.profile.matmul_times import linear
from meshwright.profile.team import Team
from meshwright.spec.profile import Interference

SHAPE = {"cuda": (8192, 4096, 4096), "cpu": (512, 512, 512)}
"""Dimensions (m, k, n) of the matmuls, by device type."""
BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
"""Bytes of the collective or the copy, by device type."""
MATMUL_RATIO = 1.5
"""Seconds of the matmuls relative to the other operation, so that the matmuls always end later."""
MIN_ROUNDS = 5
"""Minimum number of rounds. A round times the three cases one after another, so that a drift of the clocks affects all
of them equally.
"""
MAX_ROUNDS = 40
"""Maximum number of rounds."""

Begin = Callable[[], Callable[[], object]]
"""Starts an asynchronous operation and returns a function that waits for its end."""


def interferences(team: Team, clock: TeamClock, budget: float) -> list[Interference]:
    """Return the measurements for all-gather and reduce-scatter in the widest groups, inside a node and across nodes,
    and for host copies.
    """
    cases: list[InterferenceCase] = []
    size = BYTES[team.device.type]
    widest = {layout.nodes: layout for layout in group_layouts(team.ranks, team.ranks_per_node)}
    for nodes, layout in widest.items():
        group = team.group(layout.groups)
        cases.append(InterferenceCase("all_gather", layout.ranks, nodes, _gather_operation(group, size, team.device)))
        cases.append(
            InterferenceCase("reduce_scatter", layout.ranks, nodes, _reduce_operation(group, size, team.device))
        )
    if team.cuda:
        cases.append(InterferenceCase("to_host", 1, 1, _copy_operation(size, team.device)))
    return [_time_case(team, clock, case, budget / len(cases)) for case in cases]


@dataclass(frozen=True)
class InterferenceCase:
    """An operation that runs at the same time as matmuls, in groups of `ranks` ranks on `nodes` nodes."""

    op: Literal["all_gather", "reduce_scatter", "to_host"]
    """The operation."""
    ranks: int
    nodes: int
    begin: Begin
    """Starts the operation."""


def _time_case(team: Team, clock: TeamClock, case: InterferenceCase, budget: float) -> Interference:
    begin = case.begin
    matmul = linear(SHAPE[team.device.type], "bf16" if team.cuda else "fp32", team.device)
    other_seconds = clock.seconds(lambda: begin()(), budget / 10)
    matmul_seconds = clock.seconds(matmul, budget / 10)
    count = max(1, math.ceil(MATMUL_RATIO * other_seconds / matmul_seconds))
    rounds = min(
        MAX_ROUNDS, max(MIN_ROUNDS, int(budget / (3 * MATMUL_RATIO * other_seconds + 2 * count * matmul_seconds)))
    )
    matmul_times = []
    overlapped = []
    other_alone = []
    for _ in range(rounds):
        matmul_times.append(_compute_seconds(team, matmul, count, None))
        overlapped.append(_compute_seconds(team, matmul, count, begin))
        other_alone.append(_compute_seconds(team, lambda: begin()(), 1, None))
    compute_seconds, together_seconds, other_median = (
        team.largest(statistics.median(times)) for times in (matmul_times, overlapped, other_alone)
    )
    return Interference(
        op=case.op,
        ranks=case.ranks,
        nodes=case.nodes,
        bytes=BYTES[team.device.type],
        compute_seconds=compute_seconds,
        other_seconds=other_median,
        together_seconds=together_seconds,
    )


def _compute_seconds(team: Team, call: Callable[[], object], count: int, begin: Begin | None) -> float:
    """Return the seconds of `count` calls, while the operation that `begin` starts runs at the same time.

    All ranks start together. The end of that operation is not timed.
    """
    team.meet()
    if team.cuda:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        wait = begin() if begin else None
        for _ in range(count):
            call()
        end.record()
        if wait:
            wait()
        team.finish()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    wait = begin() if begin else None
    for _ in range(count):
        call()
    seconds = time.perf_counter() - began
    if wait:
        wait()
    return seconds


def _gather_operation(group: dist.ProcessGroup, size: int, device: torch.device) -> Begin:
    """Return a function that starts an all-gather of `size` bytes."""
    whole, shard = _buffers(group, size, device)
    return lambda: _wait_function(gather_into(whole, shard, group=group, async_op=True))


def _reduce_operation(group: dist.ProcessGroup, size: int, device: torch.device) -> Begin:
    """Return a function that starts a reduce-scatter of `size` bytes."""
    whole, shard = _buffers(group, size, device)
    return lambda: _wait_function(scatter_into(shard, whole, group=group, async_op=True))


def _buffers(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (whole tensor, this rank's shard) in fp32; the whole tensor has about `size` bytes."""
    shard_elements = size // 4 // group.size()
    return torch.zeros(shard_elements * group.size(), device=device), torch.zeros(shard_elements, device=device)


def _wait_function(work: dist.Work | None) -> Callable[[], object]:
    assert work is not None
    return work.wait


def _copy_operation(size: int, device: torch.device) -> Begin:
    """Return a function that starts a copy of `size` bytes to the host on another stream."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device)

    def begin() -> Callable[[], object]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return lambda: torch.cuda.current_stream(device).wait_stream(stream)

    return begin
