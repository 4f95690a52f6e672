"""The writer of a checkpoint's files: blocks (16 MiB) are digested and written by several threads. Torch-free.

A file is given as windows, and a window as views of memory that follow each other in the file. A snapshot in host
memory is one window. Live state passes through two buffers, each of which is a window (`checkpoint.write.live_state`).
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
"""Bytes that are digested and then written at a time: few enough to stay in the processor's cache in between."""

Window = Sequence[bytes | memoryview]
"""Consecutive parts of a file, which do not change while they are written."""


def write_file(
    path: Path,
    windows: Iterable[Window],
    threads: int = 1,
    *,
    progress: Callable[[int], None] = lambda count: None,
    inspect: Callable[[int, memoryview], None] = lambda offset, piece: None,
    digested: Callable[[FileRecord], None] = lambda record: None,
) -> FileRecord:
    """Write a new file of consecutive `windows`, durable on return; all but the last have whole blocks.

    While `threads` write a window, the next one is taken from `windows`. When that has come, the threads have ended, and
    the memory of the first may change. `progress` is called with the bytes of each block written. `inspect` is called
    with each piece of data once, between its digest and its write, and with its offset in the file. `digested` is called
    with the record before the file is durable.

    Raises FileExistsError when `path` exists, and OSError with its name for what the storage refuses.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        size = 0
        digests: list[str] = []
        with ThreadPoolExecutor(threads) as pool:
            pending: Iterator[str] = iter(())
            for window in windows:
                digests += pending  # waits for the window before

                def write(start: int, window: Window = window, begin: int = size) -> str:
                    digest = xxhash.xxh3_64()
                    offset = begin + start
                    for piece in _pieces(window, start, start + BLOCK_BYTES):
                        digest.update(piece)  # brings the piece into the processor's cache for what follows
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
    """Bytes `start` to `end` of a window, at most `PIECE_BYTES` at a time and each from one of its parts."""
    begin = 0
    for part in window:
        last = min(end - begin, len(part))
        for offset in range(max(start - begin, 0), last, PIECE_BYTES):
            yield memoryview(part)[offset : min(offset + PIECE_BYTES, last)]
        begin += len(part)


def _write_at(descriptor: int, piece: memoryview, offset: int) -> int:
    """Write all of `piece` to byte `offset`, continuing a short write; returns the offset behind it."""
    while piece:
        count = os.pwrite(descriptor, piece, offset)
        piece = piece[count:]
        offset += count
    return offset
