"""Removes usable documents from a corpus: those that a filter of the user rejects, and those with text of an evaluation.

Duplicates are removed later, because they can be found only among all documents (`data.duplicates`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from meshwright.data.contamination import EvaluationTexts
from meshwright.data.corpus import CorpusDocument
from meshwright.data.inputs import list_inputs
from meshwright.data.removed import Removed
from meshwright.durable.writes import digest_file
from meshwright.spec.errors import BadInput, nearest

EXACT = "exact"
"""Value of `--deduplicate`: remove documents whose text equals the text of an earlier one."""
NEAR = "near"
"""Value of `--deduplicate`: also remove documents that are similar to an earlier one."""
SIMILARITY = 0.75
"""Jaccard similarity from which on documents are near-duplicates, if the option gives none."""
LEAST_SIMILARITY = 0.7
"""Smallest similarity that the option may give. At lower ones the signatures miss many pairs; at 0.7 they miss 18%."""


@dataclass(frozen=True)
class Cleaning:
    """The options that say what is removed from a corpus."""

    filters: tuple[str, ...] = ()
    """Functions that return True for a text to keep, each as `FILE.py:FUNCTION`."""
    evaluations: tuple[str, ...] = ()
    """Files and folders with evaluations. A document that shares 13 words in a row with one is removed."""
    duplicates: str | None = None
    """`exact`, `near` or `near:SIMILARITY`; None keeps duplicates."""

    @property
    def wanted(self) -> bool:
        return bool(self.filters or self.evaluations or self.duplicates)

    @cached_property
    def similarity(self) -> float | None:
        """Smallest Jaccard similarity of near-duplicates; None if near-duplicates are kept. Raises BadInput if `duplicates` is invalid."""
        if self.duplicates in (None, EXACT):
            return None
        word, _, number = self.duplicates.partition(":")
        expected = (
            f"expected {EXACT}, {NEAR}, or {NEAR}:SIMILARITY from {LEAST_SIMILARITY} to 1, for example {NEAR}:0.8"
        )
        if word != NEAR:
            near = nearest(word, (EXACT, NEAR))
            raise BadInput(f"--deduplicate {self.duplicates}: {expected}" + (f" (nearest: {near})" if near else ""))
        try:
            similarity = float(number) if number else SIMILARITY
        except ValueError:
            similarity = 0.0
        if not LEAST_SIMILARITY <= similarity <= 1:
            raise BadInput(f"--deduplicate {self.duplicates}: {expected}")
        return similarity

    def check(self) -> None:
        """Raise BadInput for options that cannot be used."""
        _ = self.similarity
        for name in self.filters:
            load_filter(name)
        if self.evaluations:
            list_inputs(self.evaluations)

    def describe(self) -> dict[str, Any]:
        """Return the options as they are stored in the request of a corpus, with digests of the files that they name."""
        files = list_inputs(self.evaluations).files if self.evaluations else []
        return {
            "filters": [[name, digest_file(_filter_file(name))] for name in self.filters] or None,
            "evaluations": [[file.name, digest_file(file.path)] for file in files] or None,
            "duplicates": self.duplicates,
        }


NO_CLEANING = Cleaning()
"""Removes nothing."""


class Cleaner:
    """Applies the filters and the check against evaluations to documents."""

    def __init__(self, cleaning: Cleaning) -> None:
        """Load the filters and the evaluations. Raises BadInput if one of them cannot be used."""
        self._filters = [(name, load_filter(name)) for name in cleaning.filters]
        self._evaluations = EvaluationTexts(cleaning.evaluations) if cleaning.evaluations else None

    def removes(self, document: CorpusDocument, removed: Removed) -> bool:
        """Return whether a document is removed. If it is, count it in `removed`."""
        reason, why = self._reason(document)
        if reason is not None:
            size = len(document.text.encode("utf-8"))
            removed.add(reason, f"{document.file} [{document.id}]", why, document.text, size)
        return reason is not None

    def _reason(self, document: CorpusDocument) -> tuple[str | None, str]:
        """Return why a document is removed, as (reason, what was found). (None, "") if it is not. Raises BadInput if a filter fails."""
        for name, keeps in self._filters:
            try:
                verdict = keeps(document.text)
            except Exception as error:
                where = f"{document.file} [{document.id}]"
                raise BadInput(f"--filter {name}: {where}: {type(error).__name__}: {error}") from error
            if not isinstance(verdict, bool):
                raise BadInput(
                    f"--filter {name}: {document.file} [{document.id}]: expected True to keep the text or False, got {verdict!r}"
                )
            if not verdict:
                return f"filter {name}", ""
        if self._evaluations is not None and (found := self._evaluations.found_in(document.text)) is not None:
            return "text of an evaluation", found
        return None, ""


def load_filter(name: str) -> Callable[[str], Any]:
    """Import the file and return the function that `FILE.py:FUNCTION` names. Raises BadInput if there is none."""
    file = _filter_file(name)
    function = name.rpartition(":")[2]
    spec = importlib.util.spec_from_file_location(f"meshwright_filter_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"--filter {name}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    call = getattr(module, function, None)
    if not callable(call):
        names = sorted(key for key, value in vars(module).items() if isinstance(value, FunctionType) and key[0] != "_")
        near = nearest(function, names)
        hint = f" (nearest: {near})" if near else ""
        raise BadInput(f"--filter {name}: {file} has no function {function}{hint}; it has {', '.join(names) or 'none'}")
    return call


def _filter_file(name: str) -> Path:
    """Return the file of a filter `FILE.py:FUNCTION`. Raises BadInput if the name has another form or the file does not exist."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise BadInput(f"--filter {name}: expected FILE.py:FUNCTION, for example filters.py:keep")
    if not Path(path).is_file():
        folder = Path(path).parent
        siblings: Sequence[str] = [each.name for each in folder.glob("*.py")] if folder.is_dir() else []
        near = nearest(Path(path).name, siblings)
        raise BadInput(f"--filter {name}: {path}: no such file" + (f" (nearest: {folder / near})" if near else ""))
    return Path(path)
