"""`machine_of`: rates of the slowest nodes of a cluster description."""

from __future__ import annotations

import pytest

from meshwright.costs.constants import constants
from meshwright.costs.machine_rates import machine_of, with_latencies
from meshwright.costs.sources import sources
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.network import NetworkSpec, NodeGroup


def test_a_chip_name_sets_all_rates_of_the_machine() -> None:
    """`low` is the number of the matmul format: 1 is fp8 with one scale per tensor."""
    machine = machine_of(ClusterSpec(gpu="H100", nodes=4, gpus_per_node=8), "fp8")
    assert (machine.peak, machine.half_peak, machine.matmul_format) == (1979e12, 989e12, 1.0)
    assert (machine.link, machine.nic, machine.domain) == (450e9, 50e9, 8)
    assert machine_of(ClusterSpec(gpu="GB200", nodes=16, gpus_per_node=4)).domain == 64
    assert machine_of(ClusterSpec(gpu="H100", nodes=2, gpus_per_node=4)).domain == 4


def test_network_keys_replace_chip_rates_and_the_slowest_node_group_counts() -> None:
    network = NetworkSpec(fabric="tcp", link_gb_per_s=100, port_gb_per_s=10, pod_nodes=2, oversubscription=4)
    cluster = ClusterSpec(
        gpu="H100", nodes=4, gpus_per_node=8, network=network, groups=(NodeGroup(nodes=1, gpu="A100", port_gb_per_s=5),)
    )
    machine = machine_of(cluster)
    assert (machine.peak, machine.nic, machine.link) == (312e12, 5e9, 100e9)
    assert (machine.pod, machine.oversubscribed) == (16, 4)
    assert with_latencies(constants("hopper", "default"), cluster).net_us == 30.0


def test_invalid_clusters_are_refused_with_the_reason() -> None:
    with pytest.raises(BadInput, match="no fp8"):
        machine_of(ClusterSpec(gpu="A100"), "fp8")
    with pytest.raises(BadInput, match="not in the chip table"):
        machine_of(ClusterSpec(gpu="X1"))
    with pytest.raises(BadInput, match="more nodes"):
        machine_of(ClusterSpec(gpu="H100", groups=(NodeGroup(nodes=2),)))


def test_every_chip_has_a_machine() -> None:
    for name in CHIPS:
        assert machine_of(ClusterSpec(gpu=name), "bf16" if "bf16" in CHIPS[name].peak_flops else "fp16").peak > 0


def test_graphics_cards_do_not_use_constants_fitted_on_data_center_devices() -> None:
    """Graphics cards have other memory, links and power limits, so shares fitted on data center devices do not apply.

    Their product rate is the datasheet's peak times a guessed share of it that matmuls reach.
    """
    for name in ("RTX3090", "A10", "RTX4090", "L40S", "RTX5090", "T4", "V100"):
        assert constants(CHIPS[name].generation, "default") == constants("default", "default"), name
        assert sources(ClusterSpec(gpu=name, gpus_per_node=2))["matmuls"].startswith("datasheet, share a guess")
    assert CHIPS["RTX4090"].link < CHIPS["A100"].link / 10
