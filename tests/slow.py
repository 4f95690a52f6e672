"""Marks the later cases of a long list as slow, so that only `make test-all` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(count: int, cases: Iterable[Any], *, unpack: bool = False) -> list[Any]:
    """`cases` for `parametrize`; those after the first `count` are marked slow. `unpack`: a case has several arguments."""
    return [
        case if index < count else pytest.param(*(case if unpack else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
