"""Seconds of a collective: the latency of its steps, plus its bytes over the slowest link that it crosses (α–β model, ring or tree).

A domain is a set of ranks with fast links, for example a node. A group whose neighbours are `stride` ranks apart has domain / stride
members in each domain: with domains of 8 ranks and stride 2, it has 4. Across domains, a group uses only the network ports of its own
members, because other groups of the same axis use the other ports at the same time.

Source of the formulas: Thakur et al. 2005 (ring, tree), NCCL's documentation; see docs/design/cost-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts

MAX_LINE_SHARE = 0.95
"""The largest share of a link's or a port's line rate that a collective reaches; headers use the rest."""


def link_rate(machine: Machine, k: Constants) -> Array:
    """Return the bytes/s that a rank sends inside a domain."""
    return machine.link * np.minimum(k.link, MAX_LINE_SHARE)


def port_rate(machine: Machine, k: Constants, share: Array = 1.0) -> Array:
    """Return the bytes/s that a rank sends across domains; `share` is relative to the rate of gathers."""
    return machine.nic * np.minimum(k.net * share, MAX_LINE_SHARE)


@dataclass(frozen=True)
class CollectiveGroup:
    """A group of ranks that run a collective together."""

    size: Array
    """Number of ranks."""
    inside: Array
    """Number of its ranks in one fast domain."""
    domains: Array
    """Number of domains with ranks of the group."""
    bandwidth: Array
    """Bytes/s that a ring over the group moves through each rank."""
    sums: Array = 1.0
    """Bandwidth of an all-reduce across domains, relative to an all-gather."""


def rank_group(machine: Machine, k: Constants, size: Array, stride: Array, congestion: Array = 0.0) -> CollectiveGroup:
    """Return a group of `size` ranks whose neighbours are `stride` ranks apart; `congestion` is the probability of a congested network."""
    inside = np.minimum(size, np.maximum(1.0, machine.domain / stride))
    domains = np.ceil(size / inside)
    inside_rate = link_rate(machine, k)
    # A ring leaves a pod (a part of the network with full bandwidth) through the port of one member. All groups share what leaves the pod.
    members = np.maximum(1.0, machine.pod / stride)
    slowdown = np.where(size * stride > machine.pod, np.maximum(1.0, machine.oversubscribed / members), 1.0)
    ring_share = np.where(inside > 2, k.net_ring, 1.0)
    across_rate = port_rate(machine, k, ring_share) * inside / slowdown / (1 + k.crowd * congestion)
    sums = np.minimum(k.net_sum, MAX_LINE_SHARE / np.minimum(k.net * ring_share, MAX_LINE_SHARE))
    return CollectiveGroup(
        size, inside, domains, np.where(domains > 1, np.minimum(inside_rate, across_rate), inside_rate), sums
    )


def copy_engine_group(group: CollectiveGroup, machine: Machine, k: Constants) -> CollectiveGroup:
    """Return the group with the bandwidth that gathers by copy engines reach inside a node."""
    return replace(group, bandwidth=np.minimum(group.bandwidth * k.copy_link, machine.link * MAX_LINE_SHARE))


def congestion(machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Return the probability that a run's network is congested: near 0 with few nodes, 0.5 with `stall_nodes`, near 1 with many more.

    It was observed only in runs with sequence parallelism (docs/design/cost-model.md), so it is 0 for others.
    """
    nodes = np.maximum(1.0, layout.ranks / machine.per_node) * np.maximum(1.0, layout.tensor / machine.domain)
    ratio = k.stall_nodes / nodes
    square = ratio * ratio
    return layout.sequence / (1 + square * square)


def gather(group: CollectiveGroup, k: Constants, size_bytes: Array, messages: Array = 1.0) -> Array:
    """Return the seconds of all-gathers or reduce-scatters of `size_bytes` in total, in `messages` separate operations.

    `size_bytes` is the size of the gathered result, or of the input of the reduce-scatter.
    """
    wire = (group.size - 1) / group.size * size_bytes / group.bandwidth
    return np.where(group.size > 1, wire + messages * ring_latency(group, k), 0.0)


def all_reduce(group: CollectiveGroup, k: Constants, size_bytes: Array, messages: Array = 1.0) -> Array:
    """Return the seconds of an all-reduce: bytes as in a ring (reduce-scatter, then all-gather), latency of the faster of ring and tree."""
    faster = np.where(group.domains > 1, group.sums, 1.0)
    wire = 2 * (group.size - 1) / group.size * size_bytes / (group.bandwidth * faster)
    tree = 2 * (np.log2(group.inside) * k.link_us + np.log2(group.domains) * k.net_us) * 1e-6 + k.start_us * 1e-6
    latency = np.minimum(2 * ring_latency(group, k), tree)
    return np.where(group.size > 1, wire + messages * latency, 0.0)


def all_to_all(
    group: CollectiveGroup, k: Constants, machine: Machine, size_bytes: Array, outside_share: Array = 1.0
) -> Array:
    """Return the seconds of an all-to-all in which each rank sends `size_bytes` in total, the same to every rank of the group.

    Bytes for ranks of the same domain use the links. Of the bytes for other domains, `outside_share` use the network. If the share is below
    1, a domain receives each token once, and distributes it over its links.
    """
    outside = np.where(group.domains > 1, 1 - group.inside / group.size, 0.0)
    local = (group.inside - 1) / group.size + np.where(np.asarray(outside_share) < 1, outside, 0.0)
    wire = size_bytes * np.maximum(local / link_rate(machine, k), outside * outside_share / port_rate(machine, k))
    return np.where(group.size > 1, wire + (k.start_us + group.domains * k.net_us) * 1e-6, 0.0)


def ring_latency(group: CollectiveGroup, k: Constants) -> Array:
    """Return the latency of all steps of a ring in seconds, without the time for bytes."""
    return (k.start_us + (group.size - group.domains) * k.link_us + (group.domains - 1) * k.net_us) * 1e-6
