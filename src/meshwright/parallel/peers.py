"""How tokens travel between tensor ranks while they multiply: copied out of and into one another's memory, or as messages.

Two exchanges are all there is. In a gather every rank brings its part of the sequence, and each copies the others' (`fetch`). In a sum
every rank has a part for each of the others, and puts it where that one will add up (`collect`). Neither needs arithmetic, so neither
needs a kernel: on CUDA the devices' copy engines do it, over memory that the ranks of a node map (`PeerMemory`); elsewhere messages do
(`Messages`), in the same order, so that what is computed is the same.

All ranks of a group make the same calls in the same order. Shapes: a rank's part `(batch, part, width)`, all tokens `(batch, ranks × part,
width)`, with `part` tokens of a sequence on each rank.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.mesh import Mesh
from meshwright.parallel.stream_memory import wait_at_least, write
from meshwright.workload.buffers import TOKEN_SLOTS

ALIGNED = 256
"""Bytes: where a slot begins, so that copies run at full width."""


def open_peers(mesh: Mesh, axis: str, what: str) -> Peers:
    """Peers for the ranks along `axis` (several), which exchange tokens beside compute.

    Operators find them by their group's name (`peers_of`) while the caller keeps the result. Raises BadInput, naming
    `what`, if the ranks are on several nodes or their devices cannot map each other's memory.

    Raises BadInput, naming `what` was asked for, where they leave a node or their devices cannot map each other's memory.
    """
    group = mesh.group(axis)
    assert group is not None, f"one rank along {axis} has no peers"
    ranks = dist.get_process_group_ranks(group)
    mesh.world.refuse_across_nodes(ranks, what)
    if mesh.device.type == "cpu":
        peers: Peers = Messages(group)
    else:
        mesh.world.refuse_unmapped(ranks, what)
        peers = PeerMemory(group, mesh.device)
    register(group.group_name, peers)
    return peers


def register(group: str, peers: Peers) -> None:
    """Let the group's operators exchange tokens through `peers`, for as long as the caller keeps them."""
    _open[group] = peers


def close_peers(group: str) -> None:
    """Let the group's tokens travel by collectives again: names come again with the next model of a process."""
    _open.pop(group, None)


def peers_of(group: str) -> Peers | None:
    """The peers of a group, by its name; None where its tokens travel by collectives."""
    return _open.get(group)


# Operators inside compiled code are told names, as of torch's own groups; whoever opened the peers owns them.
_open: WeakValueDictionary[str, Peers] = WeakValueDictionary()


class Peers(ABC):
    """The ranks of a group; `rank` is this one's number in it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks = group.rank(), group.size()

    @abstractmethod
    def fetch(self, x: Tensor, whole: Tensor, order: Sequence[int]) -> Arriving:
        """Begin to copy the part of every peer, in this order, to its place in `whole`; x is this rank's own, contiguous."""

    @abstractmethod
    def collect(self, shape: torch.Size, like: Tensor) -> Collecting:
        """Begin a sum whose parts are of this shape, of the dtype and device of `like`."""


class Arriving(ABC):
    """Parts on their way here."""

    @abstractmethod
    def wait(self, peer: int) -> None:
        """Let the current stream wait for the part of `peer`. Each must be waited for before the next exchange but one."""


class Collecting(ABC):
    """Parts on their way to those who add them up; `landing` `(ranks, batch, part, width)` is where this rank's arrive."""

    landing: Tensor

    @abstractmethod
    def send(self, parts: Mapping[int, Tensor], sequence: int) -> None:
        """Begin to bring peers their parts `(part, width)` of one sequence of the batch, which the current stream has made."""

    @abstractmethod
    def wait(self) -> None:
        """Let the current stream wait until every peer's part has landed; to be called when all parts are on their way."""


