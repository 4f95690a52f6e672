"""Finds documents that contain text of evaluations.

A document counts as such if it shares 13 words in a row with an evaluation. This is the method of GPT-3 (Brown et al.
2020, appendix C).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.data.corpus import CorpusDocument, read_documents
from meshwright.data.inputs import InputFile, list_inputs
from meshwright.data.records import all_fields
from meshwright.data.shingles import distinct, shingles, word_hashes
from meshwright.spec.errors import BadInput

WORDS = 13
"""Number of words in a row that a document and an evaluation must share."""
TEXTS_AT_ONCE = 1000
"""Texts of an evaluation file that are hashed at once."""


class EvaluationTexts:
    """The sequences of 13 words of evaluation files. From a file of records, every text in every record counts."""

    def __init__(self, names: Sequence[str]) -> None:
        """Read the files. Raises BadInput if a file has no text of at least 13 words."""
        files = list_inputs(names).files
        self._names = [file.name for file in files]
        found = []
        sources = []
        for number, file in enumerate(files):
            of_file = distinct(np.concatenate([np.zeros(0, np.uint64), *_runs(file)]))
            if not len(of_file):
                raise BadInput(
                    f"--evaluation {file.name}: has no text of {WORDS} words or more, which the check compares"
                )
            found.append(of_file)
            sources.append(np.full(len(of_file), number))
        runs = np.concatenate(found)
        owners = np.concatenate(sources)
        order = np.argsort(runs, kind="stable")
        self._runs = runs[order]
        self._owners = owners[order]

    def found_in(self, text: str) -> str | None:
        """Search a text for words of an evaluation. Returns a description for people (which file, from which word on), or None."""
        runs, _ = shingles(*word_hashes([text]), WORDS)
        at = np.searchsorted(self._runs, runs)
        at[at == len(self._runs)] = 0
        hits = np.flatnonzero(self._runs[at] == runs)
        if not len(hits):
            return None
        return f"{WORDS} words of {self._names[self._owners[at[hits[0]]]]}, from word {hits[0] + 1} on"


def _runs(file: InputFile) -> Iterator[np.ndarray]:
    """Yield the hashes of all sequences of 13 words in a file, as arrays of uint64."""
    texts: list[str] = []
    for text in _texts(file):
        texts.append(text)
        if len(texts) == TEXTS_AT_ONCE:
            yield shingles(*word_hashes(texts), WORDS)[0]
            texts = []
    yield shingles(*word_hashes(texts), WORDS)[0]


def _texts(file: InputFile) -> Iterator[str]:
    """Yield the texts of an evaluation file."""
    if file.format.layout == "text":
        for item in read_documents(file, "text"):
            if isinstance(item, CorpusDocument):
                yield item.text
        return
    for record in all_fields(file):
        yield from _strings(record)


def _strings(value: Any) -> Iterator[str]:
    """Yield every text inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
