"""What carries a micro-batch's boundary from one pipeline rank to another: a link inside a domain, or a share of its nodes' ports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from meshwright.costs.of_plan import Pricing, number
from meshwright.simulator.timing import Link
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan


def links_of(
    plan: Plan, cluster: ClusterSpec, priced: Pricing, channels: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], Link]:
    """The link of each (sender, receiver) pair of pipeline ranks.

    All devices of a stage send at once. One device drives one port; only over TCP may the devices of a node that send across share all of
    its ports between them.
    """
    layout = Layout.of(plan, cluster.gpus_per_node)
    by_stage: dict[int, list[int]] = {}
    for rank in range(layout.ranks):
        by_stage.setdefault(layout.coordinates(rank).get("pipeline", 0), []).append(rank)
    return {
        (one, other): _link(list(zip(by_stage[one], by_stage[other], strict=True)), cluster, priced)
        for one, other in channels
    }


def _link(pairs: list[tuple[int, int]], cluster: ClusterSpec, priced: Pricing) -> Link:
    machine, k = priced.machine, priced.constants
    boundary_us = number(k.pipe_us)
    domain = int(number(machine.domain))
    across = [(one, other) for one, other in pairs if one // domain != other // domain]
    if not across:
        return Link((boundary_us + number(k.link_us)) * 1e-6, number(machine.link * k.link))
    port = number(machine.nic * k.net)
    if cluster.network is not None and cluster.network.fabric == "tcp":
        senders = Counter(one // cluster.gpus_per_node for one, _ in across)
        port *= cluster.gpus_per_node / max(senders.values())
    pod = number(machine.pod)
    if any(one // pod != other // pod for one, other in across):
        port /= number(machine.oversubscribed)
    return Link((boundary_us + number(k.net_us)) * 1e-6, port)
