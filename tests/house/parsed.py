"""Syntax trees of source files, each parsed once."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    collects = gc.isenabled()
    gc.disable()  # all objects of a tree stay
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if collects:
            gc.enable()


def below(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `tree` but expressions, which hold no statement."""
    waiting = [tree]
    while waiting:
        children = [node for node in ast.iter_child_nodes(waiting.pop()) if not isinstance(node, ast.expr)]
        yield from children
        waiting += children
