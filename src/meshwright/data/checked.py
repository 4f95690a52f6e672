"""Reads files that another process may truncate or whose disk may fail. If bytes are missing, a read raises Damaged.

With a memory map, such a file would end the process by SIGBUS. The file stays open: if it is renamed or replaced
meanwhile, the reads still see the file that was opened.
"""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from meshwright.spec.errors import Damaged

BLOCK_ENTRIES = 128
"""Numbers of an `Entries` block."""
CACHED_BLOCKS = 256
"""Blocks that an `Entries` keeps in memory."""
DIGEST_PIECE = 8 << 20
"""Bytes that a digest reads at once."""


class CheckedFile:
    """A file of fixed size. Several threads may read it at once, at any offset. `size` is its size in bytes when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Return bytes [offset, offset + count). Raises Damaged with file and offset if the file is shorter or cannot be read."""
        pieces: list[bytes] = []
        end = offset + count
        while offset < end:
            try:
                piece = os.pread(self._descriptor, end - offset, offset)
            except OSError as error:
                raise Damaged(f"{self.path}: offset {offset}: cannot be read: {error.strerror}") from error
            if not piece:
                raise Damaged(
                    f"{self.path}: offset {offset}: expected {end - offset} more bytes, found the end of the file; "
                    f"it had {self.size} bytes when it was opened"
                )
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def digest(self) -> str:
        """Return xxh3_128 of all bytes of the file, in hexadecimal."""
        state = xxhash.xxh3_128()
        for offset in range(0, self.size, DIGEST_PIECE):
            state.update(self.read(offset, min(DIGEST_PIECE, self.size - offset)))
        return state.hexdigest()

    def check_size(self) -> None:
        """Raise Damaged if the size of the file has changed since it was opened."""
        actual = os.fstat(self._descriptor).st_size
        if actual != self.size:
            raise Damaged(f"{self.path}: expected {self.size} bytes as when it was opened, found {actual}")


class Entries:
    """`count` numbers that are stored in a file from byte `offset` on, as a sequence.

    If a single number is read, its block of BLOCK_ENTRIES numbers is read and cached.
    """

    def __init__(self, file: CheckedFile, dtype: np.dtype[Any], offset: int, count: int) -> None:
        self._file = file
        self._dtype = dtype
        self._offset = offset
        self._count = count
        self._block = lru_cache(maxsize=CACHED_BLOCKS)(self._read_block)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(index)
        block, within = divmod(index, BLOCK_ENTRIES)
        return self._block(block)[within]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return entries [start, stop), `(stop - start,)` of the file's type."""
        size = self._dtype.itemsize
        return np.frombuffer(self._file.read(self._offset + start * size, (stop - start) * size), self._dtype)

    def _read_block(self, block: int) -> list[int]:
        first = block * BLOCK_ENTRIES
        return self.read(first, min(first + BLOCK_ENTRIES, self._count)).tolist()
