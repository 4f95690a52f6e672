"""Computes how much longer a plan's step takes on a slower network; this decides between plans that are equally fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from meshwright.costs.machine_rates import chip_of
from meshwright.costs.plan_costs import as_nodes
from meshwright.planner.candidate import Candidate
from meshwright.planner.reprice import reprice
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

SLOWER_NETWORK_SHARE = 0.8
"""Share of the network's bandwidth that remains in the slower case, as on a shared fabric under load."""
FRAGILE = 0.05
"""A plan is fragile if its step takes more than 5% longer on the slower network. An equally fast plan that is not fragile is preferred."""
SlowdownFunction = Callable[[Plan], float]
"""Returns by how much longer a plan's step takes on the slower network; 0.1 is 10%."""


def slowdown_function(run: RunSpec, current_seconds: Callable[[Plan], float] | None = None) -> SlowdownFunction:
    """Return a function that gives the relative increase of a plan's step time on the slower network.

    It gives 0 for a single node, and if the chip is not known. `current_seconds` gives a plan's step time on the run's own network; without
    it, the time is computed by simulating whole stages.
    """
    nodes = as_nodes(run.cluster).nodes
    if nodes == 1 or chip_of(run.cluster) is None:
        return lambda plan: 0.0
    slower_run = replace(run, cluster=with_slower_network(run.cluster))

    def by_stages(network_run: RunSpec, plan: Plan) -> float:
        return Candidate(reprice(network_run, plan, by_units=False)).seconds

    @cache
    def slowdown(plan: Plan) -> float:
        current = current_seconds(plan) if current_seconds else by_stages(run, plan)
        return by_stages(slower_run, plan) / current - 1

    return lambda plan: slowdown(plan.without_prediction)


def with_slower_network(cluster: ClusterSpec, share: float = SLOWER_NETWORK_SHARE) -> ClusterSpec:
    """Return the cluster with the bandwidth of every network port between nodes multiplied by `share`.

    A port of 50 GB/s keeps 40 GB/s:

    >>> slower = with_slower_network(ClusterSpec(gpu="H100", nodes=2, network=NetworkSpec(port_gb_per_s=50.0)))
    >>> slower.network.port_gb_per_s
    40.0
    """
    network = cluster.network or NetworkSpec()
    chip = chip_of(cluster)
    node_network = as_nodes(cluster).network or network
    port = node_network.port_gb_per_s or (chip.nic / 1e9 if chip else 1.0)
    bridge = network.bridge_gb_per_s
    groups = []
    for group in cluster.groups:
        group_chip = chip_of(replace(cluster, gpu=group.gpu, groups=())) if group.gpu else None
        group_port = group.port_gb_per_s or network.port_gb_per_s or (group_chip.nic / 1e9 if group_chip else port)
        groups.append(replace(group, port_gb_per_s=share * group_port))
    narrower = replace(network, port_gb_per_s=share * port, bridge_gb_per_s=bridge and share * bridge)
    return replace(cluster, network=narrower, groups=tuple(groups))


def why_robust(best: Candidate, fragile_candidate: Candidate, slowdown: SlowdownFunction) -> str:
    """Return the sentence that explains why the planner did not choose an equally fast but fragile plan."""
    time_behind = best.behind(fragile_candidate)
    return (
        f"robust: another plan takes {abs(time_behind) / best.seconds:.1%} {'less, but' if time_behind > 0 else 'more, and'} "
        f"{slowdown(fragile_candidate.plan):.0%} longer on a network that is {1 - SLOWER_NETWORK_SHARE:.0%} slower; "
        f"this one {slowdown(best.plan):.0%}"
    )
