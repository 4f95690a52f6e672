"""Pipeline transfers: a communicator of two ranks for each neighbour and direction.

NCCL moves the messages of one communicator one after another, so what travels forward must not share one with what travels back, nor one
neighbour's messages with another's. Pairs that share no rank are made by one split of the world, so a schedule's channels take at most
six, for any number of pipeline ranks: even to odd, odd to even, and round the end of an odd ring, for each direction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.parallel.mesh import Mesh, pairs_along_pipeline

Pair = tuple[int, int]
"""Pipeline ranks (sender, receiver)."""


@dataclass(frozen=True)
class Transfer:
    """A message on its way. It keeps the buffer alive; a send may be waited for long after it was begun."""

    tensor: torch.Tensor
    work: dist.Work
    travel: OnHost | OnDevice

    def wait(self) -> torch.Tensor:
        """Let compute wait until the message is through (under Gloo the host waits), and return it."""
        self.work.wait()
        self.travel.waited()
        return self.tensor


@dataclass
class OnHost:
    """`MessageTransfer` under Gloo: the receiver knows the duration after waiting, the sender does not."""

    receives: bool
    timed_from_posting = True
    _posted: float = field(default_factory=time.perf_counter)
    _seconds: float | None = None

    def waited(self) -> None:
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._posted if self.receives else 0.0

    def seconds(self) -> float | None:
        return self._seconds


@dataclass(frozen=True)
class OnDevice:
    """How long a message took by NCCL's own events, on the stream that moves the channel's messages: `MessageTransfer`.

    An event of ours on another stream would have to wait there for the message, and streams share the device's few queues: what is behind
    it in the queue, be it the compute this message waits for at the other end, would wait with it.
    """

    work: dist.Work
    timed_from_posting = False

    def waited(self) -> None:
        pass

    def seconds(self) -> float | None:
        return self.work._get_duration() / 1000.0 if self.work.is_completed() else None  # type: ignore[attr-defined]  # torch does not declare it


def open_channels(mesh: Mesh, pairs: Sequence[Pair]) -> Channels:
    """The channels of `pairs` (`Schedule.channels`); collective over all ranks.

    Each carries a first message at once: NCCL connects two ranks at their first message and both wait for it, which inside a step could be
    a circle of ranks that wait for one another.
    """
    channels = Channels(mesh)
    for number, matching in enumerate(matchings(pairs, mesh.axis_size("pipeline"))):
        # Not `mesh.split`, which would give the two directions of a pair, the same two ranks, the same group.
        group = mesh.world.split(pairs_along_pipeline(mesh.layout, matching), f"pipeline channel {number}")
        for sender, receiver in matching:
            channels.connect(sender, receiver, group)
    return channels


class Channels:
    """This rank's ends of the channels, by the pipeline rank at the other end.

    Messages of one channel match in the order both ends issue them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._outgoing: dict[int, dist.ProcessGroup] = {}
        self._incoming: dict[int, dist.ProcessGroup] = {}
        self._timed = False

    def connect(self, sender: int, receiver: int, group: dist.ProcessGroup) -> None:
        """Send messages from one pipeline rank to another over `group`, and a first one now; no effect on other ranks."""
        if self._mesh.coordinate("pipeline") == sender:
            self._outgoing[receiver] = group
            _send(torch.tensor([sender], device=self._mesh.device), group).wait()
        elif self._mesh.coordinate("pipeline") == receiver:
            self._incoming[sender] = group
            told = int(self.recv(sender, (1,), torch.int64).wait())
            assert told == sender, f"pipeline rank {told} sends where {sender} should"

    def send(self, peer: int, tensor: torch.Tensor) -> Transfer:
        """Begin to send `tensor` to pipeline rank `peer`; it must not be written to before the transfer is waited for."""
        return _send(tensor.detach().contiguous(), self._outgoing[peer])

    def recv(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> Transfer:
        """Begin to receive a tensor from pipeline rank `peer` into a new buffer on the mesh's device."""
        message = torch.empty(tuple(shape), dtype=dtype, device=self._mesh.device)
        group = self._incoming[peer]
        return _transfer(message, dist.irecv(message, group=group, group_src=1 - group.rank()), receives=True)

    def time_messages(self) -> None:
        """Measure the time of every later transfer.

        It costs NCCL one more event per message, and cannot be disabled again.
        """
        if not self._timed and self._mesh.device.type == "cuda":
            for group in {*self._outgoing.values(), *self._incoming.values()}:
                group._enable_collectives_timing()  # type: ignore[attr-defined]
        self._timed = True


def matchings(pairs: Sequence[Pair], ranks: int) -> list[list[Pair]]:
    """`pairs` divided into few lists in which no rank occurs twice.

    4 lists for a line of ranks or an even ring, 6 for an odd ring. Pairs of one distance are divided separately, each into
    the first list with neither of its ranks.
    """
    by_distance: dict[int, list[list[Pair]]] = {}
    for pair in sorted(set(pairs)):
        lists = by_distance.setdefault((pair[1] - pair[0]) % ranks, [])
        free = next((found for found in lists if not {*pair} & {rank for other in found for rank in other}), None)
        if free is None:
            lists.append([pair])
        else:
            free.append(pair)
    return [found for distance in sorted(by_distance) for found in by_distance[distance]]


def _send(message: torch.Tensor, group: dist.ProcessGroup) -> Transfer:
    return _transfer(message, dist.isend(message, group=group, group_dst=1 - group.rank()), receives=False)


def _transfer(message: torch.Tensor, work: dist.Work | None, *, receives: bool) -> Transfer:
    assert work is not None  # torch's types allow for a caller outside the group; these are inside
    return Transfer(message, work, OnDevice(work) if message.is_cuda else OnHost(receives))
