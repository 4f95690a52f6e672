"""Channels between pipeline ranks: a communicator of two ranks for each neighbour and direction.

NCCL transfers the messages of one communicator in order. Therefore activations and gradients have separate communicators, and so have
different neighbours. One split of the world communicator creates the communicators of all pairs that share no rank. A schedule needs at
most six splits for any number of pipeline ranks, three per direction: the pairs that start at an even rank, the pairs that start at an odd
rank, and the pair of last and first rank if stages wrap around an odd number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.parallel.mesh import Mesh, pairs_along_pipeline

Pair = tuple[int, int]
"""A pair of pipeline ranks: (sender, receiver)."""


@dataclass(frozen=True)
class PipelineTransfer:
    """A send or receive that may still run. It references the buffer, so the buffer's memory stays allocated."""

    tensor: torch.Tensor
    work: dist.Work
    timing: HostTiming | DeviceTiming

    def wait(self) -> torch.Tensor:
        """Make compute wait until the transfer has ended, and return the tensor. With Gloo the host waits."""
        self.work.wait()
        self.timing.end_wait()
        return self.tensor


@dataclass
class HostTiming:
    """`events.span.MessageTransfer` for Gloo. A receive is timed from its start to the end of the wait for it; a send reports 0."""

    receives: bool
    timed_from_posting = True
    _posted: float = field(default_factory=time.perf_counter)
    _seconds: float | None = None

    def end_wait(self) -> None:
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._posted if self.receives else 0.0

    def seconds(self) -> float | None:
        return self._seconds


@dataclass(frozen=True)
class DeviceTiming:
    """`events.span.MessageTransfer` for NCCL: the time between NCCL's own events on the channel's stream.

    An event on another stream would need a wait for the message on that stream. Streams share the few hardware queues of the device, and
    the wait would block later work in the same queue. That work may be the compute on which the other rank's message depends: a deadlock.
    """

    work: dist.Work
    timed_from_posting = False

    def end_wait(self) -> None:
        pass

    def seconds(self) -> float | None:
        return self.work._get_duration() / 1000.0 if self.work.is_completed() else None  # type: ignore[attr-defined]  # torch does not declare it


def open_channels(mesh: Mesh, pairs: Sequence[Pair]) -> Channels:
    """Open a channel for each of `pairs` (`Schedule.channels`). Collective over all ranks.

    Sends one message in each channel. NCCL connects two ranks at their first message, and both block until then. Inside a step this could
    deadlock a cycle of ranks.
    """
    channels = Channels(mesh)
    for number, matching in enumerate(matchings(pairs, mesh.axis_size("pipeline"))):
        # Not `mesh.split`, which caches by ranks and would return the same group for both directions of a pair.
        group = mesh.world.split(pairs_along_pipeline(mesh.layout, matching), f"pipeline channel {number}")
        for sender, receiver in matching:
            channels.connect(sender, receiver, group)
    return channels


class Channels:
    """This rank's channels, by the pipeline rank that they connect to.

    The messages of a channel arrive in order: the n-th send matches the n-th receive.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._outgoing: dict[int, dist.ProcessGroup] = {}
        self._incoming: dict[int, dist.ProcessGroup] = {}
        self._timed = False

    def connect(self, sender: int, receiver: int, group: dist.ProcessGroup) -> None:
        """Use `group` for messages from `sender` to `receiver`, and send a first message. Does nothing on other pipeline ranks."""
        if self._mesh.coordinate("pipeline") == sender:
            self._outgoing[receiver] = group
            _send(torch.tensor([sender], device=self._mesh.device), group).wait()
        elif self._mesh.coordinate("pipeline") == receiver:
            self._incoming[sender] = group
            actual = int(self.recv(sender, (1,), torch.int64).wait())
            assert actual == sender, f"channel of pipeline rank {sender} received from pipeline rank {actual}"

    def send(self, peer: int, tensor: torch.Tensor) -> PipelineTransfer:
        """Start to send `tensor` to pipeline rank `peer`. Do not write to the tensor before `PipelineTransfer.wait`."""
        return _send(tensor.detach().contiguous(), self._outgoing[peer])

    def recv(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> PipelineTransfer:
        """Start to receive a tensor from pipeline rank `peer` into a new buffer on the mesh's device."""
        message = torch.empty(tuple(shape), dtype=dtype, device=self._mesh.device)
        group = self._incoming[peer]
        return _transfer(message, dist.irecv(message, group=group, group_src=1 - group.rank()), receives=True)

    def time_messages(self) -> None:
        """Measure the duration of every later transfer. With NCCL this adds an event to each message and cannot be turned off."""
        if not self._timed and self._mesh.device.type == "cuda":
            for group in {*self._outgoing.values(), *self._incoming.values()}:
                group._enable_collectives_timing()  # type: ignore[attr-defined]
        self._timed = True


def matchings(pairs: Sequence[Pair], ranks: int) -> list[list[Pair]]:
    """Divide `pairs` into few lists in which no rank occurs twice.

    Pairs with different distances between their ranks are in different lists. A pair is added to the first list of its distance in which
    neither of its ranks occurs. A line of ranks, or a ring of an even number of ranks, needs 4 lists; a ring of an odd number needs 6.
    """
    by_distance: dict[int, list[list[Pair]]] = {}
    for pair in sorted(set(pairs)):
        lists = by_distance.setdefault((pair[1] - pair[0]) % ranks, [])
        for matching in lists:
            ranks_of_matching = {rank for other in matching for rank in other}
            if ranks_of_matching.isdisjoint(pair):
                matching.append(pair)
                break
        else:
            lists.append([pair])
    return [matching for distance in sorted(by_distance) for matching in by_distance[distance]]


def _send(message: torch.Tensor, group: dist.ProcessGroup) -> PipelineTransfer:
    return _transfer(message, dist.isend(message, group=group, group_dst=1 - group.rank()), receives=False)


def _transfer(message: torch.Tensor, work: dist.Work | None, *, receives: bool) -> PipelineTransfer:
    assert work is not None  # None only for a caller outside the group
    return PipelineTransfer(message, work, DeviceTiming(work) if message.is_cuda else HostTiming(receives))
