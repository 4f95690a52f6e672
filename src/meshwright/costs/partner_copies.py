"""Rate at which a rank copies its checkpoint to the memory of a partner host (`checkpoint.partner: host`)."""

from __future__ import annotations

from meshwright.costs.machine_rates import is_guessed, machine_of
from meshwright.costs.plan_costs import number
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.network import NetworkSpec

PORT_SHARE = 0.1
"""Largest share of a rank's network port that these copies use."""
UNKNOWN_PORT = 1.25e9
"""Bytes/s of a rank's network port if neither the cluster file nor the chip table states it: 10 Gb/s."""


def partner_rate(cluster: ClusterSpec) -> float:
    """Return the most bytes/s that one rank sends to its partner: the share `PORT_SHARE` of the slowest port of the
    cluster.
    """
    stated = (cluster.network or NetworkSpec()).port_gb_per_s is not None
    port = number(machine_of(cluster).nic) if stated or not is_guessed(cluster) else UNKNOWN_PORT
    return PORT_SHARE * port
