"""Placement of expert copies on ranks for the next step, decided for all layers from the rows of the last steps.

- `hecate` copies experts from their owners for one step (arXiv 2502.02581, algorithm 1).
- `fastermoe` copies the most loaded experts to all ranks, as many as pay (shadowing; He et al. 2022, PPoPP).
- `flexmoe` changes the copies of the previous step by a few at a time (Nie et al. 2023, arXiv 2304.03946).
- `fixed` copies the same experts to all ranks in every step, whatever the loads are.

Owners never change here. Every policy but `fixed` leaves a layer as it is where its ranks have equal loads, or where copies would not save
time by `expert_costs`. A decision is a pure function of whole numbers in a fixed order, so all ranks decide alike without a message.

Shapes: L layers, R ranks, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.policies.expert_copies import spread_copies
from meshwright.policies.expert_costs import ExpertCosts, LayerTimes, layer_times
from meshwright.policies.expert_routing import RowTotals, node_rows, owned, row_totals

EVEN_LOADS = 1.01
"""A layer's ranks have equal loads if the largest is at most this multiple of the mean."""
FLEXMOE_CHANGES = 10
"""Most copies that `flexmoe` adds to a layer in a step."""


@dataclass(frozen=True)
class PlacementProblem:
    """Input of a placement decision. `counts` has a step's rows, or their sum over a window of `steps` steps."""

    counts: np.ndarray
    """Rows by source rank, `(L, R, E)`, whole numbers."""
    owners: np.ndarray
    """Rank that owns each expert, `(L, E)`."""
    slots: int
    """Most copies on a rank, in addition to the experts that it owns."""
    costs: ExpertCosts
    steps: int = 1
    previous: np.ndarray | None = None
    """Experts present in the previous step, `(L, R, E)`; None if only their owners have them."""

    @cached_property
    def by_node(self) -> np.ndarray:
        """Rows by source node, `(L, N, E)`."""
        return node_rows(self.counts, self.costs.ranks_per_node)

    @cached_property
    def loads(self) -> np.ndarray:
        """Rows by expert, `(L, E)`."""
        return self.by_node.sum(1)

    def row_totals(self, present: np.ndarray) -> RowTotals:
        """Rows of each rank and node over the window if the experts `present` `(L, R, E)` are."""
        return row_totals(self.counts, self.by_node, present)

    def times(self, totals: RowTotals) -> LayerTimes:
        """Seconds of each layer in a mean step of the window."""
        times = layer_times(totals, self.owners, self.costs)
        return LayerTimes(times.compute / self.steps, times.exchange / self.steps, times.weights)


def place_experts(policy: str, problem: PlacementProblem) -> np.ndarray:
    """Experts present on each rank, `(L, R, E)`, boolean; a rank has what it owns and at most `slots` copies.

    `policy` is a key of `POLICIES`.
    """
    base = owned(problem.owners, problem.counts.shape[1])
    if policy == "fixed":
        return fixed_copies(base, problem.slots)
    best, totals = base.copy(), problem.row_totals(base)
    seconds = problem.times(totals).total
    uneven = totals.computed.max(1) > EVEN_LOADS * totals.computed.mean(1)
    for candidate in POLICIES[policy](problem, base):
        candidate_seconds = problem.times(problem.row_totals(candidate)).total
        better = uneven & (candidate_seconds < seconds)
        best[better] = candidate[better]
        seconds = np.where(better, candidate_seconds, seconds)
    return best


def fixed_copies(base: np.ndarray, slots: int) -> np.ndarray:
    """`base` `(L, R, E)` and the first experts on all ranks, as many as fit into `slots` copies of each rank."""
    fits = np.cumsum(~base, axis=2).max(1) <= slots
    return base | fits[:, None, :]


def overlap_degree(costs: ExpertCosts, ranks: int) -> float:
    """How many experts can be copied to all ranks behind the other work of a layer."""
    slowest = _copy_seconds(costs, ranks)
    return costs.hidden // slowest if slowest else math.inf


def copied_everywhere(policy: str, slots: int, costs: ExpertCosts | None, ranks: int) -> int:
    """How many of the most loaded experts a policy copies to all ranks, so that their owners have no more rows than others."""
    if policy == "fastermoe":
        return slots
    return int(min(overlap_degree(costs, ranks), slots)) if policy == "hecate" and costs is not None else 0


def _copy_seconds(costs: ExpertCosts, ranks: int) -> float:
    """Seconds in which one expert reaches all ranks."""
    return max(costs.expert_inside, costs.expert_across if ranks > costs.ranks_per_node else 0.0)


def _everywhere(experts: np.ndarray, base: np.ndarray) -> np.ndarray:
    """`base` with `experts` `(L or 1, any number)` present on all ranks."""
    chosen = np.zeros((len(base), base.shape[2]), dtype=bool)
    np.put_along_axis(chosen, np.broadcast_to(experts, (len(base), experts.shape[1])), True, axis=1)
    return base | chosen[:, None, :]


