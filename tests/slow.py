"""Which cases of a long list every run of the tests tries, and which only `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(count: int, cases: Iterable[Any], *, rows: bool = False) -> list[Any]:
    """`cases` for `parametrize`, those behind the first `count` marked slow; `rows` are the values of several arguments each."""
    return [
        case if place < count else pytest.param(*(case if rows else (case,)), marks=pytest.mark.slow)
        for place, case in enumerate(cases)
    ]
