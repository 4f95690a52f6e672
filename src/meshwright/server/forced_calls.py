"""Grammars of answers that must be calls of tools, in the notation that the model writes, and of answers behind reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.server.grammar_request import text_of_length
from meshwright.server.notations import Forced

Grammar = tuple[str, str]
"""Notation and text of a grammar."""


def calls_grammar(functions: Sequence[Mapping[str, Any]], forced: Forced, *, several: bool) -> Grammar:
    """The grammar of one call of one of these functions, or of several calls. Raises RequestError if it is too long."""
    more = f" ({_quoted(forced.between)} call)*" if several else ""
    names = " | ".join(f"function_{index}" for index in range(len(functions)))
    before, after = (f"{_quoted(text)} " if text else "" for text in (forced.before, forced.after))
    lines = [f"start: call{more}", f"call: {before}({names}) {after}"]
    for index, function in enumerate(functions):
        opening = f'{{"name": {json.dumps(function["name"])}, "{forced.arguments}": '
        schema = {"type": "object", **(function.get("parameters") or {})}
        lines += [
            f'function_{index}: {_quoted(opening)} arguments_{index} "}}"',
            f"arguments_{index}: %json {json.dumps(schema)}",
        ]
    return "lark", text_of_length("\n".join(lines), "tools")


def behind_reasoning(grammar: Grammar, end: str) -> Grammar:
    """The grammar of reasoning up to its end, and then of what `grammar` says, a JSON schema or the result of `calls_grammar`."""
    notation, text = grammar
    answer = f"answer: %json {text}" if notation == "json_schema" else text.replace("start:", "answer:", 1)
    return "lark", f"start: reasoning /\\n*/ answer\nreasoning[suffix={_quoted(end)}]: /(?s:.*)/\n{answer}"


def _quoted(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text)
