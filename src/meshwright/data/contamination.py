"""Finds text of evaluations in documents: a run of 13 words that both have, as for GPT-3 (Brown et al. 2020, appendix C)."""

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
"""Words that a document and an evaluation have to share in a row."""
TEXTS_AT_ONCE = 1000


class EvaluationTexts:
    """The runs of words of evaluation files: of text files their text, of records every text in them."""

    def __init__(self, names: Sequence[str]) -> None:
        """Raises BadInput for files that have no text of enough words."""
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
        """The evaluation file with which a text shares a run of words, in words; None if there is none."""
        runs, _ = shingles(*word_hashes([text]), WORDS)
        at = np.searchsorted(self._runs, runs)
        at[at == len(self._runs)] = 0
        hits = np.flatnonzero(self._runs[at] == runs)
        if not len(hits):
            return None
        return f"{WORDS} words of {self._names[self._owners[at[hits[0]]]]}, from word {hits[0] + 1} on"


def _runs(file: InputFile) -> Iterator[np.ndarray]:
    """The hashes of the runs of words of a file."""
    texts: list[str] = []
    for text in _texts(file):
        texts.append(text)
        if len(texts) == TEXTS_AT_ONCE:
            yield shingles(*word_hashes(texts), WORDS)[0]
            texts = []
    yield shingles(*word_hashes(texts), WORDS)[0]


def _texts(file: InputFile) -> Iterator[str]:
    if file.format.layout == "text":
        for item in read_documents(file, "text"):
            if isinstance(item, CorpusDocument):
                yield item.text
        return
    for record in all_fields(file):
        yield from _strings(record)


def _strings(value: Any) -> Iterator[str]:
    """Every text in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
