"""Finds documents that are equal or similar to an earlier document, from the signatures of all units.

Pairs of documents that share a key are compared, in the order of the corpus. A document is removed if an earlier document that stays is
similar enough, so every removed document is similar to one that is kept. Similarity is the exact Jaccard similarity of the sets of all
shingles, not an estimate.

In memory are `KEYS_AT_ONCE` keys of a band, and 8 bytes for each pair that shares a key. Everything else is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from meshwright.data.shingles import distinct
from meshwright.data.signatures import BANDS, EXACT_BAND, LEADING, SignatureSegment, read_keys

KEYS_AT_ONCE = 1 << 22
MOST_DOCUMENTS = 1 << 32
SETS_IN_MEMORY = 256


@dataclass(frozen=True)
class SignedUnit:
    """The signatures of a unit.

    `sets` has the shingles of its documents, `ends` where they end; both are None if only equal texts are found.
    """

    signatures: Path
    sets: Path | None
    ends: Path | None
    documents: int
    segments: tuple[SignatureSegment, ...]


@dataclass(frozen=True)
class Duplicates:
    """Documents to remove, ascending; for each, the kept document to which it is similar, and the similarity (1 for the same text)."""

    documents: np.ndarray
    kept: np.ndarray
    similarity: np.ndarray
    exact: np.ndarray


def find_duplicates(units: Sequence[SignedUnit], similarity: float | None) -> Duplicates:
    """Find duplicates among the documents of all units, which are numbered in order. If `similarity` is None, only equal texts count."""
    starts = np.concatenate([[0], np.cumsum([unit.documents for unit in units], dtype=np.int64)]).astype(np.int64)
    assert starts[-1] < MOST_DOCUMENTS, "a pair of numbers has 64 bits"
    near = similarity is not None
    exact = _pairs(units, starts, near, EXACT_BAND)
    alike = np.zeros(0, np.uint64)
    bands = BANDS if near else 0
    for band in range(bands):
        alike = distinct(np.concatenate([alike, _pairs(units, starts, near, band)]))
    sets = _Sets(units, starts) if near else None
    return _removed(exact, np.setdiff1d(alike, exact), sets, similarity)


def _pairs(units: Sequence[SignedUnit], starts: np.ndarray, near: bool, band: int) -> np.ndarray:
    """The pairs of documents that share a key of a band, each as later document · 2^32 + earlier document, ascending.

    Of documents with the same key, each is paired with the first one and with the one before it.
    """
    found = [np.zeros(0, np.uint64)]
    for first, stop in _key_ranges(int(starts[-1])):
        keys = []
        documents = []
        second = []
        for unit, start in zip(units, starts[:-1].tolist(), strict=True):
            with unit.signatures.open("rb") as file:
                for segment in unit.segments:
                    some = read_keys(file, segment, near, band, first, stop)
                    keys.append(some.keys)
                    documents.append(some.documents + start)
                    second.append(some.keys if some.second is None else some.second)
        if keys:
            found.append(_pairs_of(np.concatenate(keys), np.concatenate(documents), np.concatenate(second)))
    return distinct(np.concatenate(found))


def _key_ranges(documents: int) -> Iterator[tuple[int, int]]:
    """Ranges of the leading byte of keys, such that about `KEYS_AT_ONCE` keys of a band fall into each range."""
    ranges = min(-(-documents // KEYS_AT_ONCE), LEADING) or 1
    bounds = [LEADING * number // ranges for number in range(ranges + 1)]
    yield from pairwise(bounds)


def _pairs_of(keys: np.ndarray, documents: np.ndarray, second: np.ndarray) -> np.ndarray:
    order = np.lexsort((documents, second, keys))
    keys = keys[order]
    second = second[order]
    documents = documents[order].astype(np.uint64)
    same = (keys[1:] == keys[:-1]) & (second[1:] == second[:-1])
    at = np.flatnonzero(same) + 1
    begins = np.concatenate([[True], ~same])
    first = np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))[at] if len(at) else at
    later = documents[at] << np.uint64(32)
    return distinct(np.concatenate([later | documents[first], later | documents[at - 1]]))


def _removed(exact: np.ndarray, alike: np.ndarray, sets: _Sets | None, similarity: float | None) -> Duplicates:
    """Decide which documents to remove, by going through the pairs in the order of their later document."""
    pairs = np.concatenate([exact, alike])
    is_exact = np.arange(len(pairs)) < len(exact)
    order = np.lexsort((pairs & np.uint64(MOST_DOCUMENTS - 1), ~is_exact, pairs >> np.uint64(32)))
    keeper: dict[int, tuple[int, float, bool]] = {}
    for pair, same in zip(pairs[order].tolist(), is_exact[order].tolist(), strict=True):
        later = pair >> 32
        earlier = pair & (MOST_DOCUMENTS - 1)
        if later in keeper:
            continue
        if same:  # if the earlier one was removed, too, both are similar to the document that stays
            keeper[later] = keeper.get(earlier, (earlier, 1.0, True))
        elif earlier not in keeper and sets is not None and similarity is not None:
            found = sets.similarity(earlier, later)
            if found >= similarity:
                keeper[later] = (earlier, found, False)
    documents = sorted(keeper)
    return Duplicates(
        np.array(documents, dtype=np.int64),
        np.array([keeper[number][0] for number in documents], dtype=np.int64),
        np.array([keeper[number][1] for number in documents]),
        np.array([keeper[number][2] for number in documents], dtype=bool),
    )


class _Sets:
    """The sets of shingles of all documents, on disk."""

    def __init__(self, units: Sequence[SignedUnit], starts: np.ndarray) -> None:
        self._units = units
        self._starts = starts
        self._read = lru_cache(maxsize=SETS_IN_MEMORY)(self._from_disk)

    def similarity(self, one: int, other: int) -> float:
        """The Jaccard similarity of two documents."""
        first = self._read(one)
        second = self._read(other)
        shared = len(np.intersect1d(first, second, assume_unique=True))
        return shared / (len(first) + len(second) - shared)

    def _from_disk(self, document: int) -> np.ndarray:
        number = int(np.searchsorted(self._starts, document, side="right")) - 1
        unit = self._units[number]
        within = document - int(self._starts[number])
        assert unit.sets is not None and unit.ends is not None
        with unit.ends.open("rb") as ends:
            ends.seek(8 * max(within - 1, 0))
            bounds = np.frombuffer(ends.read(16 if within else 8), dtype="<u8").tolist()
        start, stop = bounds if within else (0, bounds[0])
        with unit.sets.open("rb") as sets:
            sets.seek(4 * start)
            return np.frombuffer(sets.read(4 * (stop - start)), dtype="<u4")
