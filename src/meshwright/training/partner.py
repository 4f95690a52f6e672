"""The partner host of a rank: where its writer sends copies of its snapshots (`checkpoint.partner: host`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

from meshwright.checkpoint.partner_copy import Partner
from meshwright.checkpoint.ranks import Ranks
from meshwright.checkpoint.snapshot_memory import SLOTS
from meshwright.checkpoint.snapshot_transport import SERVER_VARIABLE, SnapshotClient, TransportFailure
from meshwright.costs.partner_copies import partner_rate
from meshwright.policies.partner_host import choose_partner_hosts, partner_sentence
from meshwright.spec.job_token import job_token
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec


def find_partner(run: RunSpec, plan: Plan, ranks: Ranks, say: Callable[[str], None]) -> Partner | None:
    """The partner of this rank. Collective.

    None, on all ranks, without `checkpoint.partner` or if a host has no snapshot server. `say` receives one sentence about the
    choice, or about why there is none.
    """
    if run.checkpoint.partner == "none":
        return None
    cluster = run.cluster
    partners = choose_partner_hosts(Layout.of(plan, cluster.gpus_per_node))
    if partners is None:
        say("no copies of snapshots in the memory of another host: the run has one host")
        return None
    addresses = ranks.run_on_all("finding partner hosts", lambda: os.environ.get(SERVER_VARIABLE))
    if None in addresses:
        say(
            "no copies of snapshots in the memory of another host: the ranks were not started by agents (`train --agent`)"
        )
        return None
    address = addresses[partners.host_of(ranks.rank) * partners.ranks_per_host]
    assert address is not None
    rate = partner_rate(cluster)
    say(f"copies of snapshots at up to {rate / 1e9:.2f} GB/s a rank: {partner_sentence(partners)}")
    return Partner(address, rate)


def missing_copy_bytes(rank_bytes: int, local_ranks: int) -> int:
    """Bytes of this host's memory that the copies of another host's snapshots still need.

    A snapshot has `rank_bytes` bytes for each rank. Memory that the copies have already is not counted.
    """
    needed, address = SLOTS * rank_bytes * local_ranks, os.environ.get(SERVER_VARIABLE)
    if address is None:
        return needed
    try:
        with closing(SnapshotClient(address, job_token())) as client:
            return max(0, needed - client.slot_bytes())
    except TransportFailure:  # the agent starts another server, whose copies may need all of it
        return needed
