"""A line of source says one thing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.house.parsed import parsed

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
FILES = sorted(SOURCE.rglob("*.py"))


def nested_conditionals(tree: ast.AST) -> list[int]:
    """Lines of conditional expressions with another one inside them."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp)
        for inner in ast.walk(node)
        if isinstance(inner, ast.IfExp) and inner is not node
    ]


@pytest.mark.parametrize(("line", "found"), [("x = a if b else c", []), ("x = a if b else (c if d else e)", [1])])
def test_nested_conditionals_are_found(line: str, found: list[int]) -> None:
    assert nested_conditionals(ast.parse(line)) == found


def test_no_conditional_expression_is_inside_another() -> None:
    found = {str(path.relative_to(SOURCE)): nested_conditionals(parsed(path)) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}
