"""Decides which ranks get copies of which experts for the next step, for all layers, from the rows of the last steps.

The most loaded experts are copied from their owners for one step (Hecate, arXiv 2502.02581, algorithm 1). With `fixed_copies`, the same
experts are copied in every step, whatever their loads are.

Owners never change here. A layer gets no copies if its ranks have equal loads, or if copies would not save time according to
`expert_costs`. A decision is a pure function of whole numbers, in a fixed order, so all ranks decide the same without a message.

Shapes: L layers, R ranks, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.policies.expert_copies import spread_copies
from meshwright.policies.expert_costs import ExpertCosts, LayerTimes, layer_times
from meshwright.policies.expert_routing import RowTotals, node_rows, owned, row_totals

EVEN_LOADS = 1.01
"""Ranks have equal loads in a layer if the largest load is at most this multiple of the mean."""


@dataclass(frozen=True)
class PlacementProblem:
    """Input of a placement decision. `counts` are the rows of one step, or their sum over a window of `steps` steps."""

    counts: np.ndarray
    """Rows by the rank that sends them, `(L, R, E)`, whole numbers."""
    owners: np.ndarray
    """Rank that owns each expert, `(L, E)`."""
    slots: int
    """Copies that a rank may have, in addition to the experts that it owns."""
    costs: ExpertCosts
    steps: int = 1

    @cached_property
    def by_node(self) -> np.ndarray:
        """Rows by the node that sends them, `(L, N, E)`."""
        return node_rows(self.counts, self.costs.ranks_per_node)

    @cached_property
    def loads(self) -> np.ndarray:
        """Rows by expert, `(L, E)`."""
        return self.by_node.sum(1)

    def row_totals(self, present: np.ndarray) -> RowTotals:
        """Rows of each rank and node over the window, if ranks have the experts `present` `(L, R, E)`."""
        return row_totals(self.counts, self.by_node, present)

    def times(self, totals: RowTotals) -> LayerTimes:
        """Seconds of each layer in an average step of the window."""
        times = layer_times(totals, self.owners, self.costs)
        return LayerTimes(times.compute / self.steps, times.exchange / self.steps, times.weights)


def place_experts(problem: PlacementProblem) -> np.ndarray:
    """The experts on each rank, `(L, R, E)` bool: those that the rank owns, and at most `slots` copies."""
    return cheapest(problem, _hecate(problem, owned(problem.owners, problem.counts.shape[1])))


def cheapest(problem: PlacementProblem, candidates: Iterable[np.ndarray]) -> np.ndarray:
    """For each layer, the fastest of the candidates `(L, R, E)`. Without copies if loads are equal, or if no candidate saves time."""
    best = owned(problem.owners, problem.counts.shape[1])
    totals = problem.row_totals(best)
    seconds = problem.times(totals).total
    uneven = totals.computed.max(1) > EVEN_LOADS * totals.computed.mean(1)
    for candidate in candidates:
        candidate_seconds = problem.times(problem.row_totals(candidate)).total
        better = uneven & (candidate_seconds < seconds)
        best[better] = candidate[better]
        seconds = np.where(better, candidate_seconds, seconds)
    return best


def fixed_copies(base: np.ndarray, slots: int) -> np.ndarray:
    """`base` `(L, R, E)` with the first experts added on all ranks: as many experts as fit into `slots` copies per rank."""
    fits = np.cumsum(~base, axis=2).max(1) <= slots
    return base | fits[:, None, :]


def overlap_degree(costs: ExpertCosts, ranks: int) -> float:
    """How many experts can be copied to all ranks while the layer's other work runs, so that the copies cost no time."""
    slowest = _copy_seconds(costs, ranks)
    return costs.hidden // slowest if slowest else math.inf


def copied_everywhere(policy: str, slots: int, costs: ExpertCosts | None, ranks: int) -> int:
    """How many of the most loaded experts the policy copies to all ranks. Owners of these have no more rows than other ranks."""
    return int(min(overlap_degree(costs, ranks), slots)) if policy == "hecate" and costs is not None else 0


def _copy_seconds(costs: ExpertCosts, ranks: int) -> float:
    """Seconds until one expert is copied to all ranks."""
    return max(costs.expert_inside, costs.expert_across if ranks > costs.ranks_per_node else 0.0)


def _everywhere(experts: np.ndarray, base: np.ndarray) -> np.ndarray:
    """`base` with `experts` added on all ranks. `experts` has the shape `(L, n)`, or `(1, n)` for the same experts in all layers."""
    chosen = np.zeros((len(base), base.shape[2]), dtype=bool)
    np.put_along_axis(chosen, np.broadcast_to(experts, (len(base), experts.shape[1])), True, axis=1)
    return base | chosen[:, None, :]


def _hecate(problem: PlacementProblem, base: np.ndarray) -> list[np.ndarray]:
    """Candidates: the most loaded experts on all ranks, and other placements if memory allows fewer copies than the other work can overlap.

    The second candidate has copies in proportion to load. If a node has slots for all experts, there are also candidates with every expert
    on each node, so that rows stay in their node. The copies in a node follow the loads of all nodes, because these change less from step
    to step than the loads of one node.
    """
    layers, ranks, experts = base.shape
    hidden = int(min(overlap_degree(problem.costs, ranks), experts))
    slots = min(problem.slots, experts)
    if not min(hidden, slots):
        return []
    order = np.argsort(-problem.loads, axis=1, kind="stable")
    candidates = [_everywhere(order[:, : min(hidden, slots)], base)]
    per_node = problem.costs.ranks_per_node
    free = np.full((layers, ranks), slots)
    if hidden > slots:
        candidates.append(spread_copies(problem.loads, base, free, per_node))
    if slots * per_node >= experts and ranks > per_node:  # one node has all experts in any case
        owned_count = base.sum(2)
        for node_free in (free, np.maximum(free - owned_count, 0)):
            on_nodes = spread_copies(
                np.repeat(problem.loads, ranks // per_node, axis=0),
                base.reshape(-1, per_node, experts),
                node_free.reshape(-1, per_node),
                per_node,
                on_all=True,
            )
            candidates.append(on_nodes.reshape(base.shape))
    return candidates
