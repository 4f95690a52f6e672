"""Bytes between nodes: what a step sent, as the kernel counts it, beside what its plan was predicted to send."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.observe.interface_counters import Traffic
from meshwright.schedules.collective_counts import collective_counts
from meshwright.spec.cluster import ClusterSpec
from meshwright.training.session import Session

LOOPBACK = "lo"


@dataclass
class WireCount:
    """Counts what this rank's host sends to other nodes, from the end of one step to the end of the next.

    `counting` is None on ranks that leave it to another of their host. `missing` says that this one should count and its kernel cannot.
    """

    predicted: float
    hosts: int
    counting: Traffic | None
    missing: bool = False
    counted: int = 0
    steps: int = 0
    _read: int = 0

    def step(self) -> dict[str, float]:
        """A step is over: its part of a metrics line. Empty where no rank sees all that nodes send one another.

        The device is a step behind its host, and the bytes of a step are read when the device ends it: single steps may be a little off,
        their sum is not.
        """
        if self.counting is None:
            return {}
        now = self.counting.bytes()
        sent, self._read = now - self._read, now
        self.counted, self.steps = self.counted + sent, self.steps + 1
        if self.hosts > 1:
            return {}
        return {"counted_wire_bytes": sent, "predicted_wire_bytes": round(self.predicted)}

    def pause(self) -> None:
        """Leave out what was sent since the last step (a checkpoint, a validation)."""
        if self.counting is not None:
            self._read = self.counting.bytes()

    def line(self, control: dist.ProcessGroup) -> str | None:
        """One line about the steps so far, over all hosts; None without steps. Collective over `control`, whose every rank has a count."""
        sums = torch.tensor([self.counted, self.steps, int(self.missing)])
        dist.all_reduce(sums, group=control)
        counted, steps, missing = sums.tolist()
        if missing or not steps:
            return None
        each = counted / (steps / self.hosts) / 1e6
        return f"bytes between nodes per step: {each:,.1f} MB counted, {self.predicted / 1e6:,.1f} MB predicted"


def wire_count(session: Session) -> WireCount | None:
    """A count that starts now, where it is known which interface joins the nodes; the same answer on every rank."""
    cluster, world = session.run.cluster, session.world
    interface = interface_between_nodes(cluster)
    if interface is None:
        return None
    from meshwright.workload.cross_node_bytes import cross_node_bytes  # the cost model, which most runs start without

    found = cross_node_bytes(
        session.run.model,
        session.plan,
        session.mesh.layout,
        session.run.train.seq_len,
        collective_counts(session.engine.training),
        masked=session.run.data.document_mask,
    )
    counts = world.environment.local_rank == 0
    counting = Traffic.start(interface) if counts else None
    return WireCount(found.total, cluster.nodes, counting, missing=counts and counting is None)


def interface_between_nodes(cluster: ClusterSpec) -> str | None:
    """The interface that carries what nodes send one another and nothing else of the run; None when there is none or it is not said.

    Emulated nodes meet on loopback. Ranks on a processor use it inside a node too, so that only nodes of one rank can be told apart.
    """
    if cluster.emulate_nodes > 1:
        return None if cluster.is_cpu and cluster.ranks_per_node > 1 else LOOPBACK
    return cluster.network.interface if cluster.network and cluster.nodes > 1 else None
