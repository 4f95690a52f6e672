"""What a plan loses when the network is slower than the cluster says, and which of equally fast plans that decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from meshwright.costs.machine_rates import chip_of
from meshwright.costs.plan_costs import as_nodes
from meshwright.planner.candidate import Candidate
from meshwright.planner.reprice import repriced
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

SLOWER = 0.8
"""Of the network's bandwidth that a plan should bear: what shared fabrics lose on a bad day."""
FRAGILE = 0.05
"""Share of a step that a plan may lose on such a network and still win by less than a prediction can tell."""
Loss = Callable[[Plan], float]


def losses(run: RunSpec) -> Loss:
    """A function from a plan to the share of its step that it loses on a network of `SLOWER` bandwidth; 0 without a network."""
    nodes = as_nodes(run.cluster).nodes
    if nodes == 1 or chip_of(run.cluster) is None:
        return lambda plan: 0.0
    slower = replace(run, cluster=slowed(run.cluster))

    @cache
    def loss(plan: Plan) -> float:
        now, then = (Candidate(repriced(at, plan, by_units=False)).seconds for at in (run, slower))
        return then / now - 1

    return lambda plan: loss(plan.without_prediction)


def slowed(cluster: ClusterSpec, share: float = SLOWER) -> ClusterSpec:
    """The cluster with `share` of the bandwidth at every port between its nodes."""
    network = cluster.network or NetworkSpec()
    chip = chip_of(cluster)
    stated = as_nodes(cluster).network or network
    port = stated.port_gb_per_s or (chip.nic / 1e9 if chip else 1.0)
    bridge = network.bridge_gb_per_s
    groups = []
    for group in cluster.groups:
        other = chip_of(replace(cluster, gpu=group.gpu, groups=())) if group.gpu else None
        own = group.port_gb_per_s or network.port_gb_per_s or (other.nic / 1e9 if other else port)
        groups.append(replace(group, port_gb_per_s=share * own))
    narrower = replace(network, port_gb_per_s=share * port, bridge_gb_per_s=bridge and share * bridge)
    return replace(cluster, network=narrower, groups=tuple(groups))


def why_robust(best: Candidate, fragile: Candidate, loss: Loss) -> str:
    """The sentence about a plan that was as fast and was left for what it loses."""
    return (
        f"robust: another plan takes {abs(best.behind(fragile)) / best.seconds:.1%} {'less' if best.behind(fragile) > 0 else 'more'}, but "
        f"{loss(fragile.plan):.0%} longer on a network that is {1 - SLOWER:.0%} slower; this one {loss(best.plan):.0%}"
    )
