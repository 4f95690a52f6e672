"""Unlike nodes: the runs of alike ones, and on which of them each pipeline rank lies.

The groups of a cluster stand behind its other nodes, in the order in which they are listed, and ranks fill nodes in that order. A pipeline
rank does its collectives and its layers on its own nodes alone, so it is as slow as the slowest of those, and not of the cluster.
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
    """What one node has: its chip, and what the cluster says of its network (None: the chip's reference machine)."""

    gpu: str
    link_gb_per_s: float | None
    port_gb_per_s: float | None
    fabric: Fabric | None
    port_us: float | None

    @property
    def link(self) -> float:
        """Bytes/s of one device to its neighbours inside the node; without end for a device that is not in the table."""
        return self.link_gb_per_s * 1e9 if self.link_gb_per_s else CHIPS[self.gpu].link if self.gpu in CHIPS else inf

    @property
    def port(self) -> float:
        """Bytes/s of one device's share of the node's ports; without end for a device that is not in the table."""
        return self.port_gb_per_s * 1e9 if self.port_gb_per_s else CHIPS[self.gpu].nic if self.gpu in CHIPS else inf

    @property
    def peak(self) -> float:
        """FLOP/s by which chips are told faster from slower; a chip that is not in the table has none."""
        chip = CHIPS.get(self.gpu)
        return max(chip.peak_flops.get("bf16", 0.0), chip.peak_flops.get("fp16", 0.0)) if chip else 0.0


def node_type_runs(cluster: ClusterSpec) -> tuple[tuple[NodeType, int], ...]:
    """The cluster's nodes in order, as runs: (kind, how many nodes)."""
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
    """By pipeline rank, the kinds of the nodes that it lies on, in their order."""
    runs = node_type_runs(cluster)
    starts = [0, *accumulate(nodes for _, nodes in runs)][:-1]
    pipeline = layout.size("pipeline")
    block = int(layout.stride("pipeline")) if pipeline > 1 else layout.ranks
    found = []
    for rank in range(pipeline):
        held: set[int] = set()
        for first in range(rank * block, layout.ranks, pipeline * block):
            nodes = layout.node(first), layout.node(first + block - 1)
            low, high = (bisect_right(starts, node) - 1 for node in nodes)
            held.update(range(low, high + 1))
        found.append(tuple(dict.fromkeys(runs[at][0] for at in sorted(held))))
    return tuple(found)


def uniform_cluster(cluster: ClusterSpec, node_types: Sequence[NodeType]) -> ClusterSpec:
    """The cluster with every node as slow as the slowest of `node_types`, whose nodes talk to each other."""
    met, alone = node_types[0], replace(cluster, groups=())
    if len(node_types) == 1 and node_type_runs(alone)[0][0] == met:
        return alone
    for node_type in node_types[1:]:
        met = _between(cluster, met, node_type)
    ports = replace(met, gpu=min(node_types, key=lambda node_type: node_type.peak).gpu)
    return _with(cluster, ports, node_types)


def rank_clusters(cluster: ClusterSpec, layout: Layout) -> tuple[ClusterSpec, ...]:
    """By pipeline rank, the cluster as if all of it were like the slowest of the rank's nodes; the cluster itself when nodes are alike."""
    if not cluster.groups:
        return (cluster,) * layout.size("pipeline")
    node_types = node_types_by_rank(cluster, layout)
    made = {types: uniform_cluster(cluster, types) for types in set(node_types)}
    return tuple(made[types] for types in node_types)


def slowest_rank_cluster(cluster: ClusterSpec, layout: Layout) -> ClusterSpec:
    """The cluster as if all of it had the slowest chip, link and port that any pipeline rank has, for costs that know one machine."""
    ranks = tuple(dict.fromkeys(rank_clusters(cluster, layout)))
    return ranks[0] if len(ranks) == 1 else _merged(cluster, tuple(node_type_runs(rank)[0][0] for rank in ranks))


def memory_limits(cluster: ClusterSpec, layout: Layout) -> tuple[int, ...] | None:
    """By pipeline rank, bytes of the smallest device it lies on; None when memory is not known (`cpu`, a chip that is not in the table)."""
    smallest = cluster.memory_bytes()
    if smallest is None:
        return None
    alone = replace(cluster, groups=())
    limits = []
    for node_types in node_types_by_rank(cluster, layout):
        sizes = [replace(alone, gpu=node_type.gpu).memory_bytes() for node_type in node_types]
        limits.append(min(size for size in sizes if size is not None) if any(sizes) else smallest)
    return tuple(limits)


def _between(cluster: ClusterSpec, first: NodeType, second: NodeType) -> NodeType:
    """What joins nodes of two kinds: the slower port; and where fabrics differ TCP, over the bridge when the network names one.

    InfiniBand and RoCE do not speak to each other; NCCL falls back to sockets (Holmes, arXiv 2312.03549).
    """
    slower = min(first, second, key=lambda node_type: node_type.port)
    if first.fabric == second.fabric:
        latency = None if first.port_us is None or second.port_us is None else max(first.port_us, second.port_us)
        return replace(slower, port_gb_per_s=_stated(slower.port), port_us=latency)
    bridge = cluster.network.bridge_gb_per_s if cluster.network else None
    port = _stated(min(bridge * 1e9, slower.port) if bridge else slower.port)
    return replace(slower, port_gb_per_s=port, fabric="tcp", port_us=FABRIC_US["tcp"])


def _merged(cluster: ClusterSpec, node_types: Sequence[NodeType]) -> ClusterSpec:
    """The cluster with every node as slow as the slowest of `node_types`, which only pipeline edges join."""
    slow = min(node_types, key=lambda node_type: node_type.port)
    latency = (
        None
        if any(node_type.port_us is None for node_type in node_types)
        else max(node_type.port_us or 0.0 for node_type in node_types)
    )
    gpu = min(node_types, key=lambda node_type: node_type.peak).gpu
    return _with(cluster, replace(slow, gpu=gpu, port_gb_per_s=_stated(slow.port), port_us=latency), node_types)


def _with(cluster: ClusterSpec, node_type: NodeType, of: Sequence[NodeType]) -> ClusterSpec:
    link = node_type.link_gb_per_s if len(of) == 1 else _stated(min(node.link for node in of))
    network = cluster.network or NetworkSpec()
    network = replace(
        network,
        link_gb_per_s=link,
        port_gb_per_s=node_type.port_gb_per_s,
        fabric=node_type.fabric,
        port_us=node_type.port_us,
    )
    profile = cluster.profile if node_type.gpu == cluster.gpu else None  # measured on the others
    return replace(cluster, gpu=node_type.gpu, groups=(), network=network, profile=profile)


def _stated(rate: float) -> float | None:
    """Bytes/s as a cluster states them, in GB/s; none where nothing limits them here."""
    return rate / 1e9 if rate < inf else None
