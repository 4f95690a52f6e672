"""Latency and bandwidth between pipeline ranks: of the fast links inside a domain, or of the nodes' network ports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from meshwright.costs.collective_costs import MAX_LINE_SHARE, link_rate, port_rate
from meshwright.costs.plan_costs import Pricing, number
from meshwright.simulator.timing import Link
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import Layout
from meshwright.spec.network import FABRIC_US
from meshwright.spec.nodes import rank_clusters
from meshwright.spec.plan import Plan


def links_of(
    plan: Plan, cluster: ClusterSpec, cost_inputs: Sequence[Pricing], channels: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], Link]:
    """Return the link of each (sender, receiver) pair of pipeline ranks in `channels`. `cost_inputs` has an entry for each pipeline rank.

    All devices of a stage send at the same time. Each device uses one network port. Only over TCP, the sending devices of a node share
    all ports of the node. Between nodes of different types, the slower of the two determines the bandwidth.
    """
    layout = Layout.of(plan, cluster.gpus_per_node)
    by_stage = _ranks_by_stage(layout)
    fabrics = [uniform.network.fabric if uniform.network else None for uniform in rank_clusters(cluster, layout)]

    def link(source: int, target: int) -> Link:
        pairs = by_stage[source], by_stage[target]
        ends = cost_inputs[source], cost_inputs[target]
        if fabrics[source] == fabrics[target]:
            return _link(pairs, cluster.gpus_per_node, ends, tcp=fabrics[source] == "tcp", bridge=Link())
        rate = cluster.network.bridge_gb_per_s if cluster.network else None
        return _link(
            pairs, cluster.gpus_per_node, ends, tcp=True, bridge=Link(FABRIC_US["tcp"] * 1e-6, (rate or inf) * 1e9)
        )

    return {channel: link(*channel) for channel in channels}


def _ranks_by_stage(layout: Layout) -> np.ndarray:
    """Return global ranks as `(pipeline ranks, devices per pipeline rank)`. Ranks in the same column exchange messages.

    Two pipeline ranks, each with two tensor ranks. Global rank 0 exchanges messages with 2, and 1 with 3:

    >>> from meshwright.spec.plan import BatchPlan, MeshAxis
    >>> batch = BatchPlan(global_batch=2, micro_batch=1, accumulate=2)
    >>> axes = (MeshAxis(axis="pipeline", size=2), MeshAxis(axis="tensor", size=2))
    >>> _ranks_by_stage(Layout.of(Plan(mesh=axes, batch=batch), 4))
    array([[0, 1],
           [2, 3]])
    """
    names = [name for name, _ in layout.axes]
    grid = np.arange(layout.ranks).reshape([size for _, size in layout.axes])
    stages = layout.size("pipeline")
    return (np.moveaxis(grid, names.index("pipeline"), 0) if stages > 1 else grid).reshape(stages, -1)


def _link(
    pairs: tuple[np.ndarray, np.ndarray], per_node: int, ends: tuple[Pricing, Pricing], *, tcp: bool, bridge: Link
) -> Link:
    """Return the link between two pipeline ranks.

    `pairs`: global ranks of the sender's and the receiver's devices, in matching order. `ends`: the cost model's inputs of both.
    `per_node`: ranks of a node.
    Across nodes the link is at most as fast as `bridge`, the connection between nodes of different fabrics.
    """
    machine = ends[0].machine
    constants = [end.constants for end in ends]
    boundary_us = max(number(k.pipe_us) for k in constants)
    domain = min(int(number(end.machine.domain)) for end in ends)
    crosses_domain = pairs[0] // domain != pairs[1] // domain
    senders, receivers = (end[crosses_domain] for end in pairs)
    if not len(senders):
        rate = min(number(link_rate(end.machine, end.constants)) for end in ends)
        return Link((boundary_us + max(number(k.link_us) for k in constants)) * 1e-6, rate)
    port = min(number(port_rate(end.machine, end.constants)) for end in ends)
    port = min(port, bridge.bytes_per_second * min(min(number(k.net), MAX_LINE_SHARE) for k in constants))
    if tcp:
        port *= per_node / int(np.bincount(senders // per_node).max())
    pod = number(machine.pod)
    if np.any(senders // pod != receivers // pod):
        port /= number(machine.oversubscribed)
    network_seconds = max(bridge.latency_seconds, *(number(k.net_us) * 1e-6 for k in constants))
    return Link(boundary_us * 1e-6 + network_seconds, port)
