"""Writes a checkpoint's file: several threads digest and write its blocks (16 MiB).

A file is given as windows. A window is a sequence of memory views that follow each other in the file. A snapshot in host
memory is one window. State that is copied from a device passes through two buffers; each time a buffer is full, it is
a window (`checkpoint.write.live_state`).

This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from meshwright.checkpoint.format.files import BLOCK_BYTES, FileRecord
from meshwright.durable.writes import sync_open_file

PIECE_BYTES = 1 << 20
"""Bytes that are digested and then written at a time. They stay in the processor's cache in between."""

Window = Sequence[bytes | memoryview]
"""Consecutive parts of a file. They must not change while they are written."""


def write_file(
    path: Path,
    windows: Iterable[Window],
    threads: int = 1,
    *,
    progress: Callable[[int], None] = lambda count: None,
    inspect: Callable[[int, memoryview], None] = lambda offset, piece: None,
    digested: Callable[[FileRecord], None] = lambda record: None,
) -> FileRecord:
    """Write a new file that consists of `windows`. On return it is durable. Return its record.

    All windows but the last consist of whole blocks. While `threads` threads write a window, the next one is requested
    from `windows`. The threads have ended when the one after it is requested, so that the memory of the first may then
    change.

    `progress(count)` is called after each block with the number of bytes written.
    `inspect(offset, piece)` is called with each piece of data once, between its digest and its write.
    `digested(record)` is called before the file is durable.

    Raises FileExistsError if `path` exists, and OSError with this file's name if the storage fails.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        size = 0
        digests: list[str] = []
        with ThreadPoolExecutor(threads) as pool:
            pending: Iterator[str] = iter(())
            for window in windows:
                digests += pending  # waits until the previous window is written

                def write(start: int, window: Window = window, begin: int = size) -> str:
                    digest = xxhash.xxh3_64()
                    offset = begin + start
                    for piece in _pieces(window, start, start + BLOCK_BYTES):
                        digest.update(piece)  # this brings the piece into the processor's cache
                        inspect(offset, piece)
                        offset = _write_at(descriptor, piece, offset)
                    progress(offset - begin - start)
                    return digest.hexdigest()

                assert size % BLOCK_BYTES == 0, "only the last window ends within a block"
                window_bytes = sum(map(len, window))
                pending = pool.map(write, range(0, window_bytes, BLOCK_BYTES))
                size += window_bytes
            digests += pending
        record = FileRecord(size, tuple(digests))
        digested(record)
        sync_open_file(descriptor, path)
        return record
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _pieces(window: Window, start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes `start` to `end` of a window, at most `PIECE_BYTES` at a time, each from one of its parts."""
    begin = 0
    for part in window:
        last = min(end - begin, len(part))
        for offset in range(max(start - begin, 0), last, PIECE_BYTES):
            yield memoryview(part)[offset : min(offset + PIECE_BYTES, last)]
        begin += len(part)


def _write_at(descriptor: int, piece: memoryview, offset: int) -> int:
    """Write all of `piece` at byte `offset`, repeating after a short write. Return the offset after it."""
    while piece:
        count = os.pwrite(descriptor, piece, offset)
        piece = piece[count:]
        offset += count
    return offset
