"""Orders of mesh axes: every order that differs in cost is listed once; node types are separated where possible."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.collective_costs import CollectiveGroup, rank_group
from meshwright.costs.constants import constants
from meshwright.costs.machine_rates import machine_of
from meshwright.planner.placement import INNER, OUTER, heterogeneity_factors, orders
from meshwright.planner.search import search
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import Layout
from meshwright.spec.network import NetworkSpec, NodeGroup
from meshwright.spec.nodes import node_types_by_rank
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import ModelSection, RunSpec

PODS = NetworkSpec(fabric="roce", port_gb_per_s=50, pod_nodes=2, oversubscription=4)
K = constants("hopper", "default")
SIZES = st.tuples(*[st.sampled_from((1, 2, 4, 8, 3))] * 3, st.sampled_from((1, 2)), st.sampled_from((1, 2, 8)))


def sizes_of(given_sizes: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("pipeline", "replicate", "shard", "context_ring", "tensor"), given_sizes, strict=True))


def cluster_of(sizes: dict[str, int], network: NetworkSpec | None) -> ClusterSpec:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return ClusterSpec(gpu="H100", nodes=-(-ranks // 8), gpus_per_node=8, network=network)


def priced(order: tuple[str, ...], sizes: dict[str, int], cluster: ClusterSpec) -> list[tuple[float, ...]]:
    """The cost model's inputs for the groups of each axis."""
    layout, machine = Layout(tuple((axis, sizes.get(axis, 1)) for axis in order), 8), machine_of(cluster)
    factors = []
    for axis in sorted(sizes):
        where: CollectiveGroup = rank_group(machine, K, float(layout.size(axis)), layout.stride(axis))
        factors.append((where.size, where.inside, where.domains, float(where.bandwidth) if where.size > 1 else 0.0))
    return factors


@settings(deadline=None)
@given(SIZES, st.sampled_from((None, PODS)))
def test_every_order_costs_what_one_of_those_named_costs(three: tuple[int, ...], network: NetworkSpec | None) -> None:
    sizes = sizes_of(three)
    cluster = cluster_of(sizes, network)
    named = orders(cluster, sizes)
    assert len(named) == len(set(named)) and all(sorted(order) == sorted(OUTER + INNER) for order in named)
    assert all(order[-3:] == INNER for order in named) and named[0][0] == "pipeline"
    costs = [priced(order, sizes, cluster) for order in named]
    for outer in permutations(OUTER):
        assert priced((*outer, *INNER), sizes, cluster) in costs


def test_orders_that_cross_alike_are_named_once() -> None:
    node = ClusterSpec(gpu="H100", gpus_per_node=8)
    assert len(orders(node, {"pipeline": 2, "replicate": 2, "shard": 2})) == 1
    many = ClusterSpec(gpu="H100", nodes=8, gpus_per_node=8)
    assert len(orders(many, {"pipeline": 2, "replicate": 2, "shard": 2, "tensor": 8})) == 1
    assert len(orders(many, {"pipeline": 8, "replicate": 1, "shard": 8})) == 2
    assert len(orders(many, {"pipeline": 4, "replicate": 4, "shard": 4})) > 2


MIXED = ClusterSpec(
    gpu="H100",
    nodes=4,
    gpus_per_node=8,
    network=NetworkSpec(port_gb_per_s=50),
    groups=(NodeGroup(nodes=2, gpu="A100", port_gb_per_s=25),),
)


def test_stages_of_one_kind_of_node_come_first() -> None:
    sizes = {"pipeline": 2, "replicate": 2, "shard": 8}
    named = orders(MIXED, sizes)
    layouts = [Layout(tuple((axis, sizes.get(axis, 1)) for axis in order), 8) for order in named]
    mixed = [sum(len(types) > 1 for types in node_types_by_rank(MIXED, layout)) for layout in layouts]
    assert mixed == sorted(mixed) and mixed[0] == 0 and mixed[-1] == 2


def run(cluster: ClusterSpec, *, plan: str | PlanKeys = "auto") -> RunSpec:
    model = from_plain(ModelSection, {**MODEL_PRESETS["llama3-8b"], "preset": "llama3-8b"})
    return RunSpec(
        name="x", model=model, train=TrainSpec(steps=1, global_batch=64, seq_len=4096), cluster=cluster, plan=plan
    )


def test_the_pace_is_that_of_the_ranks_together() -> None:
    """Half the ranks on the faster chips: their speeds add up; where every rank has some slower chips nothing is gained."""
    ground = heterogeneity_factors(run(MIXED))
    assert ground is not None
    apart, across = Layout((("pipeline", 2), ("shard", 16)), 8), Layout((("shard", 16), ("pipeline", 2)), 8)
    assert ground(across).pace == 1
    assert 2 / (1 + 989 / 312) * 0.8 < ground(apart).pace < 2 / (1 + 989 / 312) * 1.3
    assert heterogeneity_factors(run(replace(MIXED, groups=()))) is None
    ports = heterogeneity_factors(run(replace(MIXED, groups=(NodeGroup(nodes=2, port_gb_per_s=25),))))
    assert ports and ports(apart).pace == pytest.approx(1) and ports(apart).port == ports(across).port == 25e9


@pytest.mark.slow
def test_only_a_stage_on_two_fabrics_is_held_to_the_bridge() -> None:
    network = NetworkSpec(fabric="infiniband", port_gb_per_s=25, bridge_gb_per_s=0.4)
    halves = replace(MIXED, network=network, groups=(NodeGroup(nodes=2, fabric="roce", port_gb_per_s=20),))
    ground = heterogeneity_factors(run(halves))
    assert ground and ground(Layout((("pipeline", 2), ("shard", 16)), 8)).port == 20e9
    assert ground(Layout((("shard", 16), ("pipeline", 2)), 8)).port == pytest.approx(0.4e9)
    pins = PlanKeys(tensor=1, context_ring=1, context_ulysses=1)
    assert search(run(halves, plan=pins)).best.plan.mesh[0].axis == "pipeline"