def _hecate(problem: PlacementProblem, base: np.ndarray) -> list[np.ndarray]:
    """The most loaded experts on all ranks and, where memory allows fewer than can be hidden, copies in proportion to load.

    Where a node has slots for all experts, each node is also offered copies of all of them: its rows then stay in it. Its copies follow the
    loads of all nodes, which change less from step to step than its own.
    """
    layers, ranks, experts = base.shape
    hidden, slots = int(min(overlap_degree(problem.costs, ranks), experts)), min(problem.slots, experts)
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


def _fastermoe(problem: PlacementProblem, base: np.ndarray) -> list[np.ndarray]:
    """The most loaded experts on all ranks, as many as minimise time if nothing hides their exchange.

    Only rows and weights that grow with the number of copies count: it is decided for all numbers at once.
    """
    ranks, costs = base.shape[1], problem.costs
    most = min(problem.slots, base.shape[2])
    order = np.argsort(-problem.loads, axis=1, kind="stable")[:, :most]
    loads = np.take_along_axis(problem.loads, order, axis=1)
    local = np.take_along_axis(problem.counts, order[:, None], axis=2)
    own = np.take_along_axis(base, order[:, None], axis=2)
    change = np.cumsum(local - own * loads[:, None], axis=2)
    initial = _rank_sums(problem.owners, problem.loads, ranks)[..., None]
    rows = np.concatenate([initial, initial + change], axis=2).max(1) / problem.steps
    row_seconds = costs.row_compute * costs.compute_passes + costs.row_inside * costs.row_exchanges
    weight_seconds = _copy_seconds(costs, ranks) * costs.weight_exchanges
    seconds = rows * row_seconds + np.arange(most + 1) * weight_seconds
    number = seconds.argmin(1)
    chosen = np.zeros((len(base), base.shape[2]), dtype=bool)
    np.put_along_axis(chosen, order, np.arange(most) < number[:, None], axis=1)
    return [base | chosen[:, None, :]]


def _flexmoe(problem: PlacementProblem, base: np.ndarray) -> list[np.ndarray]:
    """Copies of the previous step, changed while the largest load of a rank falls.

    A change gives the expert with most rows per copy another copy, on the rank with the smallest load that lacks it. A rank without a free
    slot gives up the copy with the fewest rows.
    """
    present = base.copy() if problem.previous is None else problem.previous | base
    layers, loads = np.arange(len(base)), problem.loads
    copies = present.sum(1)
    layer, rank, expert = np.nonzero(present)
    part = loads / copies
    flat = np.bincount(layer * base.shape[1] + rank, part[layer, expert], base.shape[0] * base.shape[1])
    rank_loads = flat.reshape(base.shape[:2])
    improving = np.ones(len(base), dtype=bool)
    for _ in range(FLEXMOE_CHANGES):
        expert = part.argmax(1)
        holders = present[layers, :, expert]
        rank = np.where(holders, np.inf, rank_loads).argmin(1)
        removable = present[layers, rank] & ~base[layers, rank]
        removed = np.where(removable, part, np.inf).argmin(1)
        full = removable.sum(1) >= problem.slots
        possible = improving & ~holders[layers, rank] & (removable.any(1) | ~full)
        added_part = loads[layers, expert] / (copies[layers, expert] + 1)
        removed_part = loads[layers, removed] / np.maximum(copies[layers, removed] - 1, 1)
        changed = rank_loads + holders * (added_part - part[layers, expert])[:, None]
        changed += present[layers, :, removed] * (full * (removed_part - part[layers, removed]))[:, None]
        changed[layers, rank] += added_part - full * removed_part
        improving = possible & (changed.max(1) < rank_loads.max(1))
        if not improving.any():
            break
        layer, dropping = layers[improving], layers[improving & full]
        present[dropping, rank[dropping], removed[dropping]] = False
        copies[dropping, removed[dropping]] -= 1
        present[layer, rank[layer], expert[layer]] = True
        copies[layer, expert[layer]] += 1
        rank_loads[layer] = changed[layer]
        part = loads / copies
    return [present]


def _rank_sums(owners: np.ndarray, values: np.ndarray, ranks: int) -> np.ndarray:
    """Sums `(L, R)` of `values` `(L, E)` over the experts of each rank."""
    on_rank = np.arange(len(owners))[:, None] * ranks + owners
    return np.bincount(on_rank.ravel(), values.ravel(), len(owners) * ranks).reshape(len(owners), ranks)


Candidates = Callable[[PlacementProblem, np.ndarray], list[np.ndarray]]
POLICIES: dict[str, Candidates] = {
    "hecate": _hecate,
    "fastermoe": _fastermoe,
    "flexmoe": _flexmoe,
    "fixed": lambda problem, base: [base],
}
"""By name the placements that a policy offers; `place_experts` takes the one of least time."""
