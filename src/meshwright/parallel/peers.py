"""All-gather and reduce-scatter of tokens between tensor ranks by copies, which overlap with matmuls.

In an all-gather each rank copies the other ranks' parts of the sequence (`start_gather`). In a reduce-scatter each rank writes one part
into the memory of each other rank, which adds the parts (`start_sum`). On CUDA the devices' copy engines execute the copies, in memory that
all ranks of a node map (`PeerMemory`). On a CPU, sends and receives in the same order replace the copies, so the results are equal
(`MessagePeers`).

All ranks of a group make the same calls in the same order. Shapes: each rank has `part` tokens of a sequence. A rank's part is
`(batch, part, width)`; all tokens are `(batch, ranks × part, width)`.
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
"""Alignment of a slot in bytes, so that copies use the full width of the link."""


def open_peers(mesh: Mesh, axis: str, option: str) -> Peers:
    """Open the peers of the ranks along `axis`, and register them for the group's operators. There must be at least two ranks.

    Operators find the peers by the group's name (`peers_of`) as long as the caller references the result. Raises BadInput if the ranks are
    on several nodes or their devices cannot map each other's memory; `option` is the plan's option that the message names.
    """
    group = mesh.group(axis)
    assert group is not None, f"one rank along {axis} has no peers"
    ranks = dist.get_process_group_ranks(group)
    mesh.world.refuse_across_nodes(ranks, option)
    if mesh.device.type == "cpu":
        peers: Peers = MessagePeers(group)
    else:
        mesh.world.refuse_unmapped(ranks, option)
        peers = PeerMemory(group, mesh.device)
    register(group.group_name, peers)
    return peers


def register(group: str, peers: Peers) -> None:
    """Make the group's operators exchange tokens through `peers`, as long as the caller references them."""
    _peers_by_group[group] = peers


def close_peers(group: str) -> None:
    """Make the group's operators use collectives again. The next model in this process may have a group with the same name."""
    _peers_by_group.pop(group, None)


def peers_of(group: str) -> Peers | None:
    """Return the peers of the group with this name, or None if its operators use collectives."""
    return _peers_by_group.get(group)


# Custom operators get the group's name as an argument and look up the peers here. An entry does not keep its peers alive.
_peers_by_group: WeakValueDictionary[str, Peers] = WeakValueDictionary()


class Peers(ABC):
    """Transfers tokens between the ranks of a group. `rank` is this rank's index in the group, `ranks` the size of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.ranks = group.size()

    @abstractmethod
    def start_gather(self, x: Tensor, whole: Tensor, order: Sequence[int]) -> PendingGather:
        """Start to copy each peer's part into its slice of `whole`, in the order `order`. x is this rank's part, contiguous."""

    @abstractmethod
    def start_sum(self, shape: torch.Size, like: Tensor) -> PendingSum:
        """Start a sum whose parts have this shape. They have the dtype and device of `like`."""


class PendingGather(ABC):
    """An all-gather that may still run."""

    @abstractmethod
    def wait(self, peer: int) -> None:
        """Make the current stream wait for the part of `peer`.

        Exchanges use two slots of memory in turn. Call it for every part before the second exchange after this one starts, because that
        exchange reuses this one's slot.
        """


class PendingSum(ABC):
    """A reduce-scatter that may still run. `received` `(ranks, batch, part, width)` has the parts that this rank adds."""

    received: Tensor

    @abstractmethod
    def send(self, parts: Mapping[int, Tensor], sequence: int) -> None:
        """Start to send each peer its part `(part, width)` of one sequence of the batch, after the work of the current stream."""

    @abstractmethod
    def wait(self) -> None:
        """Make the current stream wait for the parts of all peers. Call it after all `send`s."""


class MessagePeers(Peers):
    """Exchanges tokens by sends and receives, for CPU ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._group = group
        self._uses = 0

    def start_gather(self, x: Tensor, whole: Tensor, order: Sequence[int]) -> PendingGather:
        self._uses += 1
        part = x.shape[1]
        works = {}
        for peer in order:
            tokens = slice(peer * part, (peer + 1) * part)
            works[peer] = [self._receive(sequence[tokens], peer) for sequence in whole]
        sent = [self._send(sequence, peer) for peer in order for sequence in x]
        return _GatherByMessages(works, sent)

    def start_sum(self, shape: torch.Size, like: Tensor) -> PendingSum:
        self._uses += 1
        received = like.new_empty((self.ranks, *shape))
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        works = [self._receive(sequence, peer) for peer in peers for sequence in received[peer]]
        return _SumByMessages(self, received, works)

    def _send(self, tensor: Tensor, peer: int) -> tuple[dist.Work, Tensor]:
        """Start a send. The caller must keep the returned tensor until the send has ended."""
        tensor = tensor.contiguous()
        return _require_work(dist.isend(tensor, group=self._group, group_dst=peer, tag=self._uses)), tensor

    def _receive(self, tensor: Tensor, peer: int) -> dist.Work:
        return _require_work(dist.irecv(tensor, group=self._group, group_src=peer, tag=self._uses))


