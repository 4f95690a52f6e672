"""Typed fields of the network become the environment NCCL and Gloo read, and one host may play several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_run
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadConfig
from meshwright.spec.network import NetworkSpec, network_environment


def test_unset_network_fields_leave_the_choice_to_nccl() -> None:
    assert network_environment(ClusterSpec(nodes=2, gpus_per_node=8), 3) == {}
    assert network_environment(ClusterSpec(network=NetworkSpec(fabric="tcp")), 0) == {}


def test_every_field_has_its_variable() -> None:
    network = NetworkSpec(interface="eth1", socket_threads=2, sockets_per_thread=8, ib_timeout=22, retries=7)
    assert network_environment(ClusterSpec(network=network), 0) == {
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_NTHREADS": "2",
        "NCCL_NSOCKS_PERTHREAD": "8",
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_IB_RETRY_CNT": "7",
    }


def test_emulated_nodes_are_hosts_of_their_own_to_nccl() -> None:
    cluster = ClusterSpec(gpus_per_node=8, emulate_nodes=2, network=NetworkSpec(interface="eth1", sockets_per_thread=2))
    assert cluster.ranks_per_node == 4
    assert [network_environment(cluster, rank)["NCCL_HOSTID"] for rank in (0, 3, 4, 7)] == [
        "node0",
        "node0",
        "node1",
        "node1",
    ]
    assert network_environment(cluster, 5) == {
        "NCCL_HOSTID": "node1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "2",
    }


@pytest.mark.parametrize(
    ("cluster", "expected_text"),
    [
        ("{gpus_per_node: 6, emulate_nodes: 4}", r"a divisor of cluster\.gpus_per_node = 6"),
        ("{gpus_per_node: 8, nodes: 2, emulate_nodes: 2}", "one host emulates nodes"),
        ("{gpus_per_node: 8, emulate_nodes: 0}", "emulate_nodes"),
        ("{gpus_per_node: 8, network: {retries: 8}}", "retries"),
    ],
)
def test_what_cannot_be_emulated_or_set_is_refused(cluster: str, expected_text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: llama-nano\ncluster: {cluster}\ntrain: {{steps: 10, global_batch: 48}}\n")
    with pytest.raises(BadConfig, match=expected_text):
        load_run(file)
