"""Models, plans, messages and gradients have the facts in the files of this folder; `tests.golden.facts` computes both.

Numbers may differ by the order of a sum: by 1e-12 relative, gradients by 1e-9. Everything else is equal. A change that is meant to change
a fact runs `make golden`; its commit says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.golden.facts import FOLDER, KINDS, golden
from tests.slow import quick_first

TOLERANCE = {"gradients": 1e-9}
MOST_BYTES = 750_000
"""All files of the folder together."""


stored = cache(golden)


def differences(found: Any, expected: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Where two values differ, as text."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected.keys() | found.keys():
            yield from differences(found.get(key), expected.get(key), tolerance, f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, tolerance, f"{where}[{index}]")
    elif isinstance(expected, float) or (isinstance(found, float) and isinstance(expected, int)):
        if found != pytest.approx(expected, rel=tolerance, abs=0):
            yield f"{where}: {found!r}, expected {expected!r}"
    elif found != expected:
        yield f"{where}: {found!r}, expected {expected!r}"


CASES = [
    case
    for name, kind in KINDS.items()
    for case in quick_first(kind.quick, ((name, case) for case in kind.cases), unpack=True)
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_facts_are_the_golden_ones(kind: str, case: str) -> None:
    found = json.loads(json.dumps(KINDS[kind].facts(case)))
    wrong = list(differences(found, stored(kind)[case], TOLERANCE.get(kind, 1e-12)))
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_has_golden_facts(kind: str) -> None:
    assert list(stored(kind)) == list(KINDS[kind].cases)
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < MOST_BYTES
