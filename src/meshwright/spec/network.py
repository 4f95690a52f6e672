"""What joins the devices of a cluster: links inside a node, ports across nodes, where the fabric narrows, and how ranks use it."""

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
    """Two levels and one place where the upper one narrows. What is left out is the chip's reference machine."""

    fabric: Fabric | None = None
    """What runs across nodes; it gives the latency when `port_us` does not."""
    link_gb_per_s: Rate | None = None
    """Bytes per second and direction that one device moves to its neighbours inside a domain, in GB/s."""
    link_us: Rate | None = None
    """Latency of one step inside a domain, microseconds."""
    port_gb_per_s: Rate | None = None
    """One device's share of its node's network ports, one direction, in GB/s (a 400 Gb/s port for each device: 50)."""
    port_us: Rate | None = None
    """Latency of one step across nodes, microseconds."""
    domain: Positive | None = None
    """Devices that see each other at link speed: those of a node, or more where links leave it (NVL72: 64 or 72)."""
    pod_nodes: Positive | None = None
    """Nodes below the level at which the fabric narrows; none when it never does."""
    oversubscription: Annotated[float, Bound(at_least=1, at_most=1e6)] = 1.0
    """Bandwidth below that level over bandwidth above it."""
    bridge_gb_per_s: Rate | None = None
    """One device's share of what joins nodes of different fabrics, where only TCP goes, in GB/s; none takes the slower of the two ports."""
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
    """Nodes that differ from the rest of the cluster, and stand behind it in the order of ranks."""

    nodes: Positive
    """How many."""
    gpu: str | None = None
    """Their chip, when it is another."""
    port_gb_per_s: Rate | None = None
    """Their devices' share of network ports, when it is another, in GB/s."""
    link_gb_per_s: Rate | None = None
    """What one of their devices moves to its neighbours inside a domain, when it is another, in GB/s and direction."""
    fabric: Fabric | None = None
    """What runs across them, when it is another; only TCP joins nodes of different fabrics."""


EMULATED_SOCKET_THREADS, EMULATED_SOCKETS_PER_THREAD = 4, 4
"""What emulated nodes take when the cluster says nothing: one socket cannot fill a loopback interface."""


def network_environment(cluster: ClusterSpec, local_rank: int) -> dict[str, str]:
    """The environment that makes NCCL and Gloo use the network as `cluster` says, for one rank of a host.

    What the user exported goes before it; the caller sees to that. With `emulate_nodes`, NCCL is told that groups of this host's ranks are
    hosts of their own, so that they talk TCP over loopback. It binds NCCL alone: other paths ask `World.refuse_across_nodes`.
    """
    network = cluster.network or NetworkSpec()
    threads, sockets, interface = network.socket_threads, network.sockets_per_thread, network.interface
    found: dict[str, object] = {}
    if cluster.emulate_nodes > 1:
        interface = "lo"
        threads, sockets = threads or EMULATED_SOCKET_THREADS, sockets or EMULATED_SOCKETS_PER_THREAD
        found |= {"NCCL_HOSTID": f"node{local_rank // cluster.ranks_per_node}", "NCCL_IB_DISABLE": 1}
    found |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    found |= {"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": sockets}
    found |= {"NCCL_IB_TIMEOUT": network.ib_timeout, "NCCL_IB_RETRY_CNT": network.retries}
    return {name: str(value) for name, value in found.items() if value is not None}
