"""Chooses the host that keeps copies of another host's snapshots (`checkpoint.partner: host`).

Hosts form a ring: the partner of a host is `shift` hosts further, so every host keeps the copies of exactly one other host. ByteRobust
(arXiv 2509.16293, section 6) places copies outside of a rank's own parallel groups, because a whole group may be evicted at once.

If each rank has a replica on another host, nothing is sent: a rank has the complete state of its replicas already. It keeps the part that
one replica writes, in addition to its own part.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.spec.layout import Layout

REPLICATE = "replicate"
"""The mesh axis whose ranks have the same state."""
OUTSIDE_AXES = ("tensor", "pipeline")
"""Mesh axes whose groups should have no rank on the partner host, if such a host exists."""


@dataclass(frozen=True)
class PartnerHosts:
    """The partner of host h is host (h + `shift`) modulo `hosts`."""

    hosts: int
    ranks_per_host: int
    shift: int
    inside: int
    """Number of ranks whose partner host has a rank of the same tensor or pipeline group."""

    def host_of(self, rank: int) -> int:
        """The host that keeps the copies of `rank`."""
        return (rank // self.ranks_per_host + self.shift) % self.hosts


def choose_partner_hosts(layout: Layout) -> PartnerHosts | None:
    """The ring with the fewest ranks whose partner host has ranks of their groups; of several, the nearest host. None for a single host."""
    hosts = -(-layout.ranks // layout.ranks_per_node)
    if hosts == 1:
        return None
    ranks_inside: Counter[int] = Counter()
    shifts_of_rank: dict[int, set[int]] = {}
    for axis in OUTSIDE_AXES:
        for group in layout.groups(axis):
            group_hosts = {layout.node(rank) for rank in group}
            for rank in group:
                shifts_of_rank.setdefault(rank, set()).update(
                    (host - layout.node(rank)) % hosts for host in group_hosts
                )
    for shifts in shifts_of_rank.values():
        ranks_inside.update(shifts)
    shift = min(range(1, hosts), key=lambda shift: (ranks_inside[shift], shift))
    return PartnerHosts(hosts, layout.ranks_per_node, shift, ranks_inside[shift])


def choose_replicas(layout: Layout) -> tuple[int, ...] | None:
    """For each rank, the replica on another host whose part of a snapshot it also keeps; None if some rank has no such replica.

    Each part is kept by exactly one other rank. The distance to the replica along the axis is the same for all ranks, and as small as
    possible.
    """
    size = layout.size(REPLICATE)
    for shift in range(1, size):
        replicas = []
        for rank in range(layout.ranks):
            coordinates = layout.coordinates(rank)
            replica = layout.rank(coordinates | {REPLICATE: (coordinates[REPLICATE] + shift) % size})
            if layout.node(replica) == layout.node(rank):
                break
            replicas.append(replica)
        else:
            return tuple(replicas)
    return None


REPLICA_SENTENCE = "each rank also keeps what its replica on another host writes, so nothing is sent"
"""Describes the choice of replicas, for messages."""


def partner_sentence(partners: PartnerHosts) -> str:
    """Describes the choice of partner hosts, for messages."""
    where = "the next host" if partners.shift == 1 else f"the host {partners.shift} further"
    if not partners.inside:
        return f"{where} keeps them, outside of each rank's tensor and pipeline groups"
    return f"{where} keeps them; {partners.inside} ranks have their own tensor or pipeline group there, as no other host is better"
