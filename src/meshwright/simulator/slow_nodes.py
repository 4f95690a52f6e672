"""Nodes with another chip than the slowest: how long a pipeline rank's compute takes, relative to the slowest device's."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costs.of_plan import pricing
from meshwright.simulator.units import UnitCosts
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan


def rank_slowdown(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> tuple[float, ...]:
    """By pipeline rank, its block seconds over those of the machine that the closed form prices (the slowest); empty when nodes are alike.

    A pipeline rank is as slow as its slowest device. Groups stand behind the cluster's other nodes, in the order in which they are listed.
    """
    chips = chip_by_node(cluster)
    if len(set(chips)) == 1:
        return ()
    whole = _block(model, train, plan, cluster)
    alone = {chip: _block(model, train, plan, replace(cluster, gpu=chip, groups=())) for chip in set(chips)}
    layout = Layout.of(plan, cluster.gpus_per_node)
    slowest = [0.0] * plan.axis_size("pipeline")
    for rank in range(layout.ranks):
        stage = layout.coordinates(rank).get("pipeline", 0)
        slowest[stage] = max(slowest[stage], alone[chips[layout.node(rank)]] / whole)
    return tuple(slowest)


def chip_by_node(cluster: ClusterSpec) -> list[str]:
    """The chip of every node."""
    groups = [(group.gpu or cluster.gpu, group.nodes) for group in cluster.groups]
    rest = cluster.nodes - sum(nodes for _, nodes in groups)
    return [cluster.gpu] * rest + [chip for chip, nodes in groups for _ in range(nodes)]


def _block(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> float:
    priced = pricing(model, train, plan, cluster)
    assert priced is not None  # the cluster's chips were priced together before
    seconds = UnitCosts(model, plan, priced).compute(0)
    return seconds.forward + seconds.backward_input + seconds.backward_weight
