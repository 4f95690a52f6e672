"""A line of source assigns one value, except in swaps and unpacking."""

from __future__ import annotations

import ast
from itertools import combinations
from pathlib import Path

import pytest
from tests.house.parsed import parsed

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"


def divisible(tree: ast.AST) -> list[int]:
    """Lines that assign several names or attributes values that do not depend on the others, which are lines of their own."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(targets := node.targets[0], ast.Tuple)
        and len(targets.elts) == len(node.value.elts)
        and all(isinstance(target, ast.Name) for target in targets.elts)
        and not any(
            target.id in {inner.id for inner in ast.walk(value) if isinstance(inner, ast.Name)}
            for (target, _), (_, value) in combinations(zip(targets.elts, node.value.elts, strict=True), 2)
            if isinstance(target, ast.Name)
        )
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a, b = 1, 2", [1]),
        ("a, b = b, a", []),
        ("a, b = f()", []),
        ("first, second = second, first + second", []),
    ],
)
def test_parallel_assignments_are_found(line: str, found: list[int]) -> None:
    assert divisible(ast.parse(line)) == found


def test_no_parallel_assignment_is_left() -> None:
    found = {str(path.relative_to(SOURCE)): divisible(parsed(path)) for path in sorted(SOURCE.rglob("*.py"))}
    assert {name: lines for name, lines in found.items() if lines} == {}
