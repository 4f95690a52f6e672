r"""Grammars in Lark's notation that force an answer to be tool calls, or to follow a schema after reasoning.

Each model family writes tool calls in its own notation. The grammar of a call has a rule `function_N` for each tool,
`arguments_N` for its arguments and, if arguments are written one by one, `value_N_M` for each of their values. Example
for the notation `qwen3_coder` and a function `weather` with a text `city` (required) and an integer `days`:

    start: call ("\n" call)*
    call: function_0
    function_0: "<tool_call>\n<function=" "weather" ">\n" arguments_0 "</function>\n</tool_call>"
    arguments_0: "<parameter=city>\n" value_0_0 ("<parameter=days>\n" value_0_1)?
    value_0_0[suffix="\n</parameter>\n"]: /(?s:.*)/
    value_0_1: value_0_1_json "\n</parameter>\n"
    value_0_1_json: %json {"type": "integer"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.server.grammar_request import text_of_length
from meshwright.server.notations import Forced, Notation, Parameters
from meshwright.server.tools import listed, schema_types

Grammar = tuple[str, str]
"""(notation, text) of a grammar: `("lark", "start: …")` or `("json_schema", "{…}")`."""
Special = Mapping[str, int]
"""Ids of the tokenizer's special tokens by their text.

Quoted text in a grammar never matches a special token, so a special token is written as its id: `<[151657]>`.
"""
ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "nullable"))
"""Keys of a JSON schema that do not limit a text. A schema with only these keys, or with alternatives, allows any text."""
_PLAIN_KEY = re.compile(r"[\w.-]+")
"""Names that can be written without quotes or escapes."""
_LINE_BREAK = "\n"


def calls_grammar(
    functions: Sequence[Mapping[str, Any]], notation: Notation, special: Special, *, several: bool
) -> Grammar | None:
    """Return the grammar of one call of one of `functions`, or of one or more calls with `several`.

    Each function is an object with `name` and `parameters` (a JSON schema), as in OpenAI's API. `special` maps special
    tokens to their ids.

    Returns None if the notation cannot be forced: if it has no grammar, if it cannot write a function's name, or if it
    writes values as unquoted text and a schema limits a text in a way that is not a list of choices. Raises
    RequestError if the grammar is too long.
    """
    forced = notation.forced
    if forced is None or not all(
        "{json_name}" in forced.head or _PLAIN_KEY.fullmatch(each["name"]) for each in functions
    ):
        return None
    rules = [_arguments(index, function, notation.parameters) for index, function in enumerate(functions)]
    if any(rule is None for rule in rules):
        return None
    parts = {name: _literal(text, special) for name, text in forced._asdict().items()}
    more = f" ({parts['between']} call)*" if several else ""
    lines = [f"start: {parts['before']} call{more} {parts['after']}"]
    lines.append("call: " + " | ".join(f"function_{index}" for index in range(len(functions))))
    for index, (function, rule) in enumerate(zip(functions, rules, strict=True)):
        assert rule is not None
        lines += [
            f"function_{index}: {_head(forced, function['name'], special)} arguments_{index} {parts['tail']}",
            *rule,
        ]
    return "lark", text_of_length("\n".join(lines), "tools")


def behind_reasoning(grammar: Grammar, end: str, special: Special) -> Grammar:
    """Return a grammar that allows any reasoning, then the text `end`, then an answer that follows `grammar`.

    `grammar` is a JSON schema or a result of `calls_grammar`. `end` is the mark at which reasoning ends, e.g.
    `</think>`.
    """
    notation, text = grammar
    answer = f"answer: %json {text}" if notation == "json_schema" else text.replace("start:", "answer:", 1)
    if end in special:
        return "lark", f"start: reasoning <[{special[end]}]> /\\n*/ answer\nreasoning: /(?s:.*)/\n{answer}"
    return "lark", f"start: reasoning /\\n*/ answer\nreasoning[suffix={_quoted(end)}]: /(?s:.*)/\n{answer}"


def _head(forced: Forced, name: str, special: Special) -> str:
    """Return the grammar of the text before the arguments of a call, which contains the function's name.

    The name is quoted text, so that it never matches a special token.
    """
    before, quoted, behind = forced.head.partition("{json_name}")
    if not quoted:
        before, _, behind = forced.head.partition("{name}")
    shown = json.dumps(name) if quoted else name
    rest = " /[0-9]+/ ".join(_literal(text, special) for text in behind.split("{number}"))
    return f"{_literal(before, special)} {_quoted(shown)} {rest}"


def _arguments(index: int, function: Mapping[str, Any], parameters: Parameters | None) -> list[str] | None:
    """Return the grammar rules of a function's arguments.

    Without `parameters` (the notation writes all arguments as one JSON object) this is one rule. Otherwise each
    argument is written between marks of its own, as `parameters` says; None if some argument cannot be written so.
    """
    schema = {"type": "object", **(function.get("parameters") or {})}
    if parameters is None:
        return [f"arguments_{index}: %json {json.dumps(schema)}"]
    properties = schema.get("properties") or {}
    definitions = {}
    if not isinstance(properties, dict):
        return None
    for key in ("$defs", "definitions"):
        if key in schema:
            definitions[key] = schema[key]
    rules = []
    order = []
    for number, (key, value) in enumerate(properties.items()):
        rule = f"value_{index}_{number}"
        if not _PLAIN_KEY.fullmatch(key) or (content := _value(rule, value, schema, definitions, parameters)) is None:
            return None
        opening = (
            parameters.opening.replace("{key}", key).replace("{?}", _LINE_BREAK) + _LINE_BREAK * parameters.newlines
        )
        part = f"{_quoted(opening)} {rule}"
        order.append(part if key in listed(schema.get("required")) else f"({part})?")
        rules += content
    return [f"arguments_{index}: {' '.join(order) or _quoted('')}", *rules]


def _value(
    rule: str, value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], parameters: Parameters
) -> list[str] | None:
    """Return the rules of one argument's value and its closing mark.

    Values that are not text are JSON. A text is written without quotes, so its schema cannot be checked: None unless
    the schema allows any text or lists the possible texts.
    """
    closing = _quoted(_LINE_BREAK * parameters.newlines + parameters.closing + _LINE_BREAK)
    types = schema_types(value, schema)
    if types and "string" not in types:
        return [f"{rule}: {rule}_json {closing}", f"{rule}_json: %json {json.dumps({**value, **definitions})}"]
    if isinstance(value, dict) and ("enum" in value or "const" in value):
        texts = [value["const"]] if "const" in value else listed(value["enum"])
        if not texts or not all(isinstance(text, str) and text for text in texts):
            return None
        return [f"{rule}: ({' | '.join(map(_quoted, texts))}) {closing}"]
    return [f"{rule}[suffix={closing}]: /(?s:.*)/"] if _any_text(value, schema) else None


def _any_text(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether `value`, a schema inside `schema`, allows any text."""
    if not isinstance(value, dict):
        return value is True
    options = [option for key in ("anyOf", "oneOf") for option in listed(value.get(key))]
    texts = [option for option in options if "string" in schema_types(option, schema)]
    return value.keys() <= ANNOTATIONS | {"anyOf", "oneOf"} and all(_any_text(option, schema) for option in texts)


def _literal(text: str, special: Special) -> str:
    """Return a text as part of a grammar, with its special tokens as ids. An empty text gives an empty part."""
    if not text:
        return ""
    marks = [mark for mark in special if mark in text]
    if not marks:
        return _quoted(text)
    pieces = re.split("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")", text)
    return " ".join(f"<[{special[piece]}]>" if piece in special else _quoted(piece) for piece in pieces if piece)


def _quoted(text: str) -> str:
    """Return a text as a quoted string of a grammar."""
    return json.dumps(text, ensure_ascii=False)