class Messages(Peers):
    """Sends and receives, for processors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._group, self._uses = group, 0

    def fetch(self, x: Tensor, whole: Tensor, order: Sequence[int]) -> Arriving:
        self._uses += 1
        part, works = x.shape[1], {}
        for peer in order:
            rows = slice(peer * part, (peer + 1) * part)
            works[peer] = [self._receive(sequence[rows], peer) for sequence in whole]
        sent = [self._send(sequence, peer) for peer in order for sequence in x]
        return _Received(works, sent)

    def collect(self, shape: torch.Size, like: Tensor) -> Collecting:
        self._uses += 1
        landing = like.new_empty((self.ranks, *shape))
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        works = [self._receive(sequence, peer) for peer in peers for sequence in landing[peer]]
        return _Sent(self, landing, works)

    def _send(self, tensor: Tensor, peer: int) -> tuple[dist.Work, Tensor]:
        """The message must outlive its sending."""
        tensor = tensor.contiguous()
        return _begun(dist.isend(tensor, group=self._group, group_dst=peer, tag=self._uses)), tensor

    def _receive(self, tensor: Tensor, peer: int) -> dist.Work:
        return _begun(dist.irecv(tensor, group=self._group, group_src=peer, tag=self._uses))


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch's types allow for a caller outside the group
    return work


class _Received(Arriving):
    def __init__(self, works: dict[int, list[dist.Work]], sent: list[tuple[dist.Work, Tensor]]) -> None:
        self._works, self._sent = works, sent

    def wait(self, peer: int) -> None:
        for work in self._works.pop(peer, ()):
            work.wait()
        if not self._works:
            while self._sent:
                self._sent.pop()[0].wait()


class _Sent(Collecting):
    def __init__(self, messages: Messages, landing: Tensor, works: list[dist.Work]) -> None:
        self.landing, self._messages, self._works = landing, messages, works
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, parts: Mapping[int, Tensor], sequence: int) -> None:
        self._sent += [self._messages._send(part, peer) for peer, part in parts.items()]

    def wait(self) -> None:
        for work in (*self._works, *(work for work, _ in self._sent)):
            work.wait()


class PeerMemory(Peers):
    """Copies by the devices' copy engines, on a stream beside compute, out of and into slots that all ranks of the group map.

    An exchange has one meeting, in which every rank tells the others that it has come so far and waits for them. In a gather a rank lays
    its part into its own slot before, and copies the others' behind; in a sum it copies into the others' slots before, and adds up its own
    behind. Exchanges take the two slots in turn. So what one writes was last read two exchanges ago, before the meeting between them:
    nobody overwrites what another has still to read. Meetings are flags in the same memory, written by small copies and waited for by the
    driver's stream memory operations (CUDA driver API), so neither the host waits nor a kernel that would need room beside the products.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._group, self._device = group, device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._window: _Window | None = None
        self.uses = 0

    def fetch(self, x: Tensor, whole: Tensor, order: Sequence[int]) -> Arriving:
        window, part = self.begin(x.nbytes * self.ranks), x.shape[1]
        window.slot(self.rank, self.uses, x.shape, x.dtype).copy_(x)
        self.stream.wait_stream(torch.cuda.current_stream())
        arrived: dict[int, Any] = {}
        with torch.cuda.stream(self.stream):
            window.meet(self.uses)
            for peer in order:
                source = window.slot(peer, self.uses, x.shape, x.dtype)
                for target, sequence in zip(
                    whole, source, strict=True
                ):  # each in one piece, which a copy engine can move
                    target[peer * part : (peer + 1) * part].copy_(sequence, non_blocking=True)
                arrived[peer] = self.stream.record_event()
        return _Copied(arrived)

    def collect(self, shape: torch.Size, like: Tensor) -> Collecting:
        return _Pushing(self, shape, like)

    def begin(self, size: int) -> _Window:
        """The next exchange, with slots of `size` bytes or more."""
        self.uses += 1
        if self._window is None or self._window.size < size:
            torch.cuda.synchronize(
                self._device
            )  # and the others do, before the new window is there: nobody reads the old one
            self._window = _Window(self._group, size, self._device)
        return self._window


class _Copied(Arriving):
    def __init__(self, arrived: dict[int, Any]) -> None:
        self._arrived = arrived

    def wait(self, peer: int) -> None:
        torch.cuda.current_stream().wait_event(self._arrived[peer])


class _Pushing(Collecting):
    def __init__(self, memory: PeerMemory, shape: torch.Size, like: Tensor) -> None:
        full, self._memory = torch.Size((memory.ranks, *shape)), memory
        self._window, self._number = memory.begin(like.element_size() * full.numel()), memory.uses
        self.landing = self._window.slot(memory.rank, self._number, full, like.dtype)
        peers = [peer for peer in range(memory.ranks) if peer != memory.rank]
        self._targets = {peer: self._window.slot(peer, self._number, full, like.dtype)[memory.rank] for peer in peers}
        self._left = len(peers) * shape[0]
        self._kept: list[Mapping[int, Tensor]] = []
        """What is copied must last until it has been."""

    def send(self, parts: Mapping[int, Tensor], sequence: int) -> None:
        if not parts:
            return
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        self._kept.append(parts)
        with torch.cuda.stream(stream):
            for peer, part in parts.items():
                self._targets[peer][sequence].copy_(part, non_blocking=True)
            self._left -= len(parts)
            if not self._left:  # so that no rank waits for the product that another makes for itself
                self._window.meet(self._number)

    def wait(self) -> None:
        assert not self._left, "a sum is waited for when all its parts are on their way"
        torch.cuda.current_stream().wait_stream(self._memory.stream)
        self._kept.clear()


class _Window:
    """Slots of `size` bytes that all devices of a group map, and a flag of each rank. Collective; waits for the device."""

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        # Sets up no multicast, which nothing here needs.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory as symmetric

        self.size = aligned(size)
        self._rank, self._ranks = group.rank(), group.size()
        self._front = aligned(4 * self._ranks)
        self._memory = symmetric.empty(self._front + TOKEN_SLOTS * self.size, dtype=torch.uint8, device=device)
        self._memory[: self._front].zero_()
        torch.cuda.synchronize(device)  # flags are zero before a peer can write one
        self._handle = symmetric.rendezvous(self._memory, group.group_name)
        self._flags = [self._view(owner, 0, (self._ranks,), torch.int32) for owner in range(self._ranks)]

    def slot(self, owner: int, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The slot of exchange `number` on one of the ranks."""
        return self._view(owner, self._front + number % TOKEN_SLOTS * self.size, shape, dtype)

    def meet(self, number: int) -> None:
        """Tell the peers that the current stream has come to here in exchange `number`, and let it wait until theirs have."""
        mine = self._flags[self._rank]
        peers = [(self._rank + step) % self._ranks for step in range(1, self._ranks)]
        write(mine[self._rank : self._rank + 1], number)
        for peer in peers:
            self._flags[peer][self._rank].copy_(mine[self._rank], non_blocking=True)
        wait_at_least([mine[peer : peer + 1] for peer in peers], number)

    def _view(self, owner: int, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._handle.get_buffer(owner, tuple(shape), dtype, first // dtype.itemsize)


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
