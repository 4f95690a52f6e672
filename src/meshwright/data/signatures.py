"""Signatures of documents, by which duplicates are found without comparing every pair.

MinHash (Broder 1997): of 140 permutations of all shingles, the least value in a document. Two documents agree in one of these with the
probability of their Jaccard similarity. Twenty bands of seven values each are hashed to a key; two documents of similarity 0.8 share a key
with 0.99, of 0.5 with 0.15 (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3).

A file of signatures has segments one after another. A segment has for each band where the keys of each leading byte begin (257 × uint32),
its keys in ascending order (uint64), and the number of the document of each (uint32). The last band has the exact texts: keys are the
first half of a 128-bit digest; the second halves (uint64) follow.
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
"""Words of a shingle."""
BANDS = 20
ROWS = 7
EXACT_BAND = BANDS
LEADING = 256
BLOCK_CHARACTERS = 1 << 18
"""Text that is signed at once: its shingles stay in the processor's cache."""
SEGMENT_DOCUMENTS = 1 << 17
SEED = 20


@dataclass(frozen=True)
class SignatureSegment:
    """A segment of a file of signatures: its offset in bytes, its documents, how many of them have words, its first document's number."""

    offset: int
    documents: int
    with_words: int
    first: int


@dataclass(frozen=True)
class BandKeys:
    """Some keys of a band, ascending, with the documents that have them, numbered from the first of the unit."""

    keys: np.ndarray
    documents: np.ndarray
    second: np.ndarray | None
    """Of exact texts, the second halves of their digests."""


class SignatureWriter:
    """Writes the signatures of documents into `signatures`, and with `near` their sorted shingles into `sets`.

    `segments` and `ends` are complete after `finish`; `ends` are the ends of each document's shingles, in shingles.
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
        """Sign the next document."""
        self._digests.append(xxhash.xxh3_128_digest(text.encode("utf-8")))
        if self._sets is not None:
            self._texts.append(text)
            self._size += len(text)
            if self._size >= BLOCK_CHARACTERS:
                self._sign(self._sets)
        if len(self._digests) == SEGMENT_DOCUMENTS:
            self._finish_segment()

    def finish(self) -> None:
        """Write what is left."""
        if self._digests:
            self._finish_segment()

    def _sign(self, sets: BinaryIO) -> None:
        """Compute the minima of the texts of a block, and write their shingles."""
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
        """Write the keys of a band in ascending order, which is returned."""
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        leading = np.searchsorted(ordered >> np.uint64(56), np.arange(LEADING + 1, dtype=np.uint64))
        self._signatures.write(leading.astype("<u4").tobytes())
        self._signatures.write(ordered.astype("<u8").tobytes())
        self._signatures.write(documents[order].astype("<u4").tobytes())
        return order


def read_keys(file: BinaryIO, segment: SignatureSegment, near: bool, band: int, first: int, stop: int) -> BandKeys:
    """The keys of a band whose leading byte is in [first, stop). Without `near` there is only the band of exact texts."""
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
    """The different shingles of each text, ascending uint32, and the first of each text. A text of fewer words is one shingle."""
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
    """The least value of each permutation in each document, `(documents, BANDS * ROWS)` uint32; `starts` are those of documents."""
    factors, offsets = _permutations()
    least = np.empty((len(starts), BANDS * ROWS), dtype=np.uint32)
    permuted = np.empty_like(values)
    for number, (factor, offset) in enumerate(zip(factors, offsets, strict=True)):
        np.multiply(values, factor, out=permuted)
        permuted += offset
        np.minimum.reduceat(permuted, starts, out=least[:, number])
    return least


def band_keys(least: np.ndarray) -> np.ndarray:
    """The key of each band of each document, `(BANDS, documents)` uint64."""
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
    """Odd factors and offsets: x · factor + offset modulo 2^32 is a permutation."""
    random = np.random.Generator(np.random.PCG64(SEED))
    factors = random.integers(0, 2**31, BANDS * ROWS, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, random.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32)


def _read(file: BinaryIO, offset: int, dtype: str, start: int, stop: int) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    file.seek(offset + size * start)
    return np.frombuffer(file.read(size * (stop - start)), dtype=dtype)
