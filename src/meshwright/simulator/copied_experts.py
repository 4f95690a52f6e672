"""Effects of copied and moved experts on the costs of a plan, found by running their policies on recorded expert loads.

To save time, only the last steps of a long recording are simulated, and only some layers, evenly spaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from meshwright.costs.plan_costs import Pricing
from meshwright.policies.expert_owners import better_owners, even_owners
from meshwright.policies.expert_placement import copied_everywhere, fixed_copies, place_experts
from meshwright.policies.expert_routing import owned
from meshwright.simulator.expert_loads import PlayedLoads, play_loads
from meshwright.simulator.expert_placement_costs import placement_costs
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import EQUAL_LOADS, TrainSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import ExpertPlan, Plan
from meshwright.workload.expected_loads import recorded_loads
from meshwright.workload.groups import all_present, copies_experts, moves_experts

DECISION_DELAY = 2
"""A decision made from the loads up to step n is used in step n + 2 (`training.expert_decisions`)."""
PLAYED_STEPS = 12
"""Maximum number of recorded steps that are simulated."""
PLAYED_LAYERS = 8
"""Maximum number of layers that are simulated."""


@dataclass(frozen=True)
class CopyEffects:
    """Effects of expert copies on the cost model; the fields are the columns of `Layouts` with these names."""

    imbalance: float
    """Rows of the busiest rank relative to the mean over ranks."""
    exchanged_share: float
    """Seconds of the exchange of tokens relative to those without copies, where both are counted without the imbalance."""
    copy_seconds: float
    """Exposed seconds of the exchange of copied weights, of one micro-batch in all layers."""


def with_copies(
    priced: Pricing | None, model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec
) -> Pricing | None:
    """Return the cost model's inputs with the effects of the plan's expert copies and expert placement.

    `priced` is returned unchanged if the plan neither copies nor moves experts. It is also unchanged without recorded loads, unless all
    experts are present on all ranks, where loads do not matter.
    """
    has_loads = train.expert_load not in (None, EQUAL_LOADS)
    placed = copies_experts(plan) or moves_experts(plan)
    if priced is None or not placed or (not has_loads and not all_present(model, plan)):
        return priced
    columns = vars(copy_effects(model, train, plan, cluster))
    others = {
        linear: replace(other, layout=replace(other.layout, **columns))
        for linear, other in priced.other_formats.items()
    }
    return replace(priced, layout=replace(priced.layout, **columns), other_formats=others)


def copy_effects(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> CopyEffects:
    """Return the effects of a plan's expert copies and expert owners. Raises BadInput if the device's rates or the loads are not known."""
    return _copy_effects(model, train, plan.without_prediction, cluster)


@lru_cache(maxsize=256)
def _copy_effects(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> CopyEffects:
    """Compute `copy_effects`; cached by plan without its prediction."""
    assert plan.experts is not None
    experts = plan.experts
    ranks = plan.experts.expert * plan.axis_size("tensor")
    uncopied = replace(plan, experts=replace(experts, policy="none", slots=0))
    costs = placement_costs(model, train, uncopied, cluster, _ranks_per_node(plan, cluster))
    costs = replace(costs, weight_exchanges=2 if experts.keep else 3)
    steps = _played_counts(model, train, plan, ranks)
    layers = len(steps[0])
    even = owners = even_owners(layers, model.experts, ranks)
    if moves_experts(plan):
        copied = copied_everywhere(experts.policy, experts.slots, costs, ranks)
        owners = better_owners(_earlier_loads(model, train, experts), even, copied, ranks, costs.ranks_per_node)
    base = owned(owners, ranks)
    if experts.policy in ("none", "fixed"):
        played = play_loads(steps, owners, costs, initial=fixed_copies(base, experts.slots), delay=DECISION_DELAY)
    else:
        played = play_loads(
            steps,
            owners,
            costs,
            place=place_experts,
            slots=experts.slots,
            window=experts.load_window,
            delay=DECISION_DELAY,
        )
    alone = play_loads(steps, even, costs, initial=owned(even, ranks), delay=DECISION_DELAY)
    routed = model.routed_layers
    return _effects(played, alone, routed)


def _effects(played: PlayedLoads, alone: PlayedLoads, layers: int) -> CopyEffects:
    """Return the effects of copies on `layers` layers, by comparing a simulation with copies and one without (`alone`)."""
    imbalance = float(played.imbalance.mean())
    # The cost model multiplies the exchange by the imbalance. Copies change the imbalance, so it is divided out here.
    share = played.exchange.mean() / max(float(alone.exchange.mean()), 1e-12) * alone.imbalance.mean() / imbalance
    return CopyEffects(imbalance, float(share), float(played.weights.mean()) * layers)


def _played_counts(model: ModelSpec, train: TrainSpec, plan: Plan, ranks: int) -> list[np.ndarray]:
    """Return for each simulated step how many tokens each rank sends to each expert in a micro-batch, `(layers, ranks, experts)`.

    All ranks are assumed to have the same distribution of tokens over experts, the recorded one.
    """
    if train.expert_load in (None, EQUAL_LOADS):
        loads = np.ones((DECISION_DELAY + 1, 1, model.experts), dtype=np.int64)
    else:
        assert train.expert_load is not None
        loads = recorded_loads(model, train.expert_load)
    loads = loads[-(PLAYED_STEPS + DECISION_DELAY) :, _played_layers(loads)]
    if len(loads) <= DECISION_DELAY:
        loads = np.repeat(loads, DECISION_DELAY + 1, axis=0)
    tokens = plan.batch.micro_batch * train.seq_len / plan.axis_size("tensor")
    for axis in ("context_ring", "context_ulysses"):
        tokens /= plan.axis_size(axis)
    shares = loads / loads.sum(2, keepdims=True)
    counts = np.rint(shares * tokens * model.experts_per_token).astype(np.int64)
    return [np.repeat(step[:, None], ranks, axis=1) for step in counts]


def _played_layers(loads: np.ndarray) -> np.ndarray:
    """Return the indices of the layers that are simulated, for `loads` `(steps, layers, experts)`.

    Eight of 61 layers, evenly spaced:

    >>> _played_layers(np.ones((1, 61, 4)))
    array([ 0,  9, 17, 26, 34, 43, 51, 60])
    """
    routed = loads.shape[1]
    return np.unique(np.linspace(0, routed - 1, min(routed, PLAYED_LAYERS)).round().astype(int))


def _earlier_loads(model: ModelSpec, train: TrainSpec, experts: ExpertPlan) -> np.ndarray:
    """Return the sum of the recorded loads from which the owners of experts are chosen, `(simulated layers, experts)`.

    Owners are chosen every `placement_every` steps, so on average a step uses owners that were chosen half of that time earlier. The
    window of loads therefore ends `placement_every // 2` steps before the simulated steps.
    """
    assert train.expert_load is not None
    loads = recorded_loads(model, train.expert_load)
    end = max(1, len(loads) - PLAYED_STEPS - DECISION_DELAY - experts.placement_every // 2)
    return loads[max(0, end - experts.load_window) : end, _played_layers(loads)].sum(0)


def _ranks_per_node(plan: Plan, cluster: ClusterSpec) -> int:
    """Return how many ranks of a node are in one expert group; the size of the whole group if nodes have different numbers of them."""
    layout = Layout.of(plan, cluster.ranks_per_node)
    nodes = [layout.node(rank) for rank in layout.expert_groups()[0]]
    count = nodes.count(nodes[0])
    return count if len(nodes) % count == 0 and nodes.count(nodes[-1]) == count else len(nodes)
