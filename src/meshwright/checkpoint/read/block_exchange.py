"""Sends blocks of a checkpoint's files from the rank that reads them to the other ranks that need them.

`HostExchange` sends host memory through a CPU group. `DeviceExchange` sends device memory through NCCL: the reading rank
has copied the block to its device, and the receiving ranks fill their tensors from there. So the block crosses the link
between host and device only once.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.format.files import BLOCK_BYTES
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.read.read_plan import BlockTransfer

RECEIVE_AHEAD = 4
"""Number of buffers for blocks that other ranks send to this rank."""
SENT_AHEAD = 2
"""Number of blocks that a device may still be sending when the next one is sent."""

Fill = Callable[[str, int, Tensor], None]
"""`fill(file, index, block)` copies block number `index` of a file, given as bytes, to the tensors that need it."""


@dataclass
class BlockBuffer:
    """Memory for one block: on the host and, if the block may be sent from the device, on the device too."""

    host: Tensor
    device: Tensor | None = None
    _copies: torch.cuda.Event | None = None
    """An event after the last copy from the host memory; None if there was none."""

    @classmethod
    def allocate(cls, device: torch.device, *, on_device: bool) -> BlockBuffer:
        """Return a new buffer. Its host memory is pinned if `device` is a CUDA device."""
        return cls(
            host_block(device), torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device) if on_device else None
        )

    def note_copies(self, device: torch.device) -> None:
        """Record that copies from the host memory were given to the current stream of `device`."""
        if device.type == "cuda":
            self._copies = self._copies or torch.cuda.Event()
            self._copies.record(torch.cuda.current_stream(device))

    def wait_for_copies(self) -> None:
        """Wait until these copies have ended, so that the host memory may change."""
        if self._copies is not None:
            self._copies.synchronize()


SendQueue = queue.SimpleQueue[tuple[BlockTransfer, BlockBuffer, "Future[None]"] | None]
"""Blocks that this rank reads for other ranks, in the order of the plan.

Each entry has the transfer, its buffer, and a future that is done when the block has been read. None ends the queue.
"""


@dataclass(frozen=True)
class BlockUse:
    """What an exchange does with blocks; functions of a `BlockReader`.

    `block_bytes(file, index)` returns the size of a block. `fill` fills this rank's tensors from a block. `release` gives a
    buffer back to the reading threads.
    """

    block_bytes: Callable[[str, int], int]
    fill: Callable[[BlockTransfer, Tensor], None]
    release: Callable[[BlockBuffer], None]

    def part(self, memory: Tensor, transfer: BlockTransfer) -> Tensor:
        """Return the first bytes of a buffer, as many as the transfer's block has."""
        return memory[: self.block_bytes(transfer.file, transfer.index)]


class HostExchange:
    """Sends and receives blocks through the CPU group of `ranks`, in two threads.

    The tag of a block's messages is its position in the plan.
    """

    def __init__(self, ranks: RankGroup, device: torch.device, use: BlockUse) -> None:
        self._ranks = ranks
        self._device = device
        self._use = use

    def send(self, transfers: Sequence[BlockTransfer], sending: SendQueue) -> None:
        """Send the blocks in `sending` until it ends. If another rank is lost, raises RuntimeError after that."""
        numbers = {transfer: number for number, transfer in enumerate(transfers)}
        lost: Exception | None = None
        while (entry := sending.get()) is not None:
            transfer, buffer, done = entry
            done.result()
            try:
                if lost is None:
                    block = self._use.part(buffer.host, transfer)
                    works = [
                        dist.isend(block, group=self._ranks.group, tag=numbers[transfer], group_dst=rank)
                        for rank in transfer.receivers
                    ]
                    _wait(works)
            except Exception as error:  # the reading threads still need their buffers back
                lost = error
            finally:
                self._use.release(buffer)
        if lost is not None:
            raise lost

    def receive(self, transfers: Sequence[BlockTransfer]) -> None:
        """Receive all blocks of `transfers` that this rank needs, `RECEIVE_AHEAD` at a time.

        Raises RuntimeError if another rank is lost.
        """
        incoming = [
            (number, transfer) for number, transfer in enumerate(transfers) if self._ranks.rank in transfer.receivers
        ]
        buffers = [host_block(self._device) for _ in range(min(RECEIVE_AHEAD, len(incoming)))]

        def begin(position: int) -> tuple[dist.Work | None, Tensor]:
            number, transfer = incoming[position]
            block = self._use.part(buffers[position % RECEIVE_AHEAD], transfer)
            work = dist.irecv(block, group=self._ranks.group, tag=number, group_src=transfer.reader)
            return work, block

        pending = [begin(position) for position in range(len(buffers))]
        for position, (_, transfer) in enumerate(incoming):
            work, block = pending.pop(0)
            _wait([work])
            self._use.fill(transfer, block)
            _synchronize_copies(self._device)  # before the buffer receives the next block
            if position + RECEIVE_AHEAD < len(incoming):
                pending.append(begin(position + RECEIVE_AHEAD))