def _require_work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch's types allow for a caller outside the group
    return work


class _GatherByMessages(PendingGather):
    """`works` has the receives from each peer; `sent` has the sends, with the tensors that they read."""

    def __init__(self, works: dict[int, list[dist.Work]], sent: list[tuple[dist.Work, Tensor]]) -> None:
        self._works = works
        self._sent = sent

    def wait(self, peer: int) -> None:
        for work in self._works.pop(peer, ()):
            work.wait()
        if not self._works:
            while self._sent:
                self._sent.pop()[0].wait()


class _SumByMessages(PendingSum):
    def __init__(self, messages: MessagePeers, received: Tensor, works: list[dist.Work]) -> None:
        self.received = received
        self._messages = messages
        self._works = works
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, parts: Mapping[int, Tensor], sequence: int) -> None:
        # `sequence` is not sent: messages between two ranks arrive in the order of the calls.
        self._sent += [self._messages._send(part, peer) for peer, part in parts.items()]

    def wait(self) -> None:
        for work in (*self._works, *(work for work, _ in self._sent)):
            work.wait()


class PeerMemory(Peers):
    """Transfers tokens by the devices' copy engines, on a stream of its own, through slots that all ranks of the group map.

    A slot is a buffer on each rank. The window has two slots, which exchanges use in turn. An exchange has one barrier between its ranks:

    - all-gather: a rank writes its part into its own slot, barrier, then it copies from the other ranks' slots;
    - reduce-scatter: a rank copies parts into the other ranks' slots, barrier, then it adds the parts in its own slot.

    Exchange 3 uses the slot of exchange 1 again. The barrier of exchange 2 is between the last read of exchange 1 and the first write of
    exchange 3. A barrier consists of flags in the same memory. Small copies write the flags, and stream memory operations (CUDA driver API)
    wait for them, without the host and without a kernel.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._group = group
        self._device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._window: _Window | None = None
        self.uses = 0

    def start_gather(self, x: Tensor, whole: Tensor, order: Sequence[int]) -> PendingGather:
        window = self.begin(x.nbytes * self.ranks)
        part = x.shape[1]
        window.slot(self.rank, self.uses, x.shape, x.dtype).copy_(x)
        self.stream.wait_stream(torch.cuda.current_stream())
        copied: dict[int, Any] = {}
        with torch.cuda.stream(self.stream):
            window.barrier(self.uses)
            for peer in order:
                source = window.slot(peer, self.uses, x.shape, x.dtype)
                # A copy engine moves contiguous memory only, so each sequence is a copy of its own.
                for target, sequence in zip(whole, source, strict=True):
                    target[peer * part : (peer + 1) * part].copy_(sequence, non_blocking=True)
                copied[peer] = self.stream.record_event()
        return _GatherByCopies(copied)

    def start_sum(self, shape: torch.Size, like: Tensor) -> PendingSum:
        return _SumByCopies(self, shape, like)

    def begin(self, size: int) -> _Window:
        """Start the next exchange and return the window, whose slots then have at least `size` bytes."""
        self.uses += 1
        if self._window is None or self._window.size < size:
            # Every rank synchronises before the new window exists, so no rank still reads the old window.
            torch.cuda.synchronize(self._device)
            self._window = _Window(self._group, size, self._device)
        return self._window


class _GatherByCopies(PendingGather):
    def __init__(self, copied: dict[int, Any]) -> None:
        self._copied = copied

    def wait(self, peer: int) -> None:
        torch.cuda.current_stream().wait_event(self._copied[peer])


class _SumByCopies(PendingSum):
    def __init__(self, memory: PeerMemory, shape: torch.Size, like: Tensor) -> None:
        full = torch.Size((memory.ranks, *shape))
        self._memory = memory
        self._window = memory.begin(like.element_size() * full.numel())
        self._number = memory.uses
        self.received = self._window.slot(memory.rank, self._number, full, like.dtype)
        peers = [peer for peer in range(memory.ranks) if peer != memory.rank]
        self._targets = {peer: self._window.slot(peer, self._number, full, like.dtype)[memory.rank] for peer in peers}
        self._remaining = len(peers) * shape[0]
        self._sources: list[Mapping[int, Tensor]] = []
        """Sources of copies that may still run; they must stay allocated."""

    def send(self, parts: Mapping[int, Tensor], sequence: int) -> None:
        if not parts:
            return
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        self._sources.append(parts)
        with torch.cuda.stream(stream):
            for peer, part in parts.items():
                self._targets[peer][sequence].copy_(part, non_blocking=True)
            self._remaining -= len(parts)
            # The barrier follows the last part and is not in `wait`: the caller launches the matmul of its own part between the last `send`
            # and `wait`, and with a barrier in `wait` the peers would wait for this matmul too.
            if not self._remaining:
                self._window.barrier(self._number)

    def wait(self) -> None:
        assert not self._remaining, "every part is sent before the wait"
        torch.cuda.current_stream().wait_stream(self._memory.stream)
        self._sources.clear()


class _Window:
    """Two slots of `size` bytes and one flag per rank, in memory that all devices of a group map.

    Construction is collective and synchronises the device.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        # Symmetric memory would otherwise set up multicast, which these copies do not use.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory as symmetric

        self.size = aligned(size)
        self._rank = group.rank()
        self._ranks = group.size()
        self._flag_bytes = aligned(4 * self._ranks)
        self._memory = symmetric.empty(self._flag_bytes + TOKEN_SLOTS * self.size, dtype=torch.uint8, device=device)
        self._memory[: self._flag_bytes].zero_()
        torch.cuda.synchronize(device)  # the flags are zero before a peer writes one
        self._handle = symmetric.rendezvous(self._memory, group.group_name)
        self._flags = [self._view(owner, 0, (self._ranks,), torch.int32) for owner in range(self._ranks)]

    def slot(self, owner: int, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the slot that exchange `number` uses on rank `owner`, as a tensor."""
        return self._view(owner, self._flag_bytes + number % TOKEN_SLOTS * self.size, shape, dtype)

    def barrier(self, number: int) -> None:
        """Make the current stream set this rank's flag to `number` on every rank, then wait until all peers have set theirs."""
        flags = self._flags[self._rank]
        peers = [(self._rank + step) % self._ranks for step in range(1, self._ranks)]
        write(flags[self._rank : self._rank + 1], number)
        for peer in peers:
            self._flags[peer][self._rank].copy_(flags[self._rank], non_blocking=True)
        wait_at_least([flags[peer : peer + 1] for peer in peers], number)

    def _view(self, owner: int, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._handle.get_buffer(owner, tuple(shape), dtype, first // dtype.itemsize)


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
