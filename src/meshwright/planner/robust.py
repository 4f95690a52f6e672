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

SLOWER = 0.8
"""Share of the network's bandwidth that remains in the slower case, as on a shared fabric under load."""
FRAGILE = 0.05
"""Relative increase of the step time on that network above which a plan is fragile and loses to an equally fast one."""
Loss = Callable[[Plan], float]


def losses(run: RunSpec) -> Loss:
    """A function from a plan to the relative increase of its step time at `SLOWER` bandwidth; 0 without a network."""
    nodes = as_nodes(run.cluster).nodes
    if nodes == 1 or chip_of(run.cluster) is None:
        return lambda plan: 0.0
    slower = replace(run, cluster=slowed(run.cluster))

    @cache
    def loss(plan: Plan) -> float:
        current, slow = (Candidate(reprice(at, plan, by_units=False)).seconds for at in (run, slower))
        return slow / current - 1

    return lambda plan: loss(plan.without_prediction)


def slowed(cluster: ClusterSpec, share: float = SLOWER) -> ClusterSpec:
    """The cluster with the bandwidth of every port between nodes multiplied by `share`."""
    network = cluster.network or NetworkSpec()
    chip = chip_of(cluster)
    stated = as_nodes(cluster).network or network
    port = stated.port_gb_per_s or (chip.nic / 1e9 if chip else 1.0)
    bridge = network.bridge_gb_per_s
    groups = []
    for group in cluster.groups:
        group_chip = chip_of(replace(cluster, gpu=group.gpu, groups=())) if group.gpu else None
        group_port = group.port_gb_per_s or network.port_gb_per_s or (group_chip.nic / 1e9 if group_chip else port)
        groups.append(replace(group, port_gb_per_s=share * group_port))
    narrower = replace(network, port_gb_per_s=share * port, bridge_gb_per_s=bridge and share * bridge)
    return replace(cluster, network=narrower, groups=tuple(groups))


def why_robust(best: Candidate, fragile_candidate: Candidate, loss: Loss) -> str:
    """The sentence that says why an equally fast but fragile plan was not chosen."""
    behind = best.behind(fragile_candidate)
    return (
        f"robust: another plan takes {abs(behind) / best.seconds:.1%} {'less, but' if behind > 0 else 'more, and'} "
        f"{loss(fragile_candidate.plan):.0%} longer on a network that is {1 - SLOWER:.0%} slower; this one {loss(best.plan):.0%}"
    )
