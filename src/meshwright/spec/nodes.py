"""Clusters with different types of nodes: how many nodes of each type follow each other, and which types each pipeline
rank has.

The groups of a cluster follow its other nodes in the order in which they are listed, and ranks fill the nodes in that
order. A pipeline rank computes its layers and runs its collectives on its own nodes. So it is as slow as the slowest of
its own nodes, not of the whole cluster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import inf

from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import Layout
from meshwright.spec.network import FABRIC_US, Fabric, NetworkSpec


@dataclass(frozen=True)
class NodeType:
    """A type of nodes: the chip and its network. None is the value of the chip's reference machine."""

    gpu: str
    """Name of the chip."""
    link_gb_per_s: float | None
    """GB/s from a device to its neighbours inside the node."""
    port_gb_per_s: float | None
    """GB/s of a device's share of the node's network ports."""
    fabric: Fabric | None
    port_us: float | None
    """Latency of one step of a collective across nodes, microseconds."""

    @property
    def link(self) -> float:
        """Return the bytes/s from a device to its neighbours inside the node.

        The result is infinite for a device that is not in the chip table.
        """
        if self.link_gb_per_s:
            return self.link_gb_per_s * 1e9
        return CHIPS[self.gpu].link if self.gpu in CHIPS else inf

    @property
    def port(self) -> float:
        """Return the bytes/s of a device's share of the node's ports.

        The result is infinite for a device that is not in the chip table.
        """
        if self.port_gb_per_s:
            return self.port_gb_per_s * 1e9
        return CHIPS[self.gpu].nic if self.gpu in CHIPS else inf

    @property
    def peak(self) -> float:
        """Return the FLOP/s by which chips are compared; 0 for a chip that is not in the table."""
        return CHIPS[self.gpu].half_peak if self.gpu in CHIPS else 0.0


def node_type_runs(cluster: ClusterSpec) -> tuple[tuple[NodeType, int], ...]:
    """Return (node type, number of nodes) for each sequence of equal nodes, in the order of the cluster's nodes."""
    network = cluster.network or NetworkSpec()
    us = network.port_us or (FABRIC_US[network.fabric] if network.fabric else None)
    plain = NodeType(cluster.gpu, network.link_gb_per_s, network.port_gb_per_s, network.fabric, us)
    runs = [(plain, cluster.nodes - sum(group.nodes for group in cluster.groups))]
    for group in cluster.groups:
        node_type = replace(
            plain,
            gpu=group.gpu or plain.gpu,
            link_gb_per_s=group.link_gb_per_s or plain.link_gb_per_s,
            port_gb_per_s=group.port_gb_per_s or plain.port_gb_per_s,
            fabric=group.fabric or plain.fabric,
            port_us=FABRIC_US[group.fabric] if group.fabric else plain.port_us,
        )
        runs.append((node_type, group.nodes))
    joined = groupby((run for run in runs if run[1] > 0), key=lambda run: run[0])
    return tuple((node_type, sum(nodes for _, nodes in alike)) for node_type, alike in joined)


def node_types_by_rank(cluster: ClusterSpec, layout: Layout) -> tuple[tuple[NodeType, ...], ...]:
    """Return for each pipeline rank the types of its nodes, in the order of the nodes."""
    runs = node_type_runs(cluster)
    starts = [0, *accumulate(nodes for _, nodes in runs)][:-1]
    pipeline = layout.size("pipeline")
    block = int(layout.stride("pipeline")) if pipeline > 1 else layout.ranks
    by_rank = []
    for rank in range(pipeline):
        run_indices: set[int] = set()
        for first in range(rank * block, layout.ranks, pipeline * block):
            nodes = layout.node(first), layout.node(first + block - 1)
            low, high = (bisect_right(starts, node) - 1 for node in nodes)
            run_indices.update(range(low, high + 1))
        by_rank.append(tuple(dict.fromkeys(runs[index][0] for index in sorted(run_indices))))
    return tuple(by_rank)


def uniform_cluster(cluster: ClusterSpec, node_types: Sequence[NodeType]) -> ClusterSpec:
    """Return the cluster with all nodes as slow as the slowest of `node_types`, if nodes of all these types communicate
    with each other.
    """
    slowest = node_types[0]
    uniform = replace(cluster, groups=())
    if len(node_types) == 1 and node_type_runs(uniform)[0][0] == slowest:
        return uniform
    for node_type in node_types[1:]:
        slowest = _between(cluster, slowest, node_type)
    ports = replace(slowest, gpu=min(node_types, key=lambda node_type: node_type.peak).gpu)
    return _with(cluster, ports, node_types)


