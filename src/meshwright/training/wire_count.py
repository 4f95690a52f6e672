"""Bytes between nodes per step: as counted by the kernel, and as predicted from the plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.observe.interface_counters import Traffic
from meshwright.schedules.collective_counts import collective_counts
from meshwright.spec.cluster import ClusterSpec
from meshwright.training.session import TrainingSession

LOOPBACK = "lo"


@dataclass
class WireCount:
    """Counts bytes that this rank's host sends to other nodes, from the end of one step to the end of the next.

    `counting` is None on ranks for which another rank of their host counts. `missing` means that this rank should count
    and its kernel cannot.
    """

    predicted: float
    hosts: int
    counting: Traffic | None
    missing: bool = False
    counted: int = 0
    steps: int = 0
    _read: int = 0

    def step(self) -> dict[str, float]:
        """End a step; returns its part of a metrics line, empty if no rank sees all traffic between nodes.

        The device is a step behind its host, and the bytes of a step are read when the device ends it: single steps may
        be slightly off, their sum is not.
        """
        if self.counting is None:
            return {}
        now = self.counting.bytes()
        sent = now - self._read
        self._read = now
        self.counted = self.counted + sent
        self.steps = self.steps + 1
        if self.hosts > 1:
            return {}
        return {"counted_wire_bytes": sent, "predicted_wire_bytes": round(self.predicted)}

    def pause(self) -> None:
        """Exclude bytes sent since the last step (a checkpoint, a validation)."""
        if self.counting is not None:
            self._read = self.counting.bytes()

    def line(self, control: dist.ProcessGroup) -> str | None:
        """A line about the steps so far, over all hosts; None without steps. Collective: every rank of `control` has a count."""
        sums = torch.tensor([self.counted, self.steps, int(self.missing)])
        dist.all_reduce(sums, group=control)
        counted, steps, missing = sums.tolist()
        if missing or not steps:
            return None
        mb_per_step = counted / (steps / self.hosts) / 1e6
        return f"bytes between nodes per step: {mb_per_step:,.1f} MB counted, {self.predicted / 1e6:,.1f} MB predicted"


def wire_count(session: TrainingSession) -> WireCount | None:
    """A new count if the interface between nodes is known; the same answer on every rank."""
    cluster = session.run.cluster
    world = session.world
    interface = interface_between_nodes(cluster)
    if interface is None or session.engine.present_experts:  # copies of experts change the bytes in every step
        return None
    from meshwright.workload.cross_node_bytes import cross_node_bytes  # most runs do not need it

    predicted = cross_node_bytes(
        session.run.model,
        session.plan,
        session.mesh.layout,
        session.run.train.seq_len,
        collective_counts(session.engine.training),
        masked=session.data.document_mask,
    )
    counting_rank = world.environment.local_rank == 0
    counting = Traffic.start(interface) if counting_rank else None
    return WireCount(predicted.total, cluster.nodes, counting, missing=counting_rank and counting is None)


def interface_between_nodes(cluster: ClusterSpec) -> str | None:
    """The interface that carries only traffic between nodes; None if there is none or it is unknown.

    Emulated nodes communicate over loopback. CPU ranks use it inside a node too, so only nodes of one rank can be
    separated.
    """
    if cluster.emulate_nodes > 1:
        return None if cluster.is_cpu and cluster.ranks_per_node > 1 else LOOPBACK
    return cluster.network.interface if cluster.network and cluster.nodes > 1 else None
