"""A stored file as a binary file object, for readers of parquet and of compressed data."""

from __future__ import annotations

import io
from concurrent.futures import Future, ThreadPoolExecutor

from meshwright.data.streams.stores import Store, StoredFile

BLOCK_BYTES = 4 << 20
"""Bytes that a small read fetches; the next as many are fetched at the same time where a file is read in order."""
TAIL_BYTES = 64 << 10
"""Bytes that a read near the end fetches: the footer of most parquet files."""


class ObjectFile(io.RawIOBase):
    """A file of a store, read in blocks: small reads share a block, large ones are requests of their own."""

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
        """Bytes up to `size`, fewer at the end of the file only; all that are left if it is negative."""
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
        """Bytes from `start` on, at least one and at most up to `stop`, if there are any."""
        if start >= stop:
            return b""
        if not self._start <= start < self._start + len(self._block):
            if stop - start >= BLOCK_BYTES:
                return self._store.read(self._file, start, stop)
            self._load(start)
        return self._block[start - self._start : stop - self._start]

    def _load(self, start: int) -> None:
        """Make the block that begins at `start` the current one, and fetch the one behind it if blocks follow each other."""
        in_order = bool(self._block) and start == self._start + len(self._block)
        size = self._file.size
        if size - start <= TAIL_BYTES:
            start = max(size - TAIL_BYTES, 0)
        if self._next is not None and self._next[0] == start:
            self._block = self._next[1].result()
        else:
            self._block = self._store.read(self._file, start, min(start + BLOCK_BYTES, size))
        self._start = start
        self._next = None
        after = start + len(self._block)
        if in_order and after < size:
            self._pool = self._pool or ThreadPoolExecutor(1, "ahead")
            self._next = after, self._pool.submit(self._store.read, self._file, after, min(after + BLOCK_BYTES, size))
