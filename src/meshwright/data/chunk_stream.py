"""The last steps of a preparation: the results of units in order, without duplicates, as one stream of documents for shards."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from meshwright.data.chunks import (
    ChunkRecord,
    has_documents,
    read_chunk,
    read_record,
    remove_documents,
    remove_signatures,
    signed_unit,
)
from meshwright.data.duplicates import Duplicates, find_duplicates
from meshwright.data.encode import EncodedDocument
from meshwright.data.left_out import LeftOut
from meshwright.data.progress import progress
from meshwright.data.removed import SHOWN, Removed
from meshwright.data.shards import SplitWriter
from meshwright.durable.writes import sync_file, write_durable
from meshwright.spec.errors import Damaged
from meshwright.spec.folder_files import parse_json

EXACT_DUPLICATE = "exact duplicate"
NEAR_DUPLICATE = "near-duplicate"


class UnitPlace(NamedTuple):
    """A unit of work: the folder of its job, and its number there."""

    folder: Path
    number: int


Numbered = tuple[str, int, EncodedDocument]
"""The split of a document, its number in the corpus, and its tokens."""


class ChunkStream:
    """The documents of `units`, in order; `left_out`, `removed` and `digests` are complete once `documents` is done.

    `run` does units and yields the number of each that is done; with None the results of all units must be there already. With `duplicates`
    this stream waits for all units and leaves out exact duplicates, and near-duplicates of at least `similarity` unless it is None. The
    duplicates that were found stay in `folder`.
    """

    def __init__(
        self,
        units: Sequence[UnitPlace],
        dtype: str,
        tokenizer: Tokenizer,
        folder: Path,
        *,
        run: Callable[[Sequence[int]], Iterator[int]] | None = None,
        duplicates: bool = False,
        similarity: float | None = None,
        total_bytes: int = 0,
        shown: bool = False,
    ) -> None:
        self._units = units
        self._dtype = dtype
        self._tokenizer = tokenizer
        self._folder = folder
        self._run = run
        self._duplicates = duplicates
        self._similarity = similarity
        self._total_bytes = total_bytes
        self._shown = shown
        self._records: dict[int, ChunkRecord] = {}
        self.left_out = LeftOut()
        self.removed = Removed()
        self.digests: dict[str, str] = {}

    def documents(self, split_of: Callable[[str], str], writers: Mapping[str, SplitWriter]) -> Iterator[Numbered]:
        """The documents that are not in a finished shard of `writers`.

        A stream that runs its units removes the files of a unit once all its documents are in finished shards.
        """
        finished = self._finished()
        gone = self._find_duplicates(finished) if self._duplicates else np.zeros(0, np.int64)
        written: deque[tuple[UnitPlace, int]] = deque()
        """Units with the number of their last document."""
        number = origin = 0
        for at, place in enumerate(self._units):
            record = self._wait(at, finished)
            within = gone[np.searchsorted(gone, origin) : np.searchsorted(gone, origin + record.documents)] - origin
            end = number + record.documents - len(within)
            if end - 1 > _done(writers):
                if not has_documents(*place, record):
                    self._do_again(place)
                for encoded in _without(read_chunk(*place, self._dtype), within):
                    split = split_of(encoded.document.key)
                    if number > writers[split].done_through:
                        yield split, number, encoded
                    number += 1
            number = end
            origin = origin + record.documents
            written.append((place, end - 1))
            while self._run is not None and written and written[0][1] <= _done(writers):
                remove_documents(*written.popleft()[0])
            self.left_out.merge(record.left_out)
            self.removed.merge(record.removed)
            self.digests.update(record.digests)

    def _finished(self) -> Iterator[int]:
        """Do the units that are not done."""
        undone = [place.number for at, place in enumerate(self._units) if self._record(at) is None]
        return iter(()) if self._run is None else self._run(undone)

    def _record(self, at: int) -> ChunkRecord | None:
        if at not in self._records and (record := read_record(*self._units[at])) is not None:
            self._records[at] = record
        return self._records.get(at)

    def _wait(self, at: int, finished: Iterator[int]) -> ChunkRecord:
        """The record of a unit, once it is done."""
        while (record := self._record(at)) is None:
            if next(finished, None) is None:
                place = self._units[at]
                raise Damaged(f"{place.folder}: the result of unit {place.number} is missing; prepare it again")
        return record

    def _do_again(self, place: UnitPlace) -> None:
        """Do a unit whose documents are missing, though they are in no finished shard."""
        if self._run is None:
            raise Damaged(f"{place.folder}: files of unit {place.number} are missing; prepare this part again")
        for _ in self._run([place.number]):
            pass

    def _find_duplicates(self, finished: Iterator[int]) -> np.ndarray:
        """The numbers of all duplicates, before any document was removed, ascending; they are counted in `removed`."""
        found = self._folder / "duplicates.npy"
        report = self._folder / "duplicates.json"
        if not report.is_file():
            records = self._do_all(finished)
            places = zip(self._units, records, strict=True)
            duplicates = find_duplicates([signed_unit(*place, record) for place, record in places], self._similarity)
            self._folder.mkdir(exist_ok=True)
            np.save(found, duplicates.documents)
            sync_file(found)
            write_durable(report, json.dumps(self._described(duplicates, records).reasons).encode())
        if self._run is not None:
            for place in self._units:
                remove_signatures(*place)
        self.removed.merge(Removed(parse_json(report.read_bytes(), report, own=True)))
        return np.load(found, allow_pickle=False)

    def _do_all(self, finished: Iterator[int]) -> list[ChunkRecord]:
        """The records of all units, once they are done."""
        records: list[ChunkRecord] = []
        with progress("reading and encoding", self._total_bytes, self._shown) as report:
            for at in range(len(self._units)):
                records.append(self._wait(at, finished))
                report(*totals(records))
        return records

    def _described(self, duplicates: Duplicates, records: Sequence[ChunkRecord]) -> Removed:
        """The duplicates by reason, the first of each as examples."""
        removed = Removed()
        origins = np.cumsum([0, *(record.documents for record in records)])

        def document_of(number: int) -> EncodedDocument:
            at = int(np.searchsorted(origins, number, side="right")) - 1
            documents = read_chunk(*self._units[at], self._dtype)
            return next(islice(documents, number - int(origins[at]), None))

        for at, place in enumerate(self._units):
            rows = range(*np.searchsorted(duplicates.documents, origins[at : at + 2]).tolist())
            if not rows:
                continue
            encoded = list(
                _only(read_chunk(*place, self._dtype), duplicates.documents[rows.start : rows.stop] - origins[at])
            )
            for row, each in zip(rows, encoded, strict=True):
                reason = EXACT_DUPLICATE if duplicates.exact[row] else NEAR_DUPLICATE
                why = text = ""
                if removed.shows(reason):
                    kept = document_of(int(duplicates.kept[row])).document
                    alike = "" if duplicates.exact[row] else f", similarity {duplicates.similarity[row]:.2f}"
                    why = f"of {kept.file} [{kept.id}]{alike}"
                    text = self._tokenizer.decode(each.tokens[:SHOWN].tolist(), skip_special_tokens=True)
                removed.add(reason, f"{each.document.file} [{each.document.id}]", why, text, each.text_bytes)
        return removed


def totals(records: Iterable[ChunkRecord]) -> tuple[int, int, int]:
    """Bytes read, documents and tokens of units."""
    counts = [(record.size, record.documents, record.tokens) for record in records]
    size, documents, tokens = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return size, documents, tokens


def _without(documents: Iterator[EncodedDocument], numbers: np.ndarray) -> Iterator[EncodedDocument]:
    """The documents but for those of the ascending `numbers`."""
    left_out = set(numbers.tolist())
    return (each for number, each in enumerate(documents) if number not in left_out)


def _only(documents: Iterator[EncodedDocument], numbers: np.ndarray) -> Iterator[EncodedDocument]:
    """The documents of the ascending `numbers`."""
    wanted = set(numbers.tolist())
    return (each for number, each in enumerate(documents) if number in wanted)


def _done(writers: Mapping[str, SplitWriter]) -> int:
    """The number up to which all documents are in finished shards."""
    return min(writer.done_through for writer in writers.values())
