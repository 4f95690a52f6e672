"""Unlike nodes: what each pipeline rank is priced with, and how fast it is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from meshwright.costs.plan_costs import Pricing, as_nodes, pricing
from meshwright.simulator.units import UnitCosts
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.nodes import NodeType, node_type_runs, node_types_by_rank, rank_clusters, uniform_cluster
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan


def rank_prices(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> tuple[Pricing | None, ...]:
    """By pipeline rank, the cost model's inputs for the slowest of its own nodes: its chip, links and ports.

    One and the same object for ranks on nodes alike; None where the cost model says nothing. Raises BadInput for groups that contradict
    the cluster.
    """
    cluster = as_nodes(cluster)
    priced = cache(lambda alike: pricing(model, train, plan, alike))
    return tuple(priced(alike) for alike in rank_clusters(cluster, Layout.of(plan, cluster.gpus_per_node)))


def kind_speeds(model: ModelSpec, train: TrainSpec, cluster: ClusterSpec) -> dict[NodeType, float]:
    """By node type, the blocks that its device computes, a sequence at a time, while the slowest type computes one.

    Empty if the cost model has no rates for a type.
    """
    seconds = {}
    for kind, _ in node_type_runs(cluster):
        priced = pricing(model, train, _ALONE, uniform_cluster(cluster, (kind,)))
        if priced is None:
            return {}
        one = UnitCosts(model, _ALONE, priced).compute(0)
        seconds[kind] = one.forward + one.backward_input + one.backward_weight
    return {kind: max(seconds.values()) / own for kind, own in seconds.items()}


def rank_speeds(speeds: Mapping[NodeType, float], cluster: ClusterSpec, layout: Layout) -> tuple[float, ...]:
    """The same by pipeline rank, which is as fast as the slowest of its nodes; empty when `speeds` is."""
    return tuple(min(speeds[kind] for kind in kinds) for kinds in node_types_by_rank(cluster, layout)) if speeds else ()


_ALONE = Plan(mesh=(MeshAxis(axis="shard", size=1),), batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1))
