"""What-if analysis of recorded steps: how long steps would take if some operations had their ideal duration.

The method is from "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25):

- The ideal duration of an operation is the mean (compute) or the median (all others) over all operations of its type.
- T is the mean time of a step that is replayed as recorded, but without launch delays. T_ideal is the same with ideal durations.
- The slowdown is S = T / T_ideal.
- The slowdown of a part x (a type, a stage or a rank) is S_x = T(ideal durations, except x as recorded) / T_ideal.

The public traces have no data loading, checkpoints and validation. Here, waiting for data and garbage collection have the ideal duration 0.
Checkpoints and validation keep their durations, because they delay no other rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.diagnosis.operations import CATEGORY_OF, P2P_TYPES, TYPES
from meshwright.diagnosis.replay import OperationTimes, replay

SLOWEST_PERCENT = 3
"""M_W is about this percentage of the workers: the slowest, rounded up to a whole number of workers."""


REPORTED_TYPE = {name: f"{name.partition('-')[0]}-pp-comm" for name in P2P_TYPES}
"""The name under which sends and receives of one kind are reported together, by type of message."""


def typical_transfers(measured: OperationTimes) -> np.ndarray:
    """The median transfer time of each communication, (node, dp, step); 0 for other operations.

    The median is over all communications of a type; for blocking communications, over the steps and data-parallel ranks of one node.
    """
    typical = np.zeros_like(measured.work)
    graph = measured.graph
    blocking = np.zeros(len(graph.nodes), dtype=bool)
    blocking[[member for group in graph.groups if group.blocking for member in group.members]] = True
    for code in np.unique(graph.types):
        nodes = (graph.types == code) & ~blocking
        if CATEGORY_OF[TYPES[code]] == "communication" and nodes.any():
            typical[nodes] = np.median(measured.work[nodes])
    if blocking.any():
        typical[blocking] = np.median(measured.work[blocking], axis=(1, 2), keepdims=True)
    return typical


def ideal_work(measured: OperationTimes) -> np.ndarray:
    """The ideal duration of every operation, (node, dp, step)."""
    ideal = measured.work.copy()
    transfers = typical_transfers(measured)
    types = measured.graph.types
    for code in np.unique(types):
        nodes = types == code
        category = CATEGORY_OF[TYPES[code]]
        if category == "compute" or TYPES[code] == "gc":
            ideal[nodes] = measured.work[nodes].mean()
        elif category == "communication":
            ideal[nodes] = transfers[nodes]
        elif category != "other":
            ideal[nodes] = 0.0
    return ideal


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Slowdowns of recorded steps. Times are in seconds, as means over the steps."""

    measured: OperationTimes
    ideal: np.ndarray
    seconds: float
    """Step time of the replay with recorded durations, without launch delays."""
    ideal_seconds: float
    by_type: dict[str, float]
    by_dp: dict[int, float]
    by_stage: dict[int, float]
    by_rank: dict[int, float]
    """For each global rank, the smaller of the slowdowns of its stage and of its data-parallel rank, as in the paper."""

    @property
    def slowdown(self) -> float:
        return self.seconds / self.ideal_seconds

    @property
    def launch_slowdown(self) -> float:
        """Measured step time divided by the step time of the replay without launch delays."""
        return float(self.measured.step_seconds.mean()) / self.seconds

    def slowdown_of(self, mask: np.ndarray) -> float:
        """S_x for the operations in `mask`, which broadcasts to (node, dp, step)."""
        return self.slowdown_with(np.where(mask, self.measured.work, self.ideal))

    def slowdown_with(self, work: np.ndarray) -> float:
        """Step time of a replay with the durations `work`, divided by T_ideal."""
        return float(replay(self.measured.graph, work).mean()) / self.ideal_seconds

    def removed_share(self, mask: np.ndarray) -> float:
        """The share of T − T_ideal that would be saved if the operations in `mask` had their ideal duration."""
        excess = self.seconds - self.ideal_seconds
        seconds = float(replay(self.measured.graph, np.where(mask, self.ideal, self.measured.work)).mean())
        return (self.seconds - seconds) / excess if excess else 0.0

    @property
    def last_stage_share(self) -> float:
        """M_S: the share of T − T_ideal that would be saved if the last stage had ideal durations."""
        stages = self.measured.graph.stages
        return self.removed_share((stages == stages.max())[:, None, None])

    @property
    def worst_rank_share(self) -> float:
        """M_W: the share of T − T_ideal that would be saved if the slowest 3% of the workers had ideal durations."""
        count = -(-len(self.by_rank) * SLOWEST_PERCENT // 100)
        slowest = sorted(self.by_rank, key=lambda rank: (-self.by_rank[rank], rank))[:count]
        return self.removed_share(self.of_ranks(slowest))

    def of_ranks(self, ranks: Iterable[int]) -> np.ndarray:
        """A mask of the operations of these global ranks, (node, dp, 1)."""
        chosen = np.isin(self.measured.rank, list(ranks))
        return chosen[self.measured.graph.stages][..., None]


def analyse(measured: OperationTimes) -> WhatIf:
    """Compute all slowdowns: replay with ideal durations except one type, one stage or one data-parallel rank, for each of them."""
    graph = measured.graph
    ideal = ideal_work(measured)
    ideal_seconds = float(replay(graph, ideal).mean())
    dp_size = measured.work.shape[1]

    def slowdown(mask: np.ndarray) -> float:
        return float(replay(graph, np.where(mask, measured.work, ideal)).mean()) / ideal_seconds

    names = np.array([REPORTED_TYPE.get(TYPES[code], TYPES[code]) for code in graph.types])
    by_type = {name: slowdown((names == name)[:, None, None]) for name in np.unique(names).tolist()}
    by_stage = {int(stage): slowdown((graph.stages == stage)[:, None, None]) for stage in np.unique(graph.stages)}
    by_dp = {dp: slowdown((np.arange(dp_size) == dp)[None, :, None]) for dp in range(dp_size)}
    by_rank = {
        int(measured.rank[stage, dp]): min(by_stage[stage], by_dp[dp]) for stage in by_stage for dp in range(dp_size)
    }
    return WhatIf(
        measured=measured,
        ideal=ideal,
        seconds=float(replay(graph, measured.work).mean()),
        ideal_seconds=ideal_seconds,
        by_type=by_type,
        by_stage=by_stage,
        by_dp=by_dp,
        by_rank=dict(sorted(by_rank.items())),
    )
