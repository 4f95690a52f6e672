"""Leaves the later cases of a long list, and most examples of property tests, to `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

QUICK = "MESHWRIGHT_TESTS_QUICK"
"""The environment variable that `conftest` sets where slow tests are left out."""


def quick_first(count: int, cases: Iterable[Any], *, unpack: bool = False) -> list[Any]:
    """`cases` for `parametrize`; those after the first `count` are marked slow. `unpack`: a case has several arguments."""
    return [
        case if index < count else pytest.param(*(case if unpack else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def examples(quick: int, all_tests: int) -> int:
    """Examples of a property test: `quick` in `make test`, `all_tests` in `make test-all`."""
    return quick if QUICK in os.environ else all_tests
