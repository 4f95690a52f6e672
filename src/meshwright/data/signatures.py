"""Signatures of documents, by which duplicates are found without a comparison of all pairs.

The method is MinHash (Broder 1997). A document is the set of its shingles. For each of 140 random permutations of all shingles, the
signature has the least permuted value in the document. Two documents agree in one such value with a probability equal to their Jaccard
similarity.

The 140 values are grouped into 20 bands of 7 values, and each band is hashed to a key. Documents with a common key are compared. Two
documents of similarity 0.8 have a common key with probability 0.99, and of similarity 0.5 with probability 0.15 (Leskovec, Rajaraman and
Ullman, Mining of Massive Datasets, chapter 3).

A file of signatures consists of segments, and a segment of bands. The layout of one band in one segment:

    257 × uint32      index of the first key with leading byte 0, 1, …, 255, then the number of keys
    keys × uint64     the keys, ascending
    keys × uint32     the document of each key
    keys × uint64     only in the last band, which finds equal texts: the second half of each digest

The last band has as keys the first halves of 128-bit digests of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import BinaryIO

import numpy as np
import xxhash

from meshwright.data.shingles import distinct, joined_words, shingles, word_hashes

WORDS = 5
"""Words in a shingle."""
BANDS = 20
ROWS = 7
"""MinHash values in a band."""
EXACT_BAND = BANDS
"""Number of the band that finds equal texts."""
LEADING = 256
"""Values of a key's leading byte."""
BLOCK_CHARACTERS = 1 << 18
"""Characters of text that are signed in one pass, so few that their shingles stay in the processor's cache."""
SEGMENT_DOCUMENTS = 1 << 17
"""Documents in a segment, at most."""
SEED = 20


@dataclass(frozen=True)
class SignatureSegment:
    """A segment of a file of signatures."""

    offset: int
    """First byte in the file."""
    documents: int
    with_words: int
    """Documents that have at least one word. Only these have MinHash keys."""
    first: int
    """Number of the segment's first document in its unit."""


@dataclass(frozen=True)
class BandKeys:
    """Keys of a band in ascending order, with the document of each key. Documents are numbered in their unit, from 0."""

    keys: np.ndarray
    documents: np.ndarray
    second: np.ndarray | None
    """In the band of equal texts, the second half of each digest; else None."""


