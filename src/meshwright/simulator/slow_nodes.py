"""Clusters of different node types: the cost model's inputs and the relative speed of each pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from meshwright.costs.plan_costs import Pricing, as_nodes, pricing
from meshwright.simulator.copied_experts import with_copies
from meshwright.simulator.units import UnitCosts
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.nodes import NodeType, node_type_runs, node_types_by_rank, rank_clusters, uniform_cluster
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan


def rank_cost_inputs(
    model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec
) -> tuple[Pricing | None, ...]:
    """Return for each pipeline rank the cost model's inputs for the slowest chip, links and ports among the rank's nodes.

    Ranks on equal nodes get the same object. An entry is None if the cost model has no figures for a node type. Raises BadInput if the
    node groups contradict the cluster.
    """
    cluster = as_nodes(cluster)
    cached_pricing = cache(
        lambda uniform: with_copies(pricing(model, train, plan, uniform), model, train, plan, cluster)
    )
    return tuple(cached_pricing(uniform) for uniform in rank_clusters(cluster, Layout.of(plan, cluster.gpus_per_node)))


def node_type_speeds(model: ModelSpec, train: TrainSpec, cluster: ClusterSpec) -> dict[NodeType, float]:
    """Return for each node type the speed of its device relative to the slowest type, measured by a block with one sequence.

    It is empty if the cost model has no rates for one of the types.
    """
    seconds = {}
    for node_type, _ in node_type_runs(cluster):
        cost_inputs = pricing(model, train, _ONE_DEVICE, uniform_cluster(cluster, (node_type,)))
        if cost_inputs is None:
            return {}
        block = UnitCosts(model, _ONE_DEVICE, cost_inputs).compute(0)
        seconds[node_type] = block.forward + block.backward_input + block.backward_weight
    return {node_type: max(seconds.values()) / own for node_type, own in seconds.items()}


def rank_speeds(speeds: Mapping[NodeType, float], cluster: ClusterSpec, layout: Layout) -> tuple[float, ...]:
    """Return for each pipeline rank the speed of its slowest node. `speeds` is by node type; if it is empty, so is the result."""
    if not speeds:
        return ()
    return tuple(
        min(speeds[node_type] for node_type in node_types) for node_types in node_types_by_rank(cluster, layout)
    )


_ONE_DEVICE = Plan(mesh=(MeshAxis(axis="shard", size=1),), batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1))