class DeviceExchange:
    """Sends and receives blocks from device to device through `group`, in one thread and on one stream.

    Every rank works through its transfers in the order of the plan. So the first transfer that is not complete can always
    proceed, and the ranks cannot block each other.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, device: torch.device, use: BlockUse) -> None:
        self._group = group
        self._rank = rank
        self._device = device
        self._use = use
        self._sent: deque[tuple[Any, BlockBuffer]] = deque()

    def run(self, transfers: Sequence[BlockTransfer], sending: SendQueue) -> None:
        """Carry out this rank's part of `transfers`. Raises RuntimeError if another rank is lost."""
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if stream is not None:  # earlier work on the tensors that are loaded must end first
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            try:
                self._exchange([transfer for transfer in transfers if transfer.receivers], sending)
            finally:
                if stream is not None:
                    stream.synchronize()
                self._release_sent(0)
                while (entry := sending.get()) is not None:  # the reading threads still need their buffers back
                    entry[2].result()
                    self._use.release(entry[1])

    def _exchange(self, transfers: Sequence[BlockTransfer], sending: SendQueue) -> None:
        """Work through the transfers in order: send the blocks that this rank reads, and receive the blocks that it needs."""
        incoming = sum(self._rank in transfer.receivers for transfer in transfers)
        buffers = [
            torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=self._device)
            for _ in range(min(RECEIVE_AHEAD, incoming))
        ]
        received = 0
        for transfer in transfers:
            if transfer.reader == self._rank:
                self._send(transfer, sending)
            elif self._rank in transfer.receivers:
                block = self._use.part(buffers[received % RECEIVE_AHEAD], transfer)
                received += 1
                self._communicate([dist.P2POp(dist.irecv, block, group=self._group, group_peer=transfer.reader)])
                self._use.fill(transfer, block)

    def _send(self, transfer: BlockTransfer, sending: SendQueue) -> None:
        """Send one block to its receivers from the device, and fill this rank's tensors from it."""
        if sending.empty():  # the reading thread may be waiting for a buffer
            self._release_sent(0)
        entry = sending.get()
        assert entry is not None and entry[0] == transfer
        _, buffer, done = entry
        assert buffer.device is not None
        try:
            if not done.done():
                self._release_sent(0)
            done.result()
            block = self._use.part(buffer.device, transfer)
            self._communicate(
                [dist.P2POp(dist.isend, block, group=self._group, group_peer=rank) for rank in transfer.receivers]
            )
            self._use.fill(transfer, block)
        finally:
            event = torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None
            self._sent.append((event, buffer))
        self._release_sent(SENT_AHEAD)

    def _communicate(self, operations: list[dist.P2POp]) -> None:
        """Run the operations as one. The current stream waits for them."""
        _wait(dist.batch_isend_irecv(operations))

    def _release_sent(self, keep: int) -> None:
        """Release all but the last `keep` buffers, once the device has sent them and has filled tensors from them."""
        while len(self._sent) > keep:
            event, buffer = self._sent.popleft()
            if event is not None:
                event.synchronize()
            self._use.release(buffer)


def host_block(device: torch.device) -> Tensor:
    """Return host memory for one block, pinned if `device` is a CUDA device."""
    return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _synchronize_copies(device: torch.device) -> None:
    """Wait for the copies that were given to the current stream of `device`. Their sources may change afterwards."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).record_event().synchronize()


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
