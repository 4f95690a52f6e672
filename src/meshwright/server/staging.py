"""Staging memory: an engine copies cache blocks into it, and another engine on the same host copies them from it.

The sender creates the memory, and sends its file descriptor to the receiver over a Unix socket. The memory has no name, so the operating
system frees it when both processes have ended, even if they crash.
"""

from __future__ import annotations

import fcntl
import mmap
import os

STAGING_BYTES = 256 << 20
"""Bytes of staging memory for one connection. The operating system provides only the part that is used."""
MOST_SLOTS = 4096
"""Largest number of slots of a staging memory."""
_SEAL_FUTURE_WRITE = 0x10
"""Linux's F_SEAL_FUTURE_WRITE: mappings that are made later cannot change the content."""


class Staging:
    """The sender's staging memory. It is divided into slots of one block each."""

    def __init__(self, block_bytes: int, most_bytes: int = STAGING_BYTES) -> None:
        self.block_bytes = block_bytes
        self.slots = max(1, min(MOST_SLOTS, most_bytes // block_bytes))
        self.descriptor, self._memory = memory_file(self.slots * block_bytes)
        self._used = [False] * self.slots

    @property
    def used(self) -> int:
        """Number of slots that were taken and not given back."""
        return sum(self._used)

    def take(self, most: int) -> tuple[int, int]:
        """Take up to `most` free slots that are next to each other. Returns the first slot and the number of slots, which may be 0.

        It begins at the first free slot, and may take fewer slots than are free elsewhere.
        """
        if False not in self._used:
            return 0, 0
        start = self._used.index(False)
        end = min(start + most, self.slots)
        if True in self._used[start:end]:
            end = self._used.index(True, start)
        self._used[start:end] = [True] * (end - start)
        return start, end - start

    def give_back(self, start: int, count: int) -> None:
        """Free `count` slots from slot `start` on. Raises ValueError if one of them is not in use."""
        if not 0 <= start <= start + count <= self.slots or not all(self._used[start : start + count]):
            raise ValueError(f"slots {start} to {start + count}: not in use")
        self._used[start : start + count] = [False] * count

    def content(self, start: int, count: int) -> memoryview:
        """Return the memory of `count` slots from slot `start` on."""
        return self._memory[start * self.block_bytes : (start + count) * self.block_bytes]

    def close(self) -> None:
        """Close the file descriptor. The memory is freed when no process maps it."""
        os.close(self.descriptor)


def memory_file(size: int) -> tuple[int, memoryview]:
    """Create memory without a name. Returns its file descriptor, with which other processes can read it, and the memory.

    The caller must close the descriptor.
    """
    descriptor = os.memfd_create("meshwright-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        memory = memoryview(mmap.mmap(descriptor, size))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, memory


def map_staging(descriptor: int, size: int) -> memoryview:
    """Map the memory of another process's `Staging`, and close the descriptor. Later writes of the other process are visible in it.

    Raises ValueError if the memory is smaller than `size` bytes.
    """
    try:
        if os.fstat(descriptor).st_size < size:
            raise ValueError(f"staging memory: expected {size} bytes, got {os.fstat(descriptor).st_size}")
        # Mapped writable because users need a writable buffer. Writes stay private to this process.
        return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)
