"""What begins and ends a text is decided in `data/text_format.py` alone; other modules read its record."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.house.parsed import parsed

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
HOME = "data/text_format.py"
NAMED = re.compile(r"(eos|bos|pad)_token(_id)?|(special_tokens_map|generation_config)\.json")
"""Keys and files that name special tokens."""
CONSTANTS = {"SPECIAL_TOKENS_MAP", "GENERATION_CONFIG"}
READERS = {
    "data/chat_template.py": "lists the files about texts that are copied",
    "data/chat.py": "gives templates the special tokens that they write by name",
    "data/prepare.py": "leaves generation_config.json, which belongs to weights, out of a corpus",
    "server/model_files.py": "reads sampling values of generation_config.json",
    "checkpoint/models/hf.py": "writes generation_config.json of a model without tokenizer",
    "families/format.py": "lists the keys of config.json that change nothing about what a model computes",
    "families/folder.py": "names the keys of config.json that the record fills",
    "serve/grammar.py": "gives llguidance an end token of its own",
    "server/grammar_check.py": "gives llguidance an end token of its own",
}
"""Other modules that name them, and why."""


def modules() -> list[tuple[str, ast.Module]]:
    files = [(path.relative_to(SOURCE).as_posix(), path) for path in sorted(SOURCE.rglob("*.py"))]
    return [(name, parsed(path)) for name, path in files if name != HOME]


def names_special_tokens(node: ast.AST) -> bool:
    """Whether a node is a key or file that names special tokens; sentences are not."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return NAMED.fullmatch(node.value) is not None
    if isinstance(node, ast.keyword):
        return node.arg is not None and NAMED.fullmatch(node.arg) is not None
    return isinstance(node, ast.Name) and node.id in CONSTANTS


def puts_special_tokens(node: ast.AST) -> bool:
    """Whether a node encodes a text with what the tokenizer's post-processor puts around it."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if not node.func.attr.startswith("encode") or not ast.unparse(node.func.value).endswith("tokenizer"):
        return False
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    return given.get("add_special_tokens") != "False"


def test_special_tokens_are_named_at_one_place() -> None:
    found = {
        name: sorted({node.lineno for node in ast.walk(tree) if names_special_tokens(node)})  # type: ignore[attr-defined]
        for name, tree in modules()
    }
    found = {name: lines for name, lines in found.items() if lines}
    others = [f"{name}:{lines[0]}" for name, lines in found.items() if name not in READERS]
    assert not others, f"read the record of data/text_format.py (TextFormat) instead: {', '.join(others)}"
    assert set(found) == set(READERS), "modules of READERS that name no special token any more"


def test_prompts_begin_as_the_record_says() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and puts_special_tokens(node)
    ]
    assert not found, f"encode with add_special_tokens=False, and use TextFormat.begun: {', '.join(found)}"
