"""The snapshots in the memory of one host: those of its own ranks, and copies of another host's snapshots.

Each rank of this host has one snapshot buffer. It may also contain the snapshot of a replica on another host.
Each rank of the other host has two slots on this host. A slot is a snapshot buffer too. While one slot receives a copy,
the other one keeps the previous copy. All of this memory belongs to the host's agent and outlives the processes that map
it.

This module does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.checkpoint.memory.file_image import FileImage
from meshwright.checkpoint.memory.record import SnapshotName, SnapshotRecord
from meshwright.checkpoint.memory.snapshot_buffer import (
    BUFFER_VARIABLE,
    SnapshotBuffer,
    allocated_bytes,
    available_host_memory,
)
from meshwright.spec.errors import OutOfResources

SLOTS = 2
"""Number of slots for each rank of the other host."""
FREE_SHARE = 0.1
"""Copies leave at least this part of the available host memory free."""
BUSY_SECONDS = 2.0
"""Seconds that a copy waits until a running copy of the same rank ends. It takes a moment to notice a lost sender."""


class CopyRefused(OutOfResources):
    """The error for a copy that this host does not accept."""


@dataclass(frozen=True)
class OpenSnapshot:
    """A complete snapshot: its record, and its data in `buffer` from byte `start` on.

    `image` is the safetensors file that it makes. Close it after use.
    """

    buffer: SnapshotBuffer
    record: SnapshotRecord
    start: int = 0

    @cached_property
    def image(self) -> FileImage:
        return FileImage(self.record.headers, self.buffer.data[self.start :])

    def close(self) -> None:
        self.buffer.close()


class SnapshotMemory:
    """The snapshots of one host, in the memfds at the paths `buffers` and `slots`. Thread-safe.

    `buffers` has one path per rank of this host, `slots` has `SLOTS` paths per rank of the other host, one rank after
    another.
    """

    def __init__(self, buffers: Sequence[str], slots: Sequence[str]) -> None:
        self._buffers = tuple(buffers)
        self._slots = tuple(slots)
        self._receiving = [threading.Lock() for _ in range(len(slots) // SLOTS)]

    def names(self) -> tuple[list[SnapshotName], list[SnapshotName]]:
        """Return the names of the complete snapshots: of this host's ranks, and copies of another host's ranks."""
        buffers, slots = ([_names_at(path) for path in paths] for paths in (self._buffers, self._slots))
        own = [names[0] for names in buffers if names]
        return own, [name for names in buffers for name in names[1:]] + [name for names in slots for name in names]

    def path(self, name: SnapshotName) -> str | None:
        """Return the path of the memory with the complete snapshot `name`, or None if this host does not have it now."""
        return next((path for path in (*self._buffers, *self._slots) if name in _names_at(path)), None)

    @property
    def slot_bytes(self) -> int:
        """Bytes of host memory that the slots use."""
        return sum(allocated_bytes({BUFFER_VARIABLE: path}) for path in self._slots)

    def open(self, name: SnapshotName) -> OpenSnapshot | None:
        """Return the complete snapshot `name`, or None if this host does not have it now."""
        path = self.path(name)
        return None if path is None else open_snapshot(path, name)

    @contextmanager
    def receive(self, name: SnapshotName, data_bytes: int) -> Iterator[IncomingCopy]:
        """Yield a slot for the copy `name` of `data_bytes` bytes. It counts as complete after `IncomingCopy.complete`.

        If another copy of the rank is being received, waits up to BUSY_SECONDS for its end. Raises CopyRefused if it is
        still being received then, if a copy that is as new is here, or if the host has too little memory.
        """
        position = name.rank % len(self._receiving)
        if not self._receiving[position].acquire(timeout=BUSY_SECONDS):
            raise CopyRefused(f"another copy of rank {name.rank} is being received")
        try:
            path = self._slot_to_overwrite(position, name)
            env = {BUFFER_VARIABLE: path}
            missing = data_bytes - allocated_bytes(env)
            if missing > (1 - FREE_SHARE) * available_host_memory():
                raise CopyRefused(f"host memory has no space for {missing:,} bytes")
            with closing(SnapshotBuffer.create(data_bytes, env)) as buffer:
                buffer.begin_snapshot()
                yield IncomingCopy(buffer, data_bytes)
        finally:
            self._receiving[position].release()

    def _slot_to_overwrite(self, position: int, name: SnapshotName) -> str:
        """Return a slot of the rank without a complete copy, else the slot with the older copy."""
        orders: dict[str, tuple[int, int]] = {}
        for path in self._slots[SLOTS * position : SLOTS * (position + 1)]:
            snapshot = open_snapshot(path)
            orders[path] = (0, 0) if snapshot is None else snapshot.record.name.order
            if snapshot is not None:
                snapshot.close()
                if snapshot.record.run_id == name.run_id and orders[path] >= name.order:
                    raise CopyRefused(f"a copy of rank {name.rank} that is as new is here")
        return min(orders, key=lambda path: orders[path])


class IncomingCopy:
    """A slot that is receiving a copy. The sender's bytes are written to `data`."""

    def __init__(self, buffer: SnapshotBuffer, data_bytes: int) -> None:
        self._buffer = buffer
        self.data = buffer.data[:data_bytes]

    def complete(self, record: bytes) -> None:
        """Declare the data complete. `record` is the encoded record that describes them."""
        self._buffer.complete_snapshot()
        self._buffer.write_record(record, self._buffer.generation)


def open_snapshot(path: str, name: SnapshotName | None = None) -> OpenSnapshot | None:
    """Return the complete snapshot `name` in the snapshot buffer at `path`, or None.

    Without a `name`, return the first snapshot there.
    """
    buffer = SnapshotBuffer.of_last_process({BUFFER_VARIABLE: path})
    data = None if buffer is None else buffer.read_record()
    record = None if data is None else SnapshotRecord.decode(data)
    parts = [part for part in (() if record is None else record.parts) if name in (None, part.record.name)]
    if buffer is not None and parts:
        return OpenSnapshot(buffer, parts[0].record, parts[0].start)
    if buffer is not None:
        buffer.close()
    return None


def _names_at(path: str) -> list[SnapshotName]:
    """Return the names of the complete snapshots in the snapshot buffer at `path`. The own rank's is first."""
    snapshot = open_snapshot(path)
    if snapshot is None:
        return []
    snapshot.close()
    return [part.record.name for part in snapshot.record.parts]


def plain_name(name: SnapshotName) -> dict[str, Any]:
    """Return `name` as values that JSON can store."""
    return dict(name.__dict__)


def parse_name(value: object) -> SnapshotName:
    """Return the name in a JSON value. Raises ValueError or TypeError if it is no valid name."""
    if not isinstance(value, dict):
        raise TypeError("expected the name of a snapshot")
    name = SnapshotName(**value)
    numbers = (name.step, name.rank, name.ranks)
    if not all(type(number) is int and 0 <= number < 1 << 40 for number in numbers) or name.rank >= name.ranks:
        raise ValueError("expected a step, a rank and a number of ranks")
    texts = (name.attempt, "" if name.run_id is None else name.run_id)
    if not all(isinstance(text, str) and len(text) <= 200 for text in texts):
        raise ValueError("expected the names of a run and of a save")
    assert name.order
    return name
