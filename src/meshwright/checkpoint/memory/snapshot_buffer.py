"""The snapshot buffer: shared memory with one snapshot of a rank's state, in the layout of a safetensors data section.

A rank allocates the buffer once and copies each snapshot into it. The buffer is a memfd. The writer process inherits its
descriptor and maps the same memory, so that a snapshot outlives its rank. If the launcher created the memfd
(`BUFFER_VARIABLE`), the snapshot also outlives the writer, and the next process of the rank loads it
(`checkpoint.memory.tier`). A memfd counts against the memory of the host or container, not against the size of `/dev/shm`.

The first page has little-endian words of 8 bytes:

    word 0      generation of the data; odd while a snapshot is copied in
    word 1      bytes of data
    word 2      generation of the snapshot that the record describes
    word 3      bytes of the record
    words 4, 5  xxh3_128 digest of the record
    word 6      generation of the snapshot that a writer writes to storage
    word 7      bytes of it that the writer has written

The data begin at byte 4096. The record follows the data.

This module does not import torch.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import xxhash

from meshwright.spec.errors import OutOfResources
from meshwright.spec.host_limits import CGROUPS, MEMBERSHIP, cgroup_memory

BUFFER_VARIABLE = "MESHWRIGHT_SNAPSHOT_BUFFER"
"""Environment variable with the path of the memfd that the launcher has created for the rank: `/proc/LAUNCHER/fd/N`."""
DATA_OFFSET = mmap.PAGESIZE
"""Byte of the memfd at which the data begin."""
_GENERATION = 0
_SIZE = 1
_RECORD_GENERATION = 2
_RECORD_BYTES = 3
_RECORD_DIGEST = 4
_SAVING = 6
_SAVED = 7
"""_GENERATION to _SAVED: indices of words in the first page."""
_RECORD_LIMIT = 1 << 30


class SnapshotBuffer:
    """A header page and `size` bytes of shared memory after it."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the memfd `descriptor`, with `size` bytes of data. This object then owns the descriptor."""
        self.descriptor = descriptor
        self.size = size
        self.memory = mmap.mmap(descriptor, DATA_OFFSET + size)
        self._words = memoryview(self.memory)[:DATA_OFFSET].cast("Q")

    @classmethod
    def create(cls, size: int, env: Mapping[str, str] = os.environ) -> SnapshotBuffer:
        """Return the snapshot buffer of this process, in the launcher's memfd if there is one.

        A snapshot that the memfd already has is no longer valid afterwards. The host's memory is used as pages are
        written for the first time. Raises OutOfResources if the kernel refuses the mapping.
        """
        descriptor = -1
        try:
            path = env.get(BUFFER_VARIABLE)
            descriptor = empty_memory() if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(descriptor).st_size < DATA_OFFSET + size:  # never shrink: an earlier writer may still read
                os.ftruncate(descriptor, DATA_OFFSET + size)
            buffer = cls(descriptor, size)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise OutOfResources(f"{size:,} bytes of host memory for checkpoints cannot be mapped: {error}") from None
        buffer._words[_SIZE] = size
        return buffer

    @classmethod
    def inherited(cls, descriptor: int) -> SnapshotBuffer:
        """Return the snapshot buffer of a memfd whose descriptor this process inherited."""
        size = int.from_bytes(os.pread(descriptor, 8, 8 * _SIZE), "little")
        return cls(descriptor, size)

    @classmethod
    def of_last_process(cls, env: Mapping[str, str] = os.environ) -> SnapshotBuffer | None:
        """Return the snapshot buffer that an earlier process of this rank left with the launcher, or None."""
        path = env.get(BUFFER_VARIABLE)
        if path is None:
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size = int.from_bytes(os.pread(descriptor, 8, 8 * _SIZE), "little")
        if os.fstat(descriptor).st_size < DATA_OFFSET + size or not os.fstat(descriptor).st_size:
            os.close(descriptor)
            return None
        return cls(descriptor, size)

    @property
    def data(self) -> memoryview:
        return memoryview(self.memory)[DATA_OFFSET:]

    @property
    def generation(self) -> int:
        """Twice the number of complete snapshots so far, plus one while the next snapshot is copied in."""
        return self._words[_GENERATION]

    def begin_snapshot(self) -> int:
        """Mark the data as incomplete. Return the generation that `complete_snapshot` will set."""
        self._words[_GENERATION] = self.generation | 1
        return self.generation + 1

    def complete_snapshot(self) -> None:
        """Mark the data as one complete snapshot."""
        self._words[_GENERATION] = self.generation + 1

    def begin_saving(self, generation: int) -> None:
        """Record that a writer writes the snapshot of `generation` to storage."""
        self._words[_SAVED] = 0
        self._words[_SAVING] = generation

    def count_saved(self, count: int) -> None:
        """Record that the writer has written `count` more bytes."""
        self._words[_SAVED] += count

    @property
    def saved_bytes(self) -> int | None:
        """Bytes of the current snapshot that a writer has written to storage.

        None if no writer writes it, or if its record is already complete.
        """
        generation = self.generation
        saving = self._words[_SAVING] == generation and self._words[_RECORD_GENERATION] != generation
        return self._words[_SAVED] if saving and generation % 2 == 0 else None

    def write_record(self, record: bytes, generation: int) -> None:
        """Store `record` after the data. It describes the snapshot of `generation`."""
        os.ftruncate(self.descriptor, DATA_OFFSET + self.size + len(record))
        os.pwrite(self.descriptor, record, DATA_OFFSET + self.size)
        digest = memoryview(xxhash.xxh3_128(record).digest()).cast("Q")
        words = self._words
        words[_RECORD_BYTES] = len(record)
        words[_RECORD_DIGEST] = digest[0]
        words[_RECORD_DIGEST + 1] = digest[1]
        words[_RECORD_GENERATION] = generation

    def read_record(self) -> bytes | None:
        """Return the record of the buffer's snapshot; None while a snapshot is copied in, or without an intact record."""
        words = self._words
        generation = self.generation
        size = words[_RECORD_BYTES]
        if generation % 2 or not generation or words[_RECORD_GENERATION] != generation or size > _RECORD_LIMIT:
            return None
        record = os.pread(self.descriptor, size, DATA_OFFSET + self.size)
        digest = memoryview(xxhash.xxh3_128(record).digest()).cast("Q")
        intact = (digest[0], digest[1]) == (words[_RECORD_DIGEST], words[_RECORD_DIGEST + 1])
        return record if intact else None

    def close(self) -> None:
        """Unmap the memory and close the descriptor. Other processes may still have both."""
        self._words.release()
        with suppress(BufferError):  # a view of the data still exists
            self.memory.close()
        os.close(self.descriptor)


def empty_memory() -> int:
    """Return the descriptor of a new memfd without pages. `SnapshotBuffer.create` of a rank uses it (`BUFFER_VARIABLE`)."""
    return os.memfd_create("meshwright-checkpoint", os.MFD_CLOEXEC)


def allocated_bytes(env: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of host memory that the launcher's memfd of this rank already uses."""
    path = env.get(BUFFER_VARIABLE)
    return 0 if path is None else os.stat(path).st_blocks * 512


def available_host_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return how many more bytes of host memory this process may use.

    It is the least of the kernel's estimate and the limits of the process's control groups.
    """
    left = [limit.left for limit in cgroup_memory(cgroups, membership)]
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *left])
    return 0
