"""What joins the devices of a cluster: links inside a node, ports across nodes, and where the fabric narrows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.spec.fields import Bound

Rate = Annotated[float, Bound(more_than=0)]
Count = Annotated[int, Bound(at_least=1)]


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """Two levels and one place where the upper one narrows. What is left out is the chip's reference machine."""

    fabric: Literal["infiniband", "roce", "efa", "tcp"] | None = None
    """What runs across nodes; it gives the latency when `port_us` does not."""
    link_gb_per_s: Rate | None = None
    """Bytes per second and direction that one device moves to its neighbours inside a domain, in GB/s."""
    link_us: Rate | None = None
    """Latency of one step inside a domain, microseconds."""
    port_gb_per_s: Rate | None = None
    """One device's share of its node's network ports, one direction, in GB/s (a 400 Gb/s port for each device: 50)."""
    port_us: Rate | None = None
    """Latency of one step across nodes, microseconds."""
    domain: Count | None = None
    """Devices that see each other at link speed: those of a node, or more where links leave it (NVL72: 64 or 72)."""
    pod_nodes: Count | None = None
    """Nodes below the level at which the fabric narrows; none when it never does."""
    oversubscription: Annotated[float, Bound(at_least=1)] = 1.0
    """Bandwidth below that level over bandwidth above it."""


FABRIC_US = {"infiniband": 5.0, "roce": 8.0, "efa": 15.0, "tcp": 30.0}
"""Latency of one collective step by fabric, microseconds (NCCL's own tuning tables; measured on 8×H200 over TCP)."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes that differ from the rest of the cluster."""

    nodes: Count
    """How many."""
    gpu: str | None = None
    """Their chip, when it is another."""
    port_gb_per_s: Rate | None = None
    """Their devices' share of network ports, when it is another, in GB/s."""
