"""Checksums that follow a rank's state from the device to its file: sums of 8-byte words.

A rank sums each piece of its state before it copies the piece to the snapshot buffer (`checkpoint.write.source_checksum`).
A GPU computes such sums fast. The writer sums the same piece of the buffer while it writes the piece. Words are
little-endian, and sums are modulo 2^64.

A piece may begin within a word, because its memory on the device does. `phase` is the number of bytes of its first word
that precede the piece; they count as zeros.

This module does not import torch.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshwright.spec.errors import Damaged

WORD_BYTES = 8
_MASK = (1 << 64) - 1


class Checksum(NamedTuple):
    """The phase and the sum of a piece."""

    phase: int
    total: int


def inner_words(phase: int, size: int) -> tuple[int, int]:
    """Return the range [first, last) of the bytes in complete words, for a piece of `size` bytes that begins at `phase`."""
    first = min(-phase % WORD_BYTES, size)
    return first, first + (size - first) // WORD_BYTES * WORD_BYTES


def word_sum(data: memoryview, phase: int) -> int:
    """Return the sum of the words of `data`, whose first byte is byte number `phase` of a word."""
    first, last = inner_words(phase, len(data))
    # The incomplete first word is shifted to its place; the incomplete last word begins its word.
    total = (int.from_bytes(data[:first], "little") << 8 * phase) + int.from_bytes(data[last:], "little")
    if last > first:
        total += int(np.frombuffer(data[first:last], "<u8").sum(dtype=np.uint64))
    return total & _MASK


class BufferChecksums:
    """Compares consecutive pieces of a snapshot buffer with their checksums. Several threads may call `add`."""

    def __init__(self, keys: Sequence[str], sizes: Sequence[int], expected: Sequence[Sequence[int]]) -> None:
        """`keys`, `sizes` (bytes) and `expected` ((phase, sum) each) describe the pieces, in the order of the buffer."""
        self._keys = keys
        self._expected = [Checksum(*pair) for pair in expected]
        self._ends = list(accumulate(sizes))
        self._starts = [end - size for end, size in zip(self._ends, sizes, strict=True)]
        self._sums = [0] * len(self._expected)
        self._lock = threading.Lock()

    def add(self, offset: int, data: memoryview) -> None:
        """Add bytes of the snapshot buffer, which begin at `offset` of its data. Each byte must be added once."""
        index = bisect_right(self._ends, offset)
        while data:
            part = data[: self._ends[index] - offset]
            # Position of the first byte of this part within its word.
            phase = (self._expected[index].phase + offset - self._starts[index]) % WORD_BYTES
            total = word_sum(part, phase)
            with self._lock:
                self._sums[index] += total
            offset = offset + len(part)
            data = data[len(part) :]
            index = index + 1

    def check(self) -> None:
        """Raise Damaged, naming the first piece that differs, unless all sums are as expected."""
        for key, total, expected in zip(self._keys, self._sums, self._expected, strict=True):
            if total & _MASK != expected.total & _MASK:
                raise Damaged(f"{key!r:.80} changed in host memory after it was copied there; its checksum differs")
