"""Writes a large file from memory by blocks (16 MiB) with several threads, and computes its digests. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from meshwright.checkpoint.format.files import BLOCK_BYTES, FileRecord
from meshwright.durable.writes import sync_open_file

PIECE_BYTES = 1 << 20
"""Bytes that are digested and then written at a time: few enough to stay in the processor's cache in between."""


def write_blocks(
    path: Path,
    parts: Sequence[memoryview],
    threads: int,
    progress: Callable[[int], None] = lambda count: None,
    digested: Callable[[FileRecord], None] = lambda record: None,
    inspect: Callable[[int, int, memoryview], None] = lambda part, offset, piece: None,
) -> FileRecord:
    """Write a new file of consecutive `parts`, durable on return.

    `progress` is called with the bytes of each block written, and `digested` with the record before the file is durable. `inspect` is
    called with each piece of data once, between its digest and its write: with the number of its part, its offset there, and the piece.

    Raises FileExistsError when `path` exists, and OSError with its name for what the storage refuses.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        size = sum(len(part) for part in parts)

        def write(start: int) -> str:
            digest, offset = xxhash.xxh3_64(), start
            for part, position, piece in _range(parts, start, min(start + BLOCK_BYTES, size)):
                digest.update(piece)  # brings the piece into the processor's cache for what follows
                inspect(part, position, piece)
                offset = _write_at(descriptor, piece, offset)
            progress(offset - start)
            return digest.hexdigest()

        with ThreadPoolExecutor(threads + 1) as pool:
            whole = pool.submit(_digest, parts)
            blocks = tuple(pool.map(write, range(0, size, BLOCK_BYTES)))
            record = FileRecord(size, whole.result(), blocks)
        digested(record)
        sync_open_file(descriptor, path)
        return record
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _range(parts: Sequence[memoryview], start: int, end: int) -> Iterator[tuple[int, int, memoryview]]:
    """Bytes `start` to `end` of the concatenated parts, in pieces of at most `PIECE_BYTES`, with part and offset of each."""
    begin = 0
    for number, part in enumerate(parts):
        first, last = max(start - begin, 0), min(end - begin, len(part))
        for offset in range(first, last, PIECE_BYTES):
            yield number, offset, part[offset : min(offset + PIECE_BYTES, last)]
        begin += len(part)


def _write_at(descriptor: int, piece: memoryview, offset: int) -> int:
    """Write all of `piece` to byte `offset`, continuing a short write; returns the offset behind it."""
    while piece:
        count = os.pwrite(descriptor, piece, offset)
        piece, offset = piece[count:], offset + count
    return offset


def _digest(parts: Sequence[memoryview]) -> str:
    """The xxh3_128 digest of all parts, updated block by block so that other threads can run in between."""
    digest = xxhash.xxh3_128()
    for part in parts:
        for start in range(0, len(part), BLOCK_BYTES):
            digest.update(part[start : start + BLOCK_BYTES])
    return digest.hexdigest()
