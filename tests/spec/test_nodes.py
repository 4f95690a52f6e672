"""Clusters with different nodes: the nodes of each pipeline rank, and the slowest rates that it then has."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.chips import CHIPS, GiB
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import Layout
from meshwright.spec.network import FABRIC_US, NetworkSpec, NodeGroup
from meshwright.spec.nodes import memory_limits, node_type_runs, node_types_by_rank, rank_clusters, slowest_rank_cluster

MIXED = ClusterSpec(
    gpu="H100",
    nodes=4,
    gpus_per_node=8,
    network=NetworkSpec(fabric="infiniband", port_gb_per_s=50),
    groups=(NodeGroup(nodes=2, gpu="A100-40GB", port_gb_per_s=25, link_gb_per_s=200),),
)
HALVES = Layout((("pipeline", 2), ("shard", 16)), 8)
"""A stage on each kind of node."""
ACROSS = Layout((("shard", 4), ("pipeline", 2), ("tensor", 4)), 8)
"""Both stages on all nodes."""


def test_groups_stand_behind_the_rest_in_their_order() -> None:
    (first, nodes), (second, group_nodes) = node_type_runs(MIXED)
    assert (first.gpu, nodes, second.gpu, group_nodes) == ("H100", 2, "A100-40GB", 2)
    assert (first.port, second.port) == (50e9, 25e9)
    assert (first.link, second.link) == (CHIPS["H100"].link, 200e9)


def test_a_group_that_says_nothing_new_is_no_other_kind() -> None:
    assert len(node_type_runs(replace(MIXED, groups=(NodeGroup(nodes=1), NodeGroup(nodes=1, gpu="H100"))))) == 1
    assert [nodes for _, nodes in node_type_runs(replace(MIXED, groups=(NodeGroup(nodes=4, gpu="A100"),)))] == [4]


@given(
    st.permutations(("pipeline", "shard", "tensor")), st.tuples(*[st.sampled_from((1, 2, 3, 4))] * 3), st.integers(1, 5)
)
def test_a_rank_lies_on_the_nodes_of_its_devices(order: list[str], sizes: tuple[int, ...], per_node: int) -> None:
    layout = Layout(tuple(zip(order, sizes, strict=True)), per_node)
    nodes = -(-layout.ranks // per_node)
    groups = tuple(NodeGroup(nodes=1, port_gb_per_s=float(at + 1)) for at in range(nodes))
    cluster = ClusterSpec(gpu="H100", nodes=nodes, gpus_per_node=per_node, groups=groups)
    for rank, kinds in enumerate(node_types_by_rank(cluster, layout)):
        rank_nodes = {layout.node(r) for r in range(layout.ranks) if layout.coordinates(r)["pipeline"] == rank}
        assert [node_type.port_gb_per_s for node_type in kinds] == [node + 1 for node in sorted(rank_nodes)]


def test_each_stage_has_its_own_nodes_rates_or_the_slowest_of_all() -> None:
    fast, slow = rank_clusters(MIXED, HALVES)
    assert (fast.gpu, fast.groups, slow.gpu, slow.groups) == ("H100", (), "A100-40GB", ())
    assert fast.network and slow.network
    assert (fast.network.port_gb_per_s, slow.network.port_gb_per_s) == (50, 25)
    assert (fast.network.link_gb_per_s, slow.network.link_gb_per_s) == (None, 200)
    both = rank_clusters(MIXED, ACROSS)
    assert both[0] == both[1] == slowest_rank_cluster(MIXED, ACROSS)
    assert both[0].network and (both[0].gpu, both[0].network.port_gb_per_s) == ("A100-40GB", 25)
    alike = replace(MIXED, groups=())
    assert rank_clusters(alike, HALVES) == (alike, alike) and slowest_rank_cluster(alike, HALVES) is alike


def test_only_tcp_joins_nodes_of_different_fabrics() -> None:
    """A stage that lies on both kinds talks over the bridge; stages on one kind each keep their fabric."""
    network = NetworkSpec(fabric="infiniband", port_gb_per_s=25, bridge_gb_per_s=0.4)
    cluster = replace(MIXED, network=network, groups=(NodeGroup(nodes=2, fabric="roce", port_gb_per_s=12),))
    networks = [one.network for one in rank_clusters(cluster, HALVES)]
    assert [(one.fabric, one.port_gb_per_s, one.port_us) for one in networks if one] == [
        ("infiniband", 25, None),  # the cluster's own network, whose latency its fabric gives
        ("roce", 12, FABRIC_US["roce"]),
    ]
    mixed = rank_clusters(cluster, ACROSS)[0].network
    assert mixed and (mixed.fabric, mixed.port_gb_per_s, mixed.port_us) == ("tcp", 0.4, FABRIC_US["tcp"])
    slowest = slowest_rank_cluster(cluster, HALVES).network
    assert slowest and (slowest.port_gb_per_s, slowest.port_us) == (12, FABRIC_US["roce"])


def test_memory_is_limited_by_the_smallest_device_of_each_rank() -> None:
    assert memory_limits(MIXED, HALVES) == (80 * GiB, 40 * GiB)
    assert memory_limits(MIXED, ACROSS) == (40 * GiB, 40 * GiB)
    assert memory_limits(replace(MIXED, memory_gib=30), HALVES) == (30 * GiB, 30 * GiB)
    assert memory_limits(replace(MIXED, groups=()), HALVES) == (80 * GiB, 80 * GiB)
    assert memory_limits(ClusterSpec(gpu="cpu", nodes=4, gpus_per_node=8), HALVES) is None
