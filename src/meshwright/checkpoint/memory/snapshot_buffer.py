"""The snapshot buffer: shared memory with one snapshot of a rank's state, in the layout of its safetensors data section.

A rank allocates it once and copies each snapshot into it. The writer process maps the same memory (a memfd, whose
descriptor it inherits), so a snapshot outlives its rank. Where the launcher created the memfd (`BUFFER_VARIABLE`), the snapshot
also outlives the writer, and the next process of the rank loads it (`checkpoint.memory.tier`). A memfd counts against the
memory of the host or container, not against the size of `/dev/shm`. Torch-free.

The first page has little-endian words of 8 bytes: the generation (odd while a snapshot is copied in), the bytes of data,
and of the record of a snapshot its generation, its length and its xxh3_128 (two words); then the generation that a writer
writes, and how many bytes it has written. The data begins at byte 4096, the record follows the data.
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
"""Environment variable with the path of the memfd that the launcher keeps for the rank: `/proc/LAUNCHER/fd/N`."""
DATA_OFFSET = mmap.PAGESIZE
_GENERATION = 0
_SIZE = 1
_RECORD_GENERATION = 2
_RECORD_BYTES = 3
_RECORD_DIGEST = 4
_SAVING = 6
_SAVED = 7
"""Indices of words in the first page."""
_RECORD_LIMIT = 1 << 30


class SnapshotBuffer:
    """`size` bytes of shared memory behind a header page."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the snapshot buffer of `size` data bytes behind `descriptor`, which this object then owns."""
        self.descriptor = descriptor
        self.size = size
        self.memory = mmap.mmap(descriptor, DATA_OFFSET + size)
        self._words = memoryview(self.memory)[:DATA_OFFSET].cast("Q")

    @classmethod
    def create(cls, size: int, env: Mapping[str, str] = os.environ) -> SnapshotBuffer:
        """The snapshot buffer of this process, in the launcher's memfd where there is one. A snapshot in it is no longer valid.

        Pages are taken from the host when they are written first. Raises OutOfResources where the kernel refuses the mapping.
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
        """The snapshot buffer behind a descriptor that this process inherited."""
        size = int.from_bytes(os.pread(descriptor, 8, 8 * _SIZE), "little")
        return cls(descriptor, size)

    @classmethod
    def of_last_process(cls, env: Mapping[str, str] = os.environ) -> SnapshotBuffer | None:
        """The snapshot buffer that an earlier process of this rank left with the launcher; None if there is none."""
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
        """Twice the number of snapshots that are complete, and one more while the next is copied in."""
        return self._words[_GENERATION]

    def begin_snapshot(self) -> int:
        """Mark the data as incomplete; returns the generation that `complete_snapshot` will set."""
        self._words[_GENERATION] = self.generation | 1
        return self.generation + 1

    def complete_snapshot(self) -> None:
        """Mark the data as one complete snapshot."""
        self._words[_GENERATION] = self.generation + 1

    def begin_saving(self, generation: int) -> None:
        """Note that a writer works on the snapshot of `generation`."""
        self._words[_SAVED] = 0
        self._words[_SAVING] = generation

    def count_saved(self, count: int) -> None:
        """Note that the writer has written `count` more bytes."""
        self._words[_SAVED] += count

    @property
    def saved_bytes(self) -> int | None:
        """Bytes of the current snapshot that a writer has written; None if no writer works on it or its record is complete."""
        generation = self.generation
        saving = self._words[_SAVING] == generation and self._words[_RECORD_GENERATION] != generation
        return self._words[_SAVED] if saving and generation % 2 == 0 else None

    def write_record(self, record: bytes, generation: int) -> None:
        """Store `record`, which describes the snapshot of `generation`, behind the data."""
        os.ftruncate(self.descriptor, DATA_OFFSET + self.size + len(record))
        os.pwrite(self.descriptor, record, DATA_OFFSET + self.size)
        digest = memoryview(xxhash.xxh3_128(record).digest()).cast("Q")
        words = self._words
        words[_RECORD_BYTES] = len(record)
        words[_RECORD_DIGEST] = digest[0]
        words[_RECORD_DIGEST + 1] = digest[1]
        words[_RECORD_GENERATION] = generation

    def read_record(self) -> bytes | None:
        """The record of the snapshot that the buffer holds; None while a snapshot is copied in, or without an intact record."""
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
        """Unmap the memory and close the descriptor; another process may still have both."""
        self._words.release()
        with suppress(BufferError):  # a view of the data still exists
            self.memory.close()
        os.close(self.descriptor)


def empty_memory() -> int:
    """Descriptor of a new memfd without pages, in which `SnapshotBuffer.create` of a rank makes its buffer (`BUFFER_VARIABLE`)."""
    return os.memfd_create("meshwright-checkpoint", os.MFD_CLOEXEC)


def allocated_bytes(env: Mapping[str, str] = os.environ) -> int:
    """Bytes of host memory that the launcher's memfd of this rank already takes."""
    path = env.get(BUFFER_VARIABLE)
    return 0 if path is None else os.stat(path).st_blocks * 512


def available_host_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes of host memory that this process may still take, by the kernel's estimate and its control groups' limits."""
    left = [limit.left for limit in cgroup_memory(cgroups, membership)]
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *left])
    return 0
