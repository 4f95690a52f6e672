"""Names and docstrings in plain English: no vague identifiers, and short first lines that name the value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.house.parsed import below, parsed

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "meshwright"
VAGUE = {"one", "thing", "place", "kind", "row", "rest", "found", "said", "told", "asked", "away"}
VAGUE |= {f"{word}s" for word in VAGUE}
"""Identifiers that name nothing in particular. The JSON key `kind` of a written file is a string, so it is not affected."""
KEPT_FIELDS = {("checkpoint/manifest.py", "kind")}
"""Fields that a written file or JSON output has as keys, by file."""
FIRST_LINE = 120
"""Characters of a docstring's first line, without indentation and quotes."""
PRONOUNS = {"What", "Who", "Whose", "Which", "Those", "That", "Theirs"}
"""First words of docstrings that do not name the value: `What is kept` leaves open what that is."""
PENDING: tuple[str, ...] = ()
"""Packages and files that do not follow these rules yet."""
PENDING_TESTS: tuple[str, ...] = ()
"""Folders of tests that do not follow these rules yet."""


def checked_files() -> list[Path]:
    return sorted([*_below(SOURCE, PENDING), *_below(ROOT / "tests", PENDING_TESTS)])


def _below(folder: Path, pending: tuple[str, ...]) -> list[Path]:
    paths = {path: path.relative_to(folder) for path in folder.rglob("*.py")}
    return [path for path, name in paths.items() if name.parts[0] not in pending and str(name) not in pending]


def _source_name(path: Path) -> str:
    return str(path.relative_to(SOURCE)) if SOURCE in path.parents else str(path.relative_to(ROOT))


def declared_names(tree: ast.AST, inside_function: bool = False) -> Iterator[tuple[int, str]]:
    """(line, name) of every function, class, parameter, module constant and field; local variables are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # it holds no statement
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
            arguments = (
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            )
            yield from ((argument.lineno, argument.arg) for argument in arguments if argument)
        elif isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in ast.walk(ast.Tuple(node.targets if isinstance(node, ast.Assign) else [node.target])):
                if isinstance(target, ast.Name) and not inside_function:
                    yield target.lineno, target.id
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    yield target.lineno, target.attr
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from declared_names(node, function or (inside_function and not isinstance(node, ast.ClassDef)))


def documentation(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, of modules, classes, functions, constants and fields."""
    for node in (tree, *below(tree)):
        for statement in getattr(node, "body", ()):
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def test_no_vague_identifiers() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in checked_files()
        for line, name in declared_names(parsed(path))
        if name.strip("_").lower() in VAGUE and (_source_name(path), name) not in KEPT_FIELDS
    ]
    assert not wrong, "\n".join(wrong)


def test_first_lines_of_docstrings_are_short() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {len(text.strip().splitlines()[0])} characters"
        for path in checked_files()
        for line, text in documentation(parsed(path))
        if text.strip() and len(text.strip().splitlines()[0]) > FIRST_LINE
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_do_not_begin_with_a_pronoun() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {_first_line(text)}"
        for path in checked_files()
        for line, text in documentation(parsed(path))
        if begins_with_pronoun(text)
    ]
    message = (
        "Begin with the noun of the value (State of …) or the verb of the function (Return …), not with a pronoun:"
    )
    assert not wrong, "\n".join([message, *wrong])


def begins_with_pronoun(text: str) -> bool:
    return bool(PRONOUNS.intersection(text.split(maxsplit=1)[:1]))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("What a step reads.", True),
        ("\n    Those of the router.", True),
        ("What-if analysis of steps.", False),
        ("Whether a step is complete.", False),
        ("", False),
    ],
)
def test_pronouns_are_found(text: str, refused: bool) -> None:
    assert begins_with_pronoun(text) == refused


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def f(row, *, told): pass", ["row", "told"]),
        ("class Place:\n    kind: int = 0\n    def __init__(self): self.rest = 1", ["Place", "kind", "rest"]),
        ("ONES = 1\ndef f():\n    one = 1\n    return {'kind': one}", ["ONES"]),
        ("f = lambda thing: thing", []),
    ],
)
def test_declared_names_finds_vague_ones(code: str, names: list[str]) -> None:
    assert [name for _, name in declared_names(ast.parse(code)) if name.strip("_").lower() in VAGUE] == names


def test_documentation_finds_docstrings_of_fields() -> None:
    code = '"""module"""\nclass C:\n    """class"""\n    x: int = 0\n    """field"""\n    def f(self):\n        """method"""'
    assert sorted(text for _, text in documentation(ast.parse(code))) == ["class", "field", "method", "module"]