class SignatureWriter:
    """Writes the signatures of documents into the file `signatures`.

    If the file `sets` is given, near-duplicates are wanted too: the sorted shingles of each document are written to it. After `finish`,
    `segments` are complete, and so are `ends`: the index of the end of each document's shingles in `sets`.
    """

    def __init__(self, signatures: BinaryIO, sets: BinaryIO | None) -> None:
        self._signatures = signatures
        self._sets = sets
        self.segments: list[SignatureSegment] = []
        self.ends: list[int] = []
        self._texts: list[str] = []
        self._size = 0
        self._minima: list[np.ndarray] = []
        self._with_words: list[int] = []
        self._digests: list[bytes] = []
        self._first = 0

    def add(self, text: str) -> None:
        """Add the signature of the next document."""
        self._digests.append(xxhash.xxh3_128_digest(text.encode("utf-8")))
        if self._sets is not None:
            self._texts.append(text)
            self._size += len(text)
            if self._size >= BLOCK_CHARACTERS:
                self._sign(self._sets)
        if len(self._digests) == SEGMENT_DOCUMENTS:
            self._finish_segment()

    def finish(self) -> None:
        """Write the last segment."""
        if self._digests:
            self._finish_segment()

    def _sign(self, sets: BinaryIO) -> None:
        """Compute the MinHash values of the collected texts, and write their shingles."""
        if not self._texts:
            return
        values, starts = shingle_sets(self._texts)
        sets.write(values.astype("<u4").tobytes())
        end = self.ends[-1] if self.ends else 0
        self.ends += (starts[1:] + end).tolist()
        filled = np.flatnonzero(np.diff(starts))
        if len(filled):
            self._minima.append(minima(values, starts[filled]))
        done = len(self.ends) - len(self._texts) - self._first
        self._with_words += (filled + done).tolist()
        self._texts = []
        self._size = 0

    def _finish_segment(self) -> None:
        """Write the bands of the collected documents as a segment."""
        if self._sets is not None:
            self._sign(self._sets)
        segment = SignatureSegment(self._signatures.tell(), len(self._digests), len(self._with_words), self._first)
        if self._sets is not None:
            documents = np.array(self._with_words, dtype=np.uint32)
            keys = band_keys(np.concatenate(self._minima)) if self._minima else np.zeros((BANDS, 0), np.uint64)
            for of_band in keys:
                self._write_band(of_band, documents)
        halves = np.frombuffer(b"".join(self._digests), dtype="<u8").reshape(-1, 2)
        order = self._write_band(halves[:, 0], np.arange(len(halves), dtype=np.uint32))
        self._signatures.write(halves[order, 1].tobytes())
        self.segments.append(segment)
        self._first += len(self._digests)
        self._digests = []
        self._minima = []
        self._with_words = []

    def _write_band(self, keys: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Write a band, sorted by its keys. Returns the order: index of each written key in `keys`."""
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        leading = np.searchsorted(ordered >> np.uint64(56), np.arange(LEADING + 1, dtype=np.uint64))
        self._signatures.write(leading.astype("<u4").tobytes())
        self._signatures.write(ordered.astype("<u8").tobytes())
        self._signatures.write(documents[order].astype("<u4").tobytes())
        return order


def read_keys(file: BinaryIO, segment: SignatureSegment, near: bool, band: int, first: int, stop: int) -> BandKeys:
    """Read the keys of a band whose leading byte is in [first, stop). `near` says whether the file has bands for near-duplicates."""
    exact = band == EXACT_BAND
    count = segment.documents if exact else segment.with_words
    of_near = 4 * (LEADING + 1) + 12 * segment.with_words
    offset = segment.offset + (of_near * band if near else 0)
    leading = _read(file, offset, "<u4", 0, LEADING + 1)
    low = int(leading[first])
    high = int(leading[stop])
    keys_at = offset + 4 * (LEADING + 1)
    documents_at = keys_at + 8 * count
    keys = _read(file, keys_at, "<u8", low, high)
    documents = _read(file, documents_at, "<u4", low, high).astype(np.int64) + segment.first
    return BandKeys(keys, documents, _read(file, documents_at + 4 * count, "<u8", low, high) if exact else None)


def shingle_sets(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct shingles of each text, ascending, uint32, and the index of each text's first shingle.

    A text of 1 to 4 words is one shingle. The upper half of the 64-bit hash of a shingle is used.
    """
    hashes, starts = word_hashes(texts)
    runs, run_starts = shingles(hashes, starts, WORDS)
    values = (runs >> np.uint64(32)).astype(np.uint64)
    owners = np.repeat(np.arange(len(texts), dtype=np.uint64), np.diff(run_starts))
    short = [
        (number, joined_words(hashes[start:stop]) >> 32)
        for number, (start, stop) in enumerate(pairwise(starts.tolist()))
        if 0 < stop - start < WORDS
    ]
    if short:
        owners = np.concatenate([owners, np.array([number for number, _ in short], dtype=np.uint64)])
        values = np.concatenate([values, np.array([value for _, value in short], dtype=np.uint64)])
    different = distinct((owners << np.uint64(32)) | values)
    bounds = np.arange(len(texts) + 1, dtype=np.uint64) << np.uint64(32)
    return different.astype(np.uint32), np.searchsorted(different, bounds)


def minima(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The least value of each permutation in each document, `(documents, BANDS * ROWS)` uint32.

    `values` has the shingles of all documents, and `starts` the index of each document's first shingle. No document may be empty.
    """
    factors, offsets = _permutations()
    least = np.empty((len(starts), BANDS * ROWS), dtype=np.uint32)
    permuted = np.empty_like(values)
    for number, (factor, offset) in enumerate(zip(factors, offsets, strict=True)):
        np.multiply(values, factor, out=permuted)
        permuted += offset
        np.minimum.reduceat(permuted, starts, out=least[:, number])
    return least


def band_keys(least: np.ndarray) -> np.ndarray:
    """The key of each band and document, `(BANDS, documents)` uint64: a hash of the band's seven values in `least`."""
    banded = least.reshape(len(least), BANDS, ROWS).astype(np.uint64)
    return np.stack(
        [
            shingles(banded[:, band].reshape(-1), np.arange(len(least) + 1) * ROWS, ROWS)[0]
            if len(least)
            else np.zeros(0, np.uint64)
            for band in range(BANDS)
        ]
    )


@lru_cache(maxsize=1)
def _permutations() -> tuple[np.ndarray, np.ndarray]:
    """The factor (odd) and the offset of each permutation x → x · factor + offset modulo 2^32, `(BANDS * ROWS,)` uint32 each."""
    random = np.random.Generator(np.random.PCG64(SEED))
    factors = random.integers(0, 2**31, BANDS * ROWS, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, random.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32)


def _read(file: BinaryIO, offset: int, dtype: str, start: int, stop: int) -> np.ndarray:
    """Values [start, stop) of the array that begins at byte `offset`."""
    size = np.dtype(dtype).itemsize
    file.seek(offset + size * start)
    return np.frombuffer(file.read(size * (stop - start)), dtype=dtype)
