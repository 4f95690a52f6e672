"""Presents a file of a store as a binary file object, for the parquet reader and for decompressors."""

from __future__ import annotations

import io
from concurrent.futures import Future, ThreadPoolExecutor

from meshwright.data.streams.stores import Store, StoredFile

BLOCK_BYTES = 4 << 20
"""Bytes that one fetch gets for a small read. If the file is read in order, the next block of this size is fetched at the same time."""
TAIL_BYTES = 64 << 10
"""Bytes that a read near the end of the file fetches. They contain the footer of most parquet files."""


class ObjectFile(io.RawIOBase):
    """A file of a store, opened for reading. Small reads share a cached block; a large read is a request of its own."""

    def __init__(self, store: Store, file: StoredFile) -> None:
        self._store = store
        self._file = file
        self._at = 0
        self._start = 0
        self._block = b""
        self._next: tuple[int, Future[bytes]] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # pyrefly: ignore[bad-override]
        piece = self._piece(self._at, min(self._at + len(buffer), self._file.size))
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, or all remaining bytes if `size` is negative. Fewer bytes come back only at the end of the file."""
        stop = self._file.size if size is None or size < 0 else min(self._at + size, self._file.size)
        pieces = []
        while self._at < stop:
            pieces.append(self._piece(self._at, stop))
            self._at += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        super().close()

    def _piece(self, start: int, stop: int) -> bytes:
        """Return some of the bytes [start, stop), at least one. Empty if `start` is not before `stop`."""
        if start >= stop:
            return b""
        if not self._start <= start < self._start + len(self._block):
            if stop - start >= BLOCK_BYTES:
                return self._store.read(self._file, start, stop)
            self._load(start)
        return self._block[start - self._start : stop - self._start]

    def _load(self, start: int) -> None:
        """Fetch the block that contains `start`, and make it the current block.

        If this block follows the previous one, the file is read in order, and a thread begins to fetch the next block.
        """
        in_order = bool(self._block) and start == self._start + len(self._block)
        size = self._file.size
        if self._next is not None and self._next[0] == start:
            self._block = self._next[1].result()
        else:
            if size - start <= TAIL_BYTES:
                start = max(size - TAIL_BYTES, 0)
            self._block = self._store.read(self._file, start, min(start + BLOCK_BYTES, size))
        self._start = start
        self._next = None
        after = start + len(self._block)
        if in_order and after < size:
            self._pool = self._pool or ThreadPoolExecutor(1, "ahead")
            self._next = after, self._pool.submit(self._store.read, self._file, after, min(after + BLOCK_BYTES, size))
