"""The last steps of a preparation: turns the results of all units into one ordered stream of documents, without duplicates.

A unit is a group of input files, or a part of a large one, that one worker reads and encodes (`data.jobs`). The writers
of shards consume the stream.
"""

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
"""Reason of a removal: the text equals the text of an earlier document."""
NEAR_DUPLICATE = "near-duplicate"
"""Reason of a removal: the text is similar to the text of an earlier document."""


class UnitPlace(NamedTuple):
    """Where the result of a unit is stored: the folder of the unit's job, and the unit's number in that job."""

    folder: Path
    number: int


Numbered = tuple[str, int, EncodedDocument]
"""An item of the stream: the document's split (`train` or `held_out`), its number in the stream, and its tokens.

Documents are numbered from 0 after duplicates are removed.
"""


class ChunkStream:
    """The documents of `units`, in the order of the units.

    - `run(numbers)` does the units with these numbers and yields each number once its unit is done. If `run` is None,
      the results of all units must exist already.
    - `duplicates`: whether to remove documents whose text equals the text of an earlier one. The stream then waits for
      all units before it yields the first document.
    - `similarity`: also remove documents whose Jaccard similarity to an earlier document is at least this value. None:
      only equal texts.
    - `folder`: where the list of duplicates is kept, so that a second attempt does not compute it again.
    - `total_bytes`: bytes of all inputs, for the progress bar, which appears if `shown` is true.

    The attributes `left_out`, `removed` and `digests` are complete once `documents` has yielded its last item.
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
        """Yield the documents that are not yet in a finished shard of `writers`.

        `split_of` gives the split of a document from its key; `writers` has one writer for each split. If this stream
        runs its own units (`run` is not None), it deletes a unit's files once all documents of the unit are in finished
        shards.
        """
        finished = self._finished()
        gone = self._find_duplicates(finished) if self._duplicates else np.zeros(0, np.int64)
        written: deque[tuple[UnitPlace, int]] = deque()
        """Units whose documents were all yielded, each with the number of its last document."""
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
        """Start the units that have no result yet, and return the iterator of their numbers. Without `run` the iterator is empty."""
        undone = [place.number for at, place in enumerate(self._units) if self._record(at) is None]
        return iter(()) if self._run is None else self._run(undone)

    def _record(self, at: int) -> ChunkRecord | None:
        if at not in self._records and (record := read_record(*self._units[at])) is not None:
            self._records[at] = record
        return self._records.get(at)

    def _wait(self, at: int, finished: Iterator[int]) -> ChunkRecord:
        """Wait until a unit is done and return its record. Raises Damaged if no unit is left to wait for."""
        while (record := self._record(at)) is None:
            if next(finished, None) is None:
                place = self._units[at]
                raise Damaged(f"{place.folder}: the result of unit {place.number} is missing; prepare it again")
        return record

    def _do_again(self, place: UnitPlace) -> None:
        """Do a unit again because its documents are missing, although not all of them are in finished shards."""
        if self._run is None:
            raise Damaged(f"{place.folder}: files of unit {place.number} are missing; prepare this part again")
        for _ in self._run([place.number]):
            pass

    def _find_duplicates(self, finished: Iterator[int]) -> np.ndarray:
        """Return the numbers of all duplicates, ascending, int64, and count them in `removed`.

        These numbers count the documents of all units, including the duplicates.
        """
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
        """Wait for all units and return their records, with a progress bar."""
        records: list[ChunkRecord] = []
        with progress("reading and encoding", self._total_bytes, self._shown) as report:
            for at in range(len(self._units)):
                records.append(self._wait(at, finished))
                report(*totals(records))
        return records

    def _described(self, duplicates: Duplicates, records: Sequence[ChunkRecord]) -> Removed:
        """Count the duplicates by reason. The first duplicates of each reason are described as examples."""
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
    """Return sums over units: bytes of input read, documents, and tokens."""
    counts = [(record.size, record.documents, record.tokens) for record in records]
    size, documents, tokens = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return size, documents, tokens


def _without(documents: Iterator[EncodedDocument], numbers: np.ndarray) -> Iterator[EncodedDocument]:
    """Return the documents except those at the positions `numbers`, which count from 0."""
    left_out = set(numbers.tolist())
    return (each for number, each in enumerate(documents) if number not in left_out)


def _only(documents: Iterator[EncodedDocument], numbers: np.ndarray) -> Iterator[EncodedDocument]:
    """Return the documents at the positions `numbers` only, which count from 0."""
    wanted = set(numbers.tolist())
    return (each for number, each in enumerate(documents) if number in wanted)


def _done(writers: Mapping[str, SplitWriter]) -> int:
    """Return the number of a document such that this document and all before it are in finished shards.

    Each split has its own number, so this is the least one. -1 means that no shard is finished.
    """
    return min(writer.done_through for writer in writers.values())
