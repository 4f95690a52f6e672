"""Reads each block of a checkpoint once, verifies it, copies it to the tensors that need it, and passes it to other ranks.

A block is a consecutive part of a file (16 MiB, `files.BLOCK_BYTES`), and the manifest has a digest of each block.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.format.digests import digest_while_filling
from meshwright.checkpoint.format.files import BLOCK_BYTES, open_regular, read_range, unreadable
from meshwright.checkpoint.format.manifest import CheckpointManifest, Damage, DamagedCheckpoint
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.read.block_exchange import (
    BlockBuffer,
    BlockUse,
    DeviceExchange,
    Fill,
    HostExchange,
    SendQueue,
)
from meshwright.checkpoint.read.read_plan import BlockTransfer
from meshwright.spec.errors import Damaged
from meshwright.spec.host_limits import usable_cores

READ_THREADS = max(2, min(16, usable_cores()))
"""Threads of a rank that read blocks."""
SPARE_BUFFERS = 4
"""Buffers in addition to one per thread: for blocks that are still being copied to a device."""
PART_BYTES = 2 << 20
"""Bytes that are read and then digested at a time.

They are few enough to stay in the processor's cache, and enough that threads rarely wait for the GIL. The memory bandwidth
of each core limits the rate of reads. Digesting a block that has left the cache would make reads a third slower.
"""


class BlockFiles:
    """The files of a checkpoint, read by blocks that are compared with their digests. Thread-safe. Close it after use."""

    def __init__(self, path: Path, manifest: CheckpointManifest) -> None:
        self.path = path
        self.manifest = manifest
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
        """Return the first bytes of a file, as `read(descriptor, path)` returns them. They are not verified yet.

        The bytes are stored here. The method `read` uses them in place of another read, and verifies them together with
        the rest of their block.
        """
        try:
            self._headers[file] = read(self._descriptor(file), self.path / file)
        except (OSError, Damaged) as error:
            raise self._as_damage(file, 0, error) from error
        return self._headers[file]

    def read(self, file: str, index: int, target: memoryview) -> None:
        """Fill `target` with block `index` of `file`. Raises DamagedCheckpoint unless its digest is the manifest's."""
        read = self.reader(file)
        offset = index * BLOCK_BYTES
        digest = digest_while_filling(target, PART_BYTES, lambda start, end: read(offset + start, target[start:end]))
        if digest != self.manifest.files[file].blocks[index]:
            raise DamagedCheckpoint(self.path, [Damage(file, offset, "digest")])

    def reader(self, file: str) -> Callable[[int, memoryview], object]:
        """Return a function (offset, target) that fills `target` with bytes of `file` from `offset` on, without verifying."""
        path = self.path / file
        header = self._headers.get(file, b"")
        try:
            descriptor = self._descriptor(file)
        except (OSError, Damaged) as error:
            raise self._as_damage(file, 0, error) from error

        def read(offset: int, target: memoryview) -> None:
            if offset < len(header):
                known = header[offset : offset + len(target)]
                target[: len(known)] = known
                offset = offset + len(known)
                target = target[len(known) :]
            try:
                read_range(descriptor, target, offset, path)
            except (OSError, Damaged) as error:
                raise self._as_damage(file, offset // BLOCK_BYTES * BLOCK_BYTES, error) from error

        return read

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = open_regular(self.path / file)
            return self._descriptors[file]

    def _as_damage(self, file: str, offset: int, error: Exception) -> Exception:
        """Return DamagedCheckpoint if `error` concerns the file, because it is missing or cannot be read.

        Any other OSError concerns the host, for example a lack of descriptors. It is returned unchanged.
        """
        concerns_file = not isinstance(error, OSError) or isinstance(error, FileNotFoundError) or unreadable(error)
        if not concerns_file:
            return error
        note = error.strerror if isinstance(error, OSError) else str(error)
        return DamagedCheckpoint(self.path, [Damage(file, offset, "digest", f"unreadable: {note}")])


class BlockReader:
    """Carries out one rank's part of the transfers that `read_plan` plans for all ranks.

    The first error of this rank is stored in `failure`. The transfers then continue without calls of `fill`, because other
    ranks would wait for blocks that this rank does not send. Blocks are sent from device to device through
    `device_group` if it is given, otherwise through the CPU group of `ranks`.
    """

    def __init__(
        self,
        files: BlockFiles,
        ranks: RankGroup,
        device: torch.device,
        fill: Fill,
        device_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.failure: Exception | None = None
        self._files = files
        self._ranks = ranks
        self._device = device
        self._fill = fill
        self._device_group = device_group
        self._free: queue.SimpleQueue[BlockBuffer] = queue.SimpleQueue()

    def run(self, transfers: Sequence[BlockTransfer]) -> None:
        """Read, send and receive this rank's part of `transfers`, the plan of all ranks in its order.

        Raises RuntimeError if another rank is lost.
        """
        mine = [transfer for transfer in transfers if transfer.reader == self._ranks.rank]
        sends = self._device_group is not None and any(transfer.receivers for transfer in mine)
        for _ in range(min(READ_THREADS + SPARE_BUFFERS, len(mine))):
            self._free.put(BlockBuffer.allocate(self._device, on_device=sends))
        sending: SendQueue = queue.SimpleQueue()
        use = BlockUse(self._files.block_bytes, self._fill_received, self._free.put)
        thread_options = {"initializer": _set_device, "initargs": (self._device,)}
        with (
            ThreadPoolExecutor(READ_THREADS, **thread_options) as readers,
            ThreadPoolExecutor(2, **thread_options) as communicators,
        ):
            if self._device_group is not None:
                exchange = DeviceExchange(self._device_group, self._ranks.rank, self._device, use)
                talking = [communicators.submit(exchange.run, transfers, sending)]
            else:
                host_exchange = HostExchange(self._ranks, self._device, use)
                talking = [
                    communicators.submit(host_exchange.receive, transfers),
                    communicators.submit(host_exchange.send, transfers, sending),
                ]
            pending = iter(mine)
            lock = threading.Lock()
            threads = [readers.submit(self._read_pending, pending, lock, sending) for _ in range(READ_THREADS)]
            for future in threads:
                future.result()
            sending.put(None)
            for future in talking:
                future.result()
        while not self._free.empty():
            self._free.get().wait_for_copies()

    def _read_pending(self, pending: Iterator[BlockTransfer], lock: threading.Lock, sending: SendQueue) -> None:
        """Read the transfers that are left in `pending`. All reading threads share this iterator."""
        while True:
            done = None
            with lock:  # buffers are given out in the order of the plan, so that the next block to send always has one
                transfer = next(pending, None)
                if transfer is None:
                    return
                buffer = self._free.get()
                if transfer.receivers:
                    done = Future[None]()
                    sending.put((transfer, buffer, done))
            self._read(transfer, buffer)
            if done is None:
                self._free.put(buffer)
            else:
                done.set_result(None)

    def _read(self, transfer: BlockTransfer, buffer: BlockBuffer) -> None:
        """Read one block and copy it: to the device if it will be sent from there, else to this rank's tensors."""
        try:
            buffer.wait_for_copies()
            if self.failure is not None:
                return
            block = buffer.host[: self._files.block_bytes(transfer.file, transfer.index)]
            self._files.read(transfer.file, transfer.index, block.numpy().data)
            if transfer.receivers and buffer.device is not None:
                buffer.device[: block.numel()].copy_(block, non_blocking=True)
            else:
                self._fill(transfer.file, transfer.index, block)
            buffer.note_copies(self._device)
            if transfer.receivers:
                buffer.wait_for_copies()
        except Exception as error:
            self.failure = self.failure or error

    def _fill_received(self, transfer: BlockTransfer, block: Tensor) -> None:
        """Fill this rank's tensors from a block that was verified by its reader, unless this rank's load has failed."""
        try:
            if self.failure is None:
                self._fill(transfer.file, transfer.index, block)
        except Exception as error:
            self.failure = self.failure or error


def _set_device(device: torch.device) -> None:
    """Make a new thread use the rank's device. It would use device 0 otherwise, and create a CUDA context there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
