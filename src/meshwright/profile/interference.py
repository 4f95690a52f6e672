"""Matrix products alone, a collective or a copy to the host alone, and both at once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from meshwright.profile.call_timing import Clock
from meshwright.profile.collective_times import gather_into, kinds, scatter_into
from meshwright.profile.product_times import linear
from meshwright.profile.team import Team
from meshwright.spec.profile import Interference

SHAPE = {"cuda": (8192, 4096, 4096), "cpu": (512, 512, 512)}
BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
LONGER = 1.5
"""Products take this many times as long as what runs beside them, so that it hides entirely."""
LEAST, MOST = 5, 40
"""Rounds: each times the three cases one after another, so that a slow drift of the device's clocks meets all alike."""

Begin = Callable[[], Callable[[], object]]
"""Begins something beside compute and returns what waits for it."""


def interferences(team: Team, clock: Clock, budget: float) -> list[Interference]:
    """All-gather and reduce-scatter in the widest group inside a node and across nodes, and on a GPU a copy to the host."""
    cases: list[Case] = []
    size = BYTES[team.device.type]
    widest = {kind.nodes: kind for kind in kinds(team.ranks, team.ranks_per_node)}
    for nodes, kind in widest.items():
        group = team.group(kind.parts)
        cases.append(Case("all_gather", kind.ranks, nodes, _gather(group, size, team.device)))
        cases.append(Case("reduce_scatter", kind.ranks, nodes, _reduce(group, size, team.device)))
    if team.cuda:
        cases.append(Case("to_host", 1, 1, _copy(size, team.device)))
    return [_timed(team, clock, case, budget / len(cases)) for case in cases]


@dataclass(frozen=True)
class Case:
    """What runs beside the products, in groups of `ranks` over `nodes`."""

    op: Literal["all_gather", "reduce_scatter", "to_host"]
    ranks: int
    nodes: int
    begin: Begin


def _timed(team: Team, clock: Clock, case: Case, budget: float) -> Interference:
    begin = case.begin
    product = linear(SHAPE[team.device.type], "bf16" if team.cuda else "fp32", team.device)
    other = clock.seconds(lambda: begin()(), budget / 10)
    one = clock.seconds(product, budget / 10)
    count = max(1, math.ceil(LONGER * other / one))
    rounds = min(MOST, max(LEAST, int(budget / (3 * LONGER * other + 2 * count * one))))
    alone, beside, travelling = [], [], []
    for _ in range(rounds):
        alone.append(_compute(team, product, count, None))
        beside.append(_compute(team, product, count, begin))
        travelling.append(_compute(team, lambda: begin()(), 1, None))
    compute, together, moved = (team.slowest(statistics.median(times)) for times in (alone, beside, travelling))
    return Interference(
        op=case.op, ranks=case.ranks, nodes=case.nodes, bytes=BYTES[team.device.type], compute_seconds=compute, other_seconds=moved,
        together_seconds=together,
    )  # fmt: skip


def _compute(team: Team, call: Callable[[], object], count: int, begin: Begin | None) -> float:
    """Seconds of `count` calls, all ranks beginning together; what `begin` starts runs beside them and is not part of the time."""
    team.meet()
    if team.cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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


def _gather(group: dist.ProcessGroup, size: int, device: torch.device) -> Begin:
    whole, part = _buffers(group, size, device)
    return lambda: _waiting(gather_into(whole, part, group=group, async_op=True))


def _reduce(group: dist.ProcessGroup, size: int, device: torch.device) -> Begin:
    whole, part = _buffers(group, size, device)
    return lambda: _waiting(scatter_into(part, whole, group=group, async_op=True))


def _buffers(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    share = size // 4 // group.size()
    return torch.zeros(share * group.size(), device=device), torch.zeros(share, device=device)


def _waiting(work: dist.Work | None) -> Callable[[], object]:
    assert work is not None
    return work.wait


def _copy(size: int, device: torch.device) -> Begin:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device)

    def begin() -> Callable[[], object]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return lambda: torch.cuda.current_stream(device).wait_stream(stream)

    return begin
