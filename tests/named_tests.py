"""Tells which tests that a table names do not exist."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def missing_tests(names: Iterable[str]) -> list[str]:
    """Those of `path::function` that are no test function of that file; all, if there are none."""
    given = list(names)
    assert given, "no test is named"
    return [name for name in given if name.partition("::")[2] not in _functions(name.partition("::")[0])]


@cache
def _functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )
