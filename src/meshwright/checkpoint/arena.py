"""The arena: shared memory with one snapshot of a rank's state, in the layout of its safetensors data section.

A rank allocates it once and copies each snapshot into it. The writer process maps the same memory (a memfd, whose
descriptor it inherits), so a snapshot outlives its rank. A memfd counts against the memory of the host or container,
not against the size of `/dev/shm`. Torch-free.

bytes 0-7 generation: odd while a snapshot is copied in, even once it is complete bytes 4096- the data
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from meshwright.spec.errors import OutOfResources

DATA_OFFSET = mmap.PAGESIZE
_GENERATION_BYTES = 8


class Arena:
    """`size` bytes of shared memory behind a header page."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the arena of `size` data bytes behind `descriptor`, which this object then owns."""
        self.descriptor, self.size = descriptor, size
        self.memory = mmap.mmap(descriptor, DATA_OFFSET + size)

    @classmethod
    def create(cls, size: int) -> Arena:
        """A new arena. Its pages are taken from the host when they are written first.

        Raises OutOfResources where the kernel refuses the mapping.
        """
        descriptor = -1
        try:
            descriptor = os.memfd_create("meshwright-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, DATA_OFFSET + size)
            return cls(descriptor, size)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise OutOfResources(f"{size:,} bytes of host memory for checkpoints cannot be mapped: {error}") from None

    @classmethod
    def inherited(cls, descriptor: int) -> Arena:
        """The arena behind a descriptor that this process inherited."""
        return cls(descriptor, os.fstat(descriptor).st_size - DATA_OFFSET)

    @property
    def data(self) -> memoryview:
        return memoryview(self.memory)[DATA_OFFSET:]

    @property
    def generation(self) -> int:
        """Twice the number of snapshots that are complete, and one more while the next is copied in."""
        return int.from_bytes(self.memory[:_GENERATION_BYTES], "little")

    def begin_snapshot(self) -> int:
        """Mark the data as incomplete; returns the generation that `complete_snapshot` will set."""
        self._set(self.generation | 1)
        return self.generation + 1

    def complete_snapshot(self) -> None:
        """Mark the data as one complete snapshot."""
        self._set(self.generation + 1)

    def _set(self, generation: int) -> None:
        self.memory[:_GENERATION_BYTES] = generation.to_bytes(_GENERATION_BYTES, "little")


def available_host_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process may still take, by the kernel's estimate and the container's limit."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _left_in_container(cgroup))
    return 0


def _left_in_container(cgroup: Path) -> int:
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        reclaimable = _reclaimable(cgroup / "memory.stat")
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else int(limit) - used + reclaimable


def _reclaimable(statistics: Path) -> int:
    """Bytes of page cache that the kernel gives up under pressure."""
    fields = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
    return int(fields.get("inactive_file", 0))
