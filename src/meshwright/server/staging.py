"""Memory in which an engine leaves blocks for another one of the same host, until that has copied them.

The sender owns it. Its descriptor goes to the receiver over their Unix socket, so it has no name, and the system frees it when both
processes have ended, however they end.
"""

from __future__ import annotations

import fcntl
import mmap
import os

STAGING_BYTES = 256 << 20
"""Memory for the blocks that are on their way over one connection. The system provides only the part that is used."""
MOST_SLOTS = 4096
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux: no later mapping can change the content."""


class Staging:
    """Slots of one block each, of the sender."""

    def __init__(self, block_bytes: int, most_bytes: int = STAGING_BYTES) -> None:
        self.block_bytes = block_bytes
        self.slots = max(1, min(MOST_SLOTS, most_bytes // block_bytes))
        self.descriptor, self._memory = memory_file(self.slots * block_bytes)
        self._used = [False] * self.slots

    @property
    def used(self) -> int:
        """Slots that the receiver has not given back."""
        return sum(self._used)

    def take(self, most: int) -> tuple[int, int]:
        """Take the first run of free slots, at most `most`; returns its first slot and their number, which may be 0."""
        if False not in self._used:
            return 0, 0
        start = self._used.index(False)
        end = min(start + most, self.slots)
        if True in self._used[start:end]:
            end = self._used.index(True, start)
        self._used[start:end] = [True] * (end - start)
        return start, end - start

    def give_back(self, start: int, count: int) -> None:
        """Free slots. Raises ValueError for slots that are not in use."""
        if not 0 <= start <= start + count <= self.slots or not all(self._used[start : start + count]):
            raise ValueError(f"slots {start} to {start + count}: not in use")
        self._used[start : start + count] = [False] * count

    def content(self, start: int, count: int) -> memoryview:
        """The memory of slots."""
        return self._memory[start * self.block_bytes : (start + count) * self.block_bytes]

    def close(self) -> None:
        """Close the descriptor; the memory is freed once nothing refers to it."""
        os.close(self.descriptor)


def memory_file(size: int) -> tuple[int, memoryview]:
    """Memory without a name, and its descriptor, with which other processes can read it. The caller closes the descriptor."""
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
    """The memory of another process's `Staging`, in which that process goes on writing. Closes the descriptor.

    Raises ValueError if it is smaller than `size` bytes.
    """
    try:
        if os.fstat(descriptor).st_size < size:
            raise ValueError(f"staging memory: expected {size} bytes, got {os.fstat(descriptor).st_size}")
        # Mapped writable because users need a writable buffer. Writes stay private to this process.
        return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)