def rank_clusters(cluster: ClusterSpec, layout: Layout) -> tuple[ClusterSpec, ...]:
    """Return for each pipeline rank a cluster of equal nodes that is as slow as the rank's own nodes.

    If all nodes are equal, it is the cluster itself.
    """
    if not cluster.groups:
        return (cluster,) * layout.size("pipeline")
    node_types = node_types_by_rank(cluster, layout)
    by_types = {types: uniform_cluster(cluster, types) for types in set(node_types)}
    return tuple(by_types[types] for types in node_types)


def slowest_rank_cluster(cluster: ClusterSpec, layout: Layout) -> ClusterSpec:
    """Return a cluster of equal nodes with the slowest chip, link and port of any pipeline rank.

    It is for costs that assume equal nodes.
    """
    ranks = tuple(dict.fromkeys(rank_clusters(cluster, layout)))
    return ranks[0] if len(ranks) == 1 else _merged(cluster, tuple(node_type_runs(rank)[0][0] for rank in ranks))


def memory_limits(cluster: ClusterSpec, layout: Layout) -> tuple[int, ...] | None:
    """Return for each pipeline rank the memory of its smallest device in bytes.

    The result is None for `cpu` and for chips that are not in the table.
    """
    smallest = cluster.memory_bytes()
    if smallest is None:
        return None
    uniform = replace(cluster, groups=())
    limits = []
    for node_types in node_types_by_rank(cluster, layout):
        sizes = [replace(uniform, gpu=node_type.gpu).memory_bytes() for node_type in node_types]
        limits.append(min(size for size in sizes if size is not None) if any(sizes) else smallest)
    return tuple(limits)


def _between(cluster: ClusterSpec, first: NodeType, second: NodeType) -> NodeType:
    """Return the network between nodes of two types.

    It has the slower of the two ports. If the fabrics differ, the nodes communicate over TCP, and over the bridge if
    there is one. InfiniBand and RoCE cannot communicate with each other, so NCCL uses sockets (Holmes, arXiv
    2312.03549).
    """
    slower = min(first, second, key=lambda node_type: node_type.port)
    if first.fabric == second.fabric:
        latency = None if first.port_us is None or second.port_us is None else max(first.port_us, second.port_us)
        return replace(slower, port_gb_per_s=_gb_per_s(slower.port), port_us=latency)
    bridge = cluster.network.bridge_gb_per_s if cluster.network else None
    port = _gb_per_s(min(bridge * 1e9, slower.port) if bridge else slower.port)
    return replace(slower, port_gb_per_s=port, fabric="tcp", port_us=FABRIC_US["tcp"])


def _merged(cluster: ClusterSpec, node_types: Sequence[NodeType]) -> ClusterSpec:
    """Return the cluster with all nodes as slow as the slowest of `node_types`, if only pipeline stages connect nodes
    of different types.
    """
    slow = min(node_types, key=lambda node_type: node_type.port)
    latency = (
        None
        if any(node_type.port_us is None for node_type in node_types)
        else max(node_type.port_us or 0.0 for node_type in node_types)
    )
    gpu = min(node_types, key=lambda node_type: node_type.peak).gpu
    return _with(cluster, replace(slow, gpu=gpu, port_gb_per_s=_gb_per_s(slow.port), port_us=latency), node_types)


def _with(cluster: ClusterSpec, node_type: NodeType, joined: Sequence[NodeType]) -> ClusterSpec:
    """Return a cluster of equal nodes of type `node_type`; its link is the slowest of the types `joined`."""
    link = node_type.link_gb_per_s if len(joined) == 1 else _gb_per_s(min(node.link for node in joined))
    network = cluster.network or NetworkSpec()
    network = replace(
        network,
        link_gb_per_s=link,
        port_gb_per_s=node_type.port_gb_per_s,
        fabric=node_type.fabric,
        port_us=node_type.port_us,
    )
    profile = cluster.profile if node_type.gpu == cluster.gpu else None  # a profile of another chip does not apply
    return replace(cluster, gpu=node_type.gpu, groups=(), network=network, profile=profile)


def _gb_per_s(rate: float) -> float | None:
    """Return bytes/s as GB/s, the unit of a cluster file; None if infinite."""
    return rate / 1e9 if rate < inf else None
