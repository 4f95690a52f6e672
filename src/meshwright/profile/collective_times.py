"""Times collectives by operation, size and group.

All groups of a division run at the same time, as the groups of a mesh axis do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import torch
import torch.distributed as dist

from meshwright.profile.call_timing import Call, TeamClock
from meshwright.profile.team import Team
from meshwright.spec.profile import CollectiveTime, Operation

RankGroups = tuple[tuple[int, ...], ...]
"""The ranks of each group."""
SIZES = {
    "cuda": tuple(1 << power for power in (16, 20, 22, 24, 26, 28)),
    "cpu": tuple(1 << power for power in (14, 18, 20, 22)),
}
"""Bytes of an operation that are measured, by device type."""
LONG_SECONDS = 0.4
"""If an operation is expected to take more seconds than this with the next size, that size is not measured."""
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch's all-gather into one tensor; torch 2.13 renamed it."""
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch's reduce-scatter of one tensor; torch 2.13 renamed it."""


@dataclass(frozen=True)
class GroupLayout:
    """A division of all ranks into groups of equal size."""

    groups: RankGroups
    """The ranks of each group."""
    nodes: int
    """Number of nodes on which each group has ranks."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks of a group."""
        return len(self.groups[0])


def collective_times(team: Team, clock: TeamClock, budget: float) -> list[CollectiveTime]:
    """Return the times of every operation in every division of the ranks, within about `budget` seconds.

    Small sizes come first. The list is empty for a single rank.
    """
    layouts = group_layouts(team.ranks, team.ranks_per_node)
    times: list[CollectiveTime] = []
    for position, layout in enumerate(layouts):
        start = time.perf_counter()
        layout_budget = budget / len(layouts)
        group = team.group(layout.groups)
        for op in get_args(Operation):
            if op == "p2p" and layout.ranks != 2:
                continue
            times += _times_by_size(team, clock, group, layout, op, layout_budget / 5)
            if team.from_first_rank(time.perf_counter() - start) > 2 * layout_budget and position:
                break
    return times


def group_layouts(ranks: int, per_node: int) -> list[GroupLayout]:
    """Return the divisions of the ranks that are measured.

    They are groups of 2, 4, 8, … neighbours up to a whole node; then groups of one rank of each node; then all ranks.
    Example with 8 ranks, 4 per node: (0, 1) …; (0, 1, 2, 3) …; (0, 4) …; (0, …, 7).
    """
    sizes = [1 << power for power in range(1, 12) if (1 << power) < per_node and per_node % (1 << power) == 0]
    sizes += [per_node] if per_node > 1 else []
    layouts = [GroupLayout(_neighbour_groups(range(ranks), size), 1) for size in sizes]
    nodes = ranks // per_node
    if nodes > 1 and per_node > 1:
        layouts.append(GroupLayout(tuple(tuple(range(first, ranks, per_node)) for first in range(per_node)), nodes))
    if nodes > 1:
        layouts.append(GroupLayout((tuple(range(ranks)),), nodes))
    return layouts


def operation(op: Operation, size_bytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[int, Call]:
    """Return (bytes, a call) of a collective. `size_bytes` is rounded down so that the ranks' shares are equal.

    On a GPU, reductions are in fp32 and the other operations in bf16. On a CPU, all operations are in fp32.
    """
    ranks = group.size()
    dtype = torch.bfloat16 if device.type == "cuda" and op not in ("reduce_scatter", "all_reduce") else torch.float32
    shard_elements = max(1, size_bytes // dtype.itemsize // ranks)
    whole = torch.zeros(shard_elements * ranks, dtype=dtype, device=device)
    shard = torch.zeros(shard_elements, dtype=dtype, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: gather_into(whole, shard, group=group),
        "reduce_scatter": lambda: scatter_into(shard, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_to_all": _exchange(whole, group),
        "p2p": lambda: _send_in_pair(whole, group),
    }
    return whole.nbytes, calls[op]


def _times_by_size(
    team: Team, clock: TeamClock, group: dist.ProcessGroup, layout: GroupLayout, op: Operation, budget: float
) -> list[CollectiveTime]:
    """Return the times of one operation in one group, for ascending sizes."""
    sizes = SIZES[team.device.type]
    times: list[CollectiveTime] = []
    for size, next_size in pairwise((*sizes, sizes[-1])):
        size_bytes, call = operation(op, size, group, team.device)
        seconds = clock.seconds(call, budget / len(sizes))
        times.append(CollectiveTime(op=op, ranks=layout.ranks, nodes=layout.nodes, bytes=size_bytes, seconds=seconds))
        if seconds * next_size / size > LONG_SECONDS:
            break
    return times


def _exchange(whole: torch.Tensor, group: dist.ProcessGroup) -> Call:
    """Return a call of an all-to-all."""
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group)


def _send_in_pair(message: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send a message from the first rank of a pair to the second."""
    if group.rank() == 0:
        dist.send(message, group=group, group_dst=1)
    else:
        dist.recv(message, group=group, group_src=0)


def _neighbour_groups(ranks: range, size: int) -> RankGroups:
    """Return groups of `size` consecutive ranks."""
    return tuple(tuple(ranks[start : start + size]) for start in range(0, len(ranks), size))
