"""Names of public classes are unique, so that a reader who meets one knows which is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.house.parsed import parsed

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"


def test_no_public_class_name_is_used_twice() -> None:
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
