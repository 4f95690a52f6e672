"""Reads each block of a checkpoint's files once: verifies it, copies it to its destinations, sends it to other ranks."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.digests import block_digest
from meshwright.checkpoint.files import BLOCK_BYTES, open_regular, read_range, unreadable
from meshwright.checkpoint.manifest import Damage, DamagedCheckpoint, Manifest
from meshwright.checkpoint.ranks import Ranks
from meshwright.checkpoint.read_plan import BlockTransfer
from meshwright.spec.errors import Damaged

READ_THREADS = max(2, min(16, os.cpu_count() or 1))
RECEIVE_AHEAD = 4

Fill = Callable[[str, int, Tensor], None]
"""Takes a file's name, the position of a block in it, and the block's bytes."""


class BlockFiles:
    """The files of a checkpoint, read by blocks that are compared with their digests. Thread-safe; close it after use."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._descriptors: dict[str, int] = {}
        self._headers: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def block_bytes(self, file: str, index: int) -> int:
        return min(BLOCK_BYTES, self.manifest.files[file].bytes - index * BLOCK_BYTES)

    def read_header(self, file: str, read: Callable[[int, Path], bytes]) -> bytes:
        """The first bytes of a file, as `read(descriptor, path)` returns them, not yet verified.

        They are kept: the `read` method of this class verifies them with their block and does not read them again.
        """
        try:
            self._headers[file] = read(self._descriptor(file), self.path / file)
        except (OSError, Damaged) as error:
            raise self._damage(file, 0, error) from error
        return self._headers[file]

    def read(self, file: str, index: int, target: memoryview) -> None:
        """Fill `target` with block `index` of `file`. Raises DamagedCheckpoint unless the block is what was written."""
        self.read_unverified(file, index, target)
        self.verify(file, index, target)

    def read_unverified(self, file: str, index: int, target: memoryview) -> None:
        """Fill `target` with block `index` of `file`, in one read: with a few threads Python's lock would limit many small ones."""
        offset = index * BLOCK_BYTES
        header = self._headers.get(file, b"")[offset : offset + len(target)]
        target[: len(header)] = header
        try:
            read_range(self._descriptor(file), target[len(header) :], offset + len(header), self.path / file)
        except (OSError, Damaged) as error:
            raise self._damage(file, offset, error) from error

    def verify(self, file: str, index: int, data: memoryview) -> None:
        """Raise DamagedCheckpoint unless `data` is block `index` of `file` as it was written."""
        if block_digest(data) != self.manifest.files[file].blocks[index]:
            raise DamagedCheckpoint(self.path, [Damage(file, index * BLOCK_BYTES, "digest")])

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = open_regular(self.path / file)
            return self._descriptors[file]

    def _damage(self, file: str, offset: int, error: Exception) -> Exception:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not unreadable(error):
            return error
        note = error.strerror if isinstance(error, OSError) else str(error)
        return DamagedCheckpoint(self.path, [Damage(file, offset, "digest", f"unreadable: {note}")])


class BlockReader:
    """Works through a rank's part of a plan of transfers.

    What fails on this rank is kept in `failure` and the transfers go on, so that no other rank waits for one that gave up; then `fill` is
    not called any more.
    """

    def __init__(self, files: BlockFiles, ranks: Ranks, device: torch.device, fill: Fill) -> None:
        self.failure: Exception | None = None
        self._files, self._ranks, self._device, self._fill = files, ranks, device, fill
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def run(self, transfers: Sequence[BlockTransfer]) -> None:
        """Read, receive and send what `transfers`, the plan of all ranks in its order, assigns to this rank.

        Raises RuntimeError when another rank is lost.
        """
        numbers = {transfer: number for number, transfer in enumerate(transfers)}
        mine = [transfer for transfer in transfers if transfer.reader == self._ranks.rank]
        incoming = [transfer for transfer in transfers if self._ranks.rank in transfer.receivers]
        for _ in range(min(READ_THREADS + 2, len(mine))):
            self._free.put(self._buffer())
        sending: queue.SimpleQueue[tuple[BlockTransfer, Tensor, Future[None]] | None] = queue.SimpleQueue()
        on_device = {"initializer": _use, "initargs": (self._device,)}
        with ThreadPoolExecutor(READ_THREADS, **on_device) as readers, ThreadPoolExecutor(2, **on_device) as talkers:
            received = talkers.submit(self._receive, incoming, numbers)
            sent = talkers.submit(self._send, sending, numbers)
            for transfer in mine:  # buffers go out in the order of the plan, so the next block to send always has one
                buffer = self._free.get()
                done = readers.submit(self._read, transfer, buffer)
                if transfer.receivers:
                    sending.put((transfer, buffer, done))
            sending.put(None)
            for future in (received, sent):
                future.result()

    def _read(self, transfer: BlockTransfer, buffer: Tensor) -> None:
        try:
            if self.failure is None:
                block = buffer[: self._files.block_bytes(transfer.file, transfer.index)]
                data = block.numpy().data
                self._files.read_unverified(transfer.file, transfer.index, data)
                # The copy to a device runs while the block is verified; a wrong block fails the load, whatever it filled.
                self._use_block(transfer, block, lambda: self._files.verify(transfer.file, transfer.index, data))
        except Exception as error:
            self.failure = self.failure or error
        finally:
            if not transfer.receivers:
                self._free.put(buffer)

    def _use_block(
        self, transfer: BlockTransfer, block: Tensor, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        self._fill(transfer.file, transfer.index, block)
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        try:
            meanwhile()
        finally:
            if event is not None:  # the buffer is used again
                event.synchronize()

    def _send(
        self,
        sending: queue.SimpleQueue[tuple[BlockTransfer, Tensor, Future[None]] | None],
        numbers: Mapping[BlockTransfer, int],
    ) -> None:
        lost: Exception | None = None
        while (entry := sending.get()) is not None:
            transfer, buffer, done = entry
            done.result()
            try:
                if lost is None:
                    block = buffer[: self._files.block_bytes(transfer.file, transfer.index)]
                    works = [
                        dist.isend(block, group=self._ranks.group, tag=numbers[transfer], group_dst=rank)
                        for rank in transfer.receivers
                    ]
                    for work in works:
                        _wait(work)
            except Exception as error:  # the reading thread still needs its buffers back
                lost = error
            finally:
                self._free.put(buffer)
        if lost is not None:
            raise lost

    def _receive(self, incoming: Sequence[BlockTransfer], numbers: Mapping[BlockTransfer, int]) -> None:
        buffers = [self._buffer() for _ in range(min(RECEIVE_AHEAD, len(incoming)))]

        def begin(position: int) -> tuple[dist.Work | None, Tensor]:
            transfer = incoming[position]
            block = buffers[position % RECEIVE_AHEAD][: self._files.block_bytes(transfer.file, transfer.index)]
            work = dist.irecv(block, group=self._ranks.group, tag=numbers[transfer], group_src=transfer.reader)
            return work, block

        pending = [begin(position) for position in range(len(buffers))]
        for position, transfer in enumerate(incoming):
            work, block = pending.pop(0)
            _wait(work)
            try:
                if self.failure is None:
                    self._use_block(transfer, block)
            except Exception as error:
                self.failure = self.failure or error
            if position + RECEIVE_AHEAD < len(incoming):
                pending.append(begin(position + RECEIVE_AHEAD))

    def _buffer(self) -> Tensor:
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _use(device: torch.device) -> None:
    """A new thread starts on device 0; make it use the rank's own, so that no stray context appears there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
