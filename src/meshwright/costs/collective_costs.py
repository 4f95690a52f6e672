"""Seconds of a collective: latency of its steps plus bytes over the slowest link it crosses (α–β, ring or tree).

A group of n ranks whose neighbours are `stride` ranks apart has domain / stride members in each fast domain. Across domains it may use
the network ports of its own members only, for the groups beside it use theirs: that is the contention of concurrent groups.
Source of the forms: Thakur et al. 2005 (ring, tree), NCCL's documentation; see docs/design/cost-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts

MOST_OF_LINE = 0.95
"""Share of a link's or a port's line rate that no collective exceeds: headers and acknowledgements take the rest."""


def link_rate(machine: Machine, k: Constants) -> Array:
    """Bytes/s that a rank sends inside a domain."""
    return machine.link * np.minimum(k.link, MOST_OF_LINE)


def port_rate(machine: Machine, k: Constants, share: Array = 1.0) -> Array:
    """Bytes/s that a rank sends across domains, at `share` of what its gathers reach."""
    return machine.nic * np.minimum(k.net * share, MOST_OF_LINE)


@dataclass(frozen=True)
class Group:
    """Where a group of ranks lies: its size, members in one fast domain, domains it crosses, and its bandwidth."""

    size: Array
    inside: Array
    domains: Array
    bandwidth: Array
    """Bytes/s that the ring moves past one rank."""
    sums: Array = 1.0
    """Bandwidth of an all-reduce across domains over that of a gather."""


def group(machine: Machine, k: Constants, size: Array, stride: Array, crowding: Array = 0.0) -> Group:
    """A group of `size` ranks, `stride` apart, on `machine`; `crowding` is the chance that the network is overrun."""
    inside = np.minimum(size, np.maximum(1.0, machine.domain / stride))
    domains = np.ceil(size / inside)
    link = link_rate(machine, k)
    # A ring leaves a pod by the port of one of its members there; above it each has its share of what the pod sends.
    members = np.maximum(1.0, machine.pod / stride)
    above = np.where(size * stride > machine.pod, np.maximum(1.0, machine.oversubscribed / members), 1.0)
    reached = np.where(inside > 2, k.net_ring, 1.0)
    across = port_rate(machine, k, reached) * inside / above / (1 + k.crowd * crowding)
    sums = np.minimum(k.net_sum, MOST_OF_LINE / np.minimum(k.net * reached, MOST_OF_LINE))
    return Group(size, inside, domains, np.where(domains > 1, np.minimum(link, across), link), sums)


def by_copies(where: Group, machine: Machine, k: Constants) -> Group:
    """The same ranks where copy engines gather, inside a node."""
    return replace(where, bandwidth=np.minimum(where.bandwidth * k.copy_link, machine.link * MOST_OF_LINE))


def crowding(machine: Machine, layout: Layouts, k: Constants) -> Array:
    """The chance that a run's network is overrun, by its number of nodes: small below `stall_nodes`, certain far above.

    Seen only in runs that split the sequence (docs/design/cost-model.md).
    """
    nodes = np.maximum(1.0, layout.ranks / machine.per_node) * np.maximum(1.0, layout.tensor / machine.domain)
    ratio = k.stall_nodes / nodes
    square = ratio * ratio
    return layout.sequence / (1 + square * square)


def gather(where: Group, k: Constants, size_bytes: Array, messages: Array = 1.0) -> Array:
    """All-gather or reduce-scatter of `size_bytes` in all, in `messages` separate operations."""
    wire = (where.size - 1) / where.size * size_bytes / where.bandwidth
    return np.where(where.size > 1, wire + messages * ring_latency(where, k), 0.0)


def all_reduce(where: Group, k: Constants, size_bytes: Array, messages: Array = 1.0) -> Array:
    """All-reduce: bytes as a ring (reduce-scatter and all-gather), latency of the better of ring and tree."""
    faster = np.where(where.domains > 1, where.sums, 1.0)
    wire = 2 * (where.size - 1) / where.size * size_bytes / (where.bandwidth * faster)
    tree = 2 * (np.log2(where.inside) * k.link_us + np.log2(where.domains) * k.net_us) * 1e-6 + k.start_us * 1e-6
    latency = np.minimum(2 * ring_latency(where, k), tree)
    return np.where(where.size > 1, wire + messages * latency, 0.0)


def all_to_all(where: Group, k: Constants, machine: Machine, size_bytes: Array, outside_share: Array = 1.0) -> Array:
    """Seconds of an all-to-all in which each rank sends `size_bytes`, spread evenly over the group.

    Traffic inside the domain uses the links. Of the traffic that leaves it, `outside_share` uses the network, and then the
    links.
    """
    outside = np.where(where.domains > 1, 1 - where.inside / where.size, 0.0)
    local = (where.inside - 1) / where.size + np.where(np.asarray(outside_share) < 1, outside, 0.0)
    wire = size_bytes * np.maximum(local / link_rate(machine, k), outside * outside_share / port_rate(machine, k))
    return np.where(where.size > 1, wire + (k.start_us + where.domains * k.net_us) * 1e-6, 0.0)


def ring_latency(where: Group, k: Constants) -> Array:
    """Seconds that a ring's steps take without bytes."""
    return (k.start_us + (where.size - where.domains) * k.link_us + (where.domains - 1) * k.net_us) * 1e-6
