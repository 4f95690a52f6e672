"""The network of a cluster: links inside a node, ports between nodes, oversubscription, and settings of NCCL and Gloo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from meshwright.spec.fields import Bound, Positive

if TYPE_CHECKING:
    from meshwright.spec.cluster import ClusterSpec

Rate = Annotated[float, Bound(more_than=0, at_most=1e6)]
Fabric = Literal["infiniband", "roce", "efa", "tcp"]


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """A network of two levels (inside a node, between nodes), maybe with an oversubscribed level above.

    A key that is left out has the value of the chip's reference machine.
    """

    fabric: Fabric | None = None
    """Network between nodes. It decides the latency if `port_us` is not given."""
    link_gb_per_s: Rate | None = None
    """Bytes per second and direction that one device moves to its neighbours inside a domain, in GB/s."""
    link_us: Rate | None = None
    """Latency of one step inside a domain, microseconds."""
    port_gb_per_s: Rate | None = None
    """A device's share of its node's network ports, one direction, in GB/s (50 if each device has a port of 400 Gb/s).
    """
    port_us: Rate | None = None
    """Latency of one step across nodes, microseconds."""
    domain: Positive | None = None
    """Number of devices that are connected at link speed: the devices of a node, or more if links leave the node
    (NVL72: 64 or 72).
    """
    pod_nodes: Positive | None = None
    """Number of nodes below the oversubscribed level; none if there is no such level."""
    oversubscription: Annotated[float, Bound(at_least=1, at_most=1e6)] = 1.0
    """Bandwidth below that level divided by the bandwidth above it."""
    bridge_gb_per_s: Rate | None = None
    """A device's share of the TCP connection between nodes of different fabrics, in GB/s. none is the slower of the two
    ports.
    """
    interface: str | None = None
    """Network interface that TCP between nodes uses, as `ip link` names it; none leaves the choice to NCCL and Gloo."""
    socket_threads: Annotated[int, Bound(at_least=1, at_most=16)] | None = None
    """Number of threads for the TCP sockets of one connection between nodes; none is NCCL's own number."""
    sockets_per_thread: Annotated[int, Bound(at_least=1, at_most=16)] | None = None
    """Number of TCP sockets of each of those threads. NCCL allows 64 sockets per connection."""
    timeout_seconds: Positive | None = None
    """Longest time of a collective on this cluster, after which the run ends; none is `train.timeout_seconds`."""
    ib_timeout: Annotated[int, Bound(at_least=1, at_most=31)] | None = None
    """InfiniBand and RoCE: a packet is sent again after 4.096 µs · 2^n, where n is this number; none is NCCL's own
    number.
    """
    retries: Annotated[int, Bound(at_least=1, at_most=7)] | None = None
    """InfiniBand and RoCE: how often a packet is sent again before the connection fails; none is NCCL's own number."""


FABRIC_US = {"infiniband": 5.0, "roce": 8.0, "efa": 15.0, "tcp": 30.0}
"""Latency of one step of a collective in microseconds, by fabric (NCCL's own tuning tables; measured on 8×H200 over
TCP).
"""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes that differ from the other nodes of the cluster. Their ranks follow after the ranks of the other nodes."""

    nodes: Positive
    """Number of nodes."""
    gpu: str | None = None
    """Chip of these nodes, if it differs."""
    port_gb_per_s: Rate | None = None
    """A device's share of the network ports of these nodes in GB/s, if it differs."""
    link_gb_per_s: Rate | None = None
    """GB/s from a device of these nodes to its neighbours in a domain, one direction, if it differs."""
    fabric: Fabric | None = None
    """Network between these nodes, if it differs. Only TCP connects nodes of different fabrics."""


EMULATED_SOCKET_THREADS = 4
"""`socket_threads` between emulated nodes by default, because one socket cannot fill the loopback interface."""
EMULATED_SOCKETS_PER_THREAD = 4
"""`sockets_per_thread` between emulated nodes by default."""


def network_environment(cluster: ClusterSpec, local_rank: int) -> dict[str, str]:
    """Return environment variables that make NCCL and Gloo use the network as `cluster` says, for rank `local_rank` of
    a host.

    Variables that the user exports take precedence; the caller takes care of that. With `emulate_nodes`, each group of
    this host's ranks gets a host id of its own in NCCL, so that groups communicate over TCP on loopback. That affects
    only NCCL; other communication calls `World.refuse_across_nodes`.
    """
    network = cluster.network or NetworkSpec()
    threads = network.socket_threads
    sockets = network.sockets_per_thread
    interface = network.interface
    variables: dict[str, object] = {}
    if cluster.emulate_nodes > 1:
        interface = "lo"
        threads = threads or EMULATED_SOCKET_THREADS
        sockets = sockets or EMULATED_SOCKETS_PER_THREAD
        variables |= {"NCCL_HOSTID": f"node{local_rank // cluster.ranks_per_node}", "NCCL_IB_DISABLE": 1}
    variables |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    variables |= {"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": sockets}
    variables |= {"NCCL_IB_TIMEOUT": network.ib_timeout, "NCCL_IB_RETRY_CNT": network.retries}
    return {name: str(value) for name, value in variables.items() if value is not None}
