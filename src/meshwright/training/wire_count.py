"""Bytes sent between nodes per step: as the kernel's counters of the network interface give them, and as predicted from the plan."""

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
    """Counts the bytes that this rank's host sends to other nodes, from the end of one step to the end of the next.

    One rank of each host counts; on the others `counting` is None. `missing` means that this rank should count but its kernel has no
    counters.
    """

    predicted: float
    hosts: int
    counting: Traffic | None
    missing: bool = False
    counted: int = 0
    steps: int = 0
    _read: int = 0

    def step(self) -> dict[str, float]:
        """End a step. Returns its part of a metrics record; empty if no single rank sees all traffic between nodes.

        The device is a step behind the host, and the counter is read when the host ends the step. So the bytes of a single step may be
        slightly wrong; their sum over steps is not.
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
        """Exclude the bytes sent since the last step, for example those of a checkpoint or a validation."""
        if self.counting is not None:
            self._read = self.counting.bytes()

    def line(self, control: dist.ProcessGroup) -> str | None:
        """Return a line about the steps so far, over all hosts; None without steps. Collective: every rank of `control` has a count."""
        sums = torch.tensor([self.counted, self.steps, int(self.missing)])
        dist.all_reduce(sums, group=control)
        counted, steps, missing = sums.tolist()
        if missing or not steps:
            return None
        mb_per_step = counted / (steps / self.hosts) / 1e6
        return f"bytes between nodes per step: {mb_per_step:,.1f} MB counted, {self.predicted / 1e6:,.1f} MB predicted"


def wire_count(session: TrainingSession) -> WireCount | None:
    """Return a new count, or None if it is not known which interface connects the nodes. The answer is the same on every rank."""
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
    """Return the interface that carries traffic between nodes and nothing else; None if there is none or it is not known.

    Emulated nodes communicate over loopback. CPU ranks also use loopback inside a node, so their traffic between nodes can be counted only
    if each node has one rank.
    """
    if cluster.emulate_nodes > 1:
        return None if cluster.is_cpu and cluster.ranks_per_node > 1 else LOOPBACK
    return cluster.network.interface if cluster.network and cluster.nodes > 1 else None
