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
    """A network of two levels, with one oversubscribed level above. Keys left out use the chip's reference machine."""

    fabric: Fabric | None = None
    """Network between nodes; it gives the latency when `port_us` does not."""
    link_gb_per_s: Rate | None = None
    """Bytes per second and direction that one device moves to its neighbours inside a domain, in GB/s."""
    link_us: Rate | None = None
    """Latency of one step inside a domain, microseconds."""
    port_gb_per_s: Rate | None = None
    """A device's share of its node's network ports, one direction, in GB/s (a 400 Gb/s port for each device: 50)."""
    port_us: Rate | None = None
    """Latency of one step across nodes, microseconds."""
    domain: Positive | None = None
    """Devices connected at link speed: those of a node, or more where links leave the node (NVL72: 64 or 72)."""
    pod_nodes: Positive | None = None
    """Nodes below the oversubscribed level; none if there is no such level."""
    oversubscription: Annotated[float, Bound(at_least=1, at_most=1e6)] = 1.0
    """Bandwidth below that level over bandwidth above it."""
    bridge_gb_per_s: Rate | None = None
    """A device's share of the TCP connection between nodes of different fabrics, in GB/s.
    None takes the slower of the two ports."""
    interface: str | None = None
    """Network interface that TCP between nodes uses, as `ip link` names it; none leaves the choice to NCCL and Gloo."""
    socket_threads: Annotated[int, Bound(at_least=1, at_most=16)] | None = None
    """Threads that serve the TCP sockets of one connection between nodes; none takes NCCL's own number."""
    sockets_per_thread: Annotated[int, Bound(at_least=1, at_most=16)] | None = None
    """TCP sockets each of those threads serves; NCCL allows 64 sockets a connection."""
    timeout_seconds: Positive | None = None
    """How long a collective may take on this cluster before the run ends; none takes `train.timeout_seconds`."""
    ib_timeout: Annotated[int, Bound(at_least=1, at_most=31)] | None = None
    """InfiniBand and RoCE: a packet is sent again after 4.096 µs × 2 to this power; none takes NCCL's own number."""
    retries: Annotated[int, Bound(at_least=1, at_most=7)] | None = None
    """InfiniBand and RoCE: times a packet is sent again before the connection fails; none takes NCCL's own number."""


FABRIC_US = {"infiniband": 5.0, "roce": 8.0, "efa": 15.0, "tcp": 30.0}
"""Latency of one collective step by fabric, microseconds (NCCL's own tuning tables; measured on 8×H200 over TCP)."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes that differ from the others of the cluster; their ranks follow those of the other nodes."""

    nodes: Positive
    """Number of nodes."""
    gpu: str | None = None
    """Their chip, if it differs."""
    port_gb_per_s: Rate | None = None
    """Their devices' share of network ports in GB/s, if it differs."""
    link_gb_per_s: Rate | None = None
    """Bytes per second and direction from one of their devices to its neighbours in a domain, in GB/s, if it differs."""
    fabric: Fabric | None = None
    """The network between them, if it differs; only TCP connects nodes of different fabrics."""


EMULATED_SOCKET_THREADS = 4
EMULATED_SOCKETS_PER_THREAD = 4
"""Defaults of emulated nodes: one socket cannot saturate the loopback interface."""


def network_environment(cluster: ClusterSpec, local_rank: int) -> dict[str, str]:
    """Environment variables that make NCCL and Gloo use the network as `cluster` says, for one rank of a host.

    Variables exported by the user take precedence; the caller applies that. With `emulate_nodes`, groups of this host's
    ranks get host ids of their own in NCCL, so that they communicate over TCP on loopback. This affects NCCL only:
    other communication calls `World.refuse_across_nodes`.
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
