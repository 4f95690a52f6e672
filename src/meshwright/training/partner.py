"""Chooses where copies of a rank's snapshots are kept (`checkpoint.partner: host`): at a partner host, or by a replica on another host."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

from meshwright.checkpoint.memory.partner_copy import Partner
from meshwright.checkpoint.memory.snapshots import SLOTS
from meshwright.checkpoint.memory.transport import SERVER_VARIABLE, SnapshotClient, TransportFailure
from meshwright.checkpoint.ranks import RankGroup
from meshwright.costs.partner_copies import partner_rate
from meshwright.policies.partner_host import (
    REPLICA_SENTENCE,
    choose_partner_hosts,
    choose_replicas,
    partner_sentence,
)
from meshwright.spec.job_token import job_token
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec


def find_copies(
    run: RunSpec, plan: Plan, ranks: RankGroup, say: Callable[[str], None]
) -> tuple[Partner | None, tuple[int, ...] | None]:
    """Return this rank's partner, or for each rank its replica on another host; at most one of the two is not None. Collective.

    Both are None on all ranks without `checkpoint.partner`, with a single host, or if a host has no snapshot server. `say` receives one
    sentence that explains the choice.
    """
    if run.checkpoint.partner == "none":
        return None, None
    cluster = run.cluster
    layout = Layout.of(plan, run.cluster.gpus_per_node)
    partners = choose_partner_hosts(layout)
    if partners is None:
        say("no copies of snapshots in the memory of another host: the run has one host")
        return None, None
    addresses = ranks.run_on_all("finding partner hosts", lambda: os.environ.get(SERVER_VARIABLE))
    if None in addresses:
        say(
            "no copies of snapshots in the memory of another host: the ranks were not started by agents (`train --agent`)"
        )
        return None, None
    replicas = choose_replicas(layout)
    if replicas is not None:
        say(f"copies of snapshots in the memory of another host: {REPLICA_SENTENCE}")
        return None, replicas
    address = addresses[partners.host_of(ranks.rank) * partners.ranks_per_host]
    assert address is not None
    rate = partner_rate(cluster)
    say(f"copies of snapshots at up to {rate / 1e9:.2f} GB/s a rank: {partner_sentence(partners)}")
    return Partner(address, rate), None


def missing_copy_bytes(rank_bytes: int, local_ranks: int) -> int:
    """Return how many more bytes of this host's memory the copies of another host's snapshots need.

    A snapshot has `rank_bytes` bytes for each rank. Memory that the copies already occupy is not counted.
    """
    needed = SLOTS * rank_bytes * local_ranks
    address = os.environ.get(SERVER_VARIABLE)
    if address is None:
        return needed
    try:
        with closing(SnapshotClient(address, job_token())) as client:
            return max(0, needed - client.slot_bytes())
    except TransportFailure:  # the agent starts another server, which has no copies yet
        return needed
