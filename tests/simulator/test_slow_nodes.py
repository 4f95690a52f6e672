"""Clusters with different nodes: each stage has the rates of its own chips, links, ports and fabric."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.simulator.slow_nodes import node_type_speeds, rank_cost_inputs, rank_speeds
from meshwright.simulator.step_simulation import exposed_in_compute, simulate_plan, timing_of
from meshwright.simulator.timing import Timing
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Layout, balanced_stages
from meshwright.spec.network import NetworkSpec, NodeGroup
from meshwright.spec.plan import Plan, SchedulePlan
from tests.simulator.test_step_simulation import NARROW, job, plan

H100 = ClusterSpec(gpu="H100", nodes=4, gpus_per_node=8, network=NetworkSpec(fabric="infiniband", port_gb_per_s=50))
A100 = replace(H100, gpu="A100", network=NetworkSpec(fabric="infiniband", port_gb_per_s=25, link_gb_per_s=300))
MIXED = replace(H100, groups=(NodeGroup(nodes=2, gpu="A100", port_gb_per_s=25, link_gb_per_s=300),))
STAGES = plan({"pipeline": 2, "replicate": 2, "shard": 8})
"""Each stage on two equal nodes."""
FLAT = plan({"shard": 16, "pipeline": 2})
"""Both stages on all nodes."""


def timing(chosen_plan: Plan, cluster: ClusterSpec) -> Timing:
    return timing_of(NARROW, job(chosen_plan), chosen_plan, cluster)


@pytest.mark.parametrize("table", ["forward", "backward_weight", "unshard", "reduce", "replicate"])
def test_a_stage_takes_the_time_of_a_cluster_of_its_own_nodes(table: str) -> None:
    mixed, fast, slow = (getattr(timing(STAGES, cluster), table) for cluster in (MIXED, H100, A100))
    assert mixed[0][1:] == fast[0][1:] and mixed[1][:-1] == slow[1][:-1]
    assert mixed[1][0] > mixed[0][1]


def test_a_stage_on_all_nodes_takes_the_time_of_the_slowest_nodes() -> None:
    mixed, slow = timing(FLAT, MIXED), timing(FLAT, A100)
    assert (mixed.forward, mixed.unshard) == (slow.forward, slow.unshard)
    assert simulate_plan(NARROW, job(FLAT), FLAT, MIXED).step_seconds == pytest.approx(
        simulate_plan(NARROW, job(FLAT), FLAT, A100).step_seconds
    )


def test_a_slow_node_group_slows_only_its_own_collectives() -> None:
    """Ports a tenth as fast lengthen only the replica sums of the second stage; gathers stay inside nodes."""
    slow = replace(H100, groups=(NodeGroup(nodes=2, port_gb_per_s=5),))
    even, mixed = timing(STAGES, H100), timing(STAGES, slow)
    assert mixed.replicate[0] == even.replicate[0] and mixed.unshard == even.unshard and mixed.forward == even.forward
    assert mixed.replicate[1][3] > 7 * even.replicate[1][3]
    assert mixed.between(0, 1).bytes_per_second == pytest.approx(even.between(0, 1).bytes_per_second / 10)


def test_ranks_on_different_fabrics_communicate_over_tcp() -> None:
    """Each stage keeps its fabric; stage boundaries use the TCP bridge, whose rate the 8 senders of a node share."""
    network = NetworkSpec(fabric="infiniband", port_gb_per_s=25, bridge_gb_per_s=0.5)
    cluster = replace(H100, network=network, groups=(NodeGroup(nodes=2, fabric="roce", port_gb_per_s=25),))
    same_fabric = timing(STAGES, replace(cluster, groups=()))
    mixed = timing(STAGES, cluster)
    assert mixed.replicate[0] == same_fabric.replicate[0]
    assert mixed.between(0, 1).bytes_per_second == pytest.approx(same_fabric.between(0, 1).bytes_per_second / 50)
    assert mixed.between(0, 1).latency_seconds > same_fabric.between(0, 1).latency_seconds
    over_all = timing(FLAT, cluster)
    assert over_all.unshard[0][1] > 5 * timing(FLAT, replace(cluster, groups=())).unshard[0][1]


def test_a_tcp_group_shares_its_ports_at_a_boundary() -> None:
    """Four of eight devices send between nodes; over TCP they can use the ports of all eight."""
    chosen_plan = plan({"pipeline": 4, "shard": 4})
    two = replace(H100, nodes=2)
    slow = replace(two, network=NetworkSpec(fabric="tcp", port_gb_per_s=50))
    tcp, all_send = (
        timing(chosen_plan, slow).between(1, 2),
        timing(plan({"pipeline": 2, "shard": 8}), slow).between(0, 1),
    )
    assert tcp.bytes_per_second == pytest.approx(2 * all_send.bytes_per_second)
    grouped = replace(two, groups=(NodeGroup(nodes=1, fabric="tcp"),))
    assert timing(chosen_plan, grouped).between(1, 2).bytes_per_second == pytest.approx(tcp.bytes_per_second)
    assert timing(chosen_plan, grouped).between(0, 1) == timing(chosen_plan, two).between(0, 1)


def test_speeds_follow_the_chips_and_even_out_the_stages() -> None:
    speeds = node_type_speeds(NARROW, job(STAGES), MIXED)
    layout = Layout.of(STAGES, 8)
    fast, slow = rank_speeds(speeds, MIXED, layout)
    assert slow == 1 and 2 < fast < 3.5
    assert rank_speeds(speeds, MIXED, Layout.of(FLAT, 8)) == (1, 1)
    table = balanced_stages("1f1b", 2, NARROW.layers, 0.0, None, (fast, slow))
    texts = tuple(tuple(f"{stage.start}-{stage.stop - 1}" for stage in stages) for stages in table)
    balanced = replace(STAGES, schedule=SchedulePlan(stages=texts))
    uneven, even = (
        simulate_plan(NARROW, job(STAGES), balanced_or_even, MIXED) for balanced_or_even in (balanced, STAGES)
    )
    busy = uneven.compute_seconds
    assert max(busy) / min(busy) < 1.25  # a layer is a tenth of the slower stage
    assert uneven.step_seconds < 0.75 * even.step_seconds


def test_equal_nodes_share_cost_inputs_and_unknown_chips_have_none() -> None:
    prices = rank_cost_inputs(NARROW, job(STAGES), STAGES, H100)
    assert prices[0] is prices[1] is not None
    assert node_type_speeds(NARROW, job(STAGES), ClusterSpec(gpu="V100", nodes=4, gpus_per_node=8)) == {}
    with pytest.raises(BadInput, match="more nodes"):
        timing(STAGES, replace(H100, groups=(NodeGroup(nodes=5),)))
    with pytest.raises(BadInput, match="V100 has no bf16"):
        timing(STAGES, replace(H100, groups=(NodeGroup(nodes=1, gpu="V100"),)))


def test_communication_inside_compute_differs_by_stage() -> None:
    chosen_plan = plan({"pipeline": 2, "replicate": 2, "tensor": 8})
    mixed, fast, slow = (
        exposed_in_compute(NARROW, job(chosen_plan), chosen_plan, cluster)["tensor"] for cluster in (MIXED, H100, A100)
    )
    assert mixed == pytest.approx((fast + slow) / 2)
