"""Reads a histogram of the lengths of samples, which `meshwright data lengths --json` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.spec.errors import BadInput


class LengthRange(NamedTuple):
    """Samples with `first` to `last` tokens, both included."""

    first: int
    last: int
    documents: float
    """Number of samples. A fraction is allowed, because only proportions matter."""


def read_lengths(path: Path, option: str) -> list[LengthRange]:
    """Return the ranges of the file that contain samples, in the order of the file. `last` is never above the longest sample.

    Raises BadInput that names `option` if the file cannot be read or has no such ranges.
    """
    try:
        histogram = json.loads(path.read_text(encoding="utf-8"))
        entries = [LengthRange(entry["first"], entry["last"], entry["documents"]) for entry in histogram["ranges"]]
        longest = histogram.get("longest", max(entry.last for entry in entries))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{option} {path}: expected what `meshwright data lengths --json` prints: {error}") from None
    for entry in entries:
        if not (_is_count(entry.first) and _is_count(entry.last) and 1 <= entry.first <= entry.last):
            raise BadInput(
                f"{option} {path}: range {entry.first} to {entry.last}: expected 1 ≤ first ≤ last, in whole tokens"
            )
        if isinstance(entry.documents, bool) or not isinstance(entry.documents, int | float) or entry.documents < 0:
            raise BadInput(f"{option} {path}: {entry.documents} documents in a range: expected a number of at least 0")
    entries = [entry._replace(last=min(entry.last, longest)) for entry in entries if entry.documents > 0]
    if not entries or not _is_count(longest) or longest < max(entry.first for entry in entries):
        raise BadInput(
            f"{option} {path}: expected at least one sample, and a longest one in the last range with samples"
        )
    return entries


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
