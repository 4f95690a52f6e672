"""JSON schemas at random: half of them honest, half made to be slow, large or endless."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from tests.fuzz.bodies import CHATS, COMPLETIONS, NEW_TOKENS, FuzzRequest

Schema = dict[str, Any] | bool
MORE_TOKENS = 48
"""New tokens of every eighth stream: some limits are met only while a text grows."""
PATTERNS = (
    "^a*$",
    "^(a+)+$",
    "^(a|aa)*b$",
    "(x+x+)+y",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "^(a?){30}a{30}$",
    "^[a-z]{1,1000}$",
    "^(a{1,100}){1,100}$",
    "^(.{0,1000}){1000}$",
    "a{99999}",
    "a{1,2147483647}",
    "a{3,1}",
    "(?=a)b",
    "(?<!a)b",
    r"(a)\1",
    "(",
    "[",
    "*",
    "(?P<n>a)(?P=n)",
    r"\p{L}+",
    r"^\d{4}-\d{2}-\d{2}$",
    r"^[^\x00-\x7F]+$",
    "^$",
    "",
    ".*.*.*.*=.*",
    "(" * 300 + "a" + ")" * 300,
    "|".join("abcdefgh" * 300),
    "^[\\s\\S]{500,}$",
    "(((((a*)*)*)*)*)*",
    "^(0|1(01*0)*1)+$",
    "[a-zA-Z0-9._%+-]+@[a-z]+",
    r"\u{110000}",
    r"(?i:straße)",
    "😀{5,}",
    "^\\S+$",
)
FORMATS = (
    "date-time",
    "date",
    "time",
    "email",
    "uuid",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
    "regex",
    "no-such-format",
    "",
)
KNOWN = ("string", "integer", "number", "boolean", "null")


REPORTED: tuple[Schema, ...] = (
    {"type": "string", "minLength": 5_000, "pattern": "^a*$"},
    {"type": "object", "properties": {f"key{index}": {"type": "string"} for index in range(520)}},
    {"enum": [{"id": index} for index in range(3_000)]},
)
"""Schemas that have ended servers; the first ones of each run."""


def schema_request(seed: int, number: int) -> FuzzRequest:
    """Request number `number` whose answer must follow a schema or a regular expression."""
    random = Random(f"schema {seed} {number}")
    stream = random.random() < 0.5
    most = MORE_TOKENS if stream and random.random() < 0.25 else NEW_TOKENS
    body: dict[str, Any] = {"max_tokens": most, "stream": stream, "temperature": random.choice((0, 1)), "seed": number}
    if number < len(REPORTED):
        asked: dict[str, Any] = _described(REPORTED[number]) | {"max_tokens": MORE_TOKENS}
    elif random.random() < 0.05:
        asked = {"guided_regex": random.choice(PATTERNS)}
    else:
        schema = honest(random, 3) if random.random() < 0.5 else hostile(random)
        asked = _asking(random, schema)
    chat = "tools" in asked or random.random() < 0.3
    prompt = {"messages": [{"role": "user", "content": "JSON?"}]} if chat else {"prompt": "JSON: "}
    return FuzzRequest(number, CHATS if chat else COMPLETIONS, _encoded({**prompt, **body, **asked}))


def _asking(random: Random, schema: Schema) -> dict[str, Any]:
    """One of the ways to ask for a schema."""
    way = random.randrange(10)
    if way == 0:
        function = {"name": "f", "parameters": schema}
        return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    if way == 1:
        return {"guided_json": schema}
    if way == 2:
        return {"structured_outputs": {"json": schema}}
    return _described(schema)


def _described(schema: Schema) -> dict[str, Any]:
    described = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def honest(random: Random, depth: int) -> dict[str, Any]:
    """A schema that a developer could have written."""
    form = random.randrange(14 if depth else 7)
    if form == 0:
        return {"type": "string", "maxLength": random.choice((1, 10, 200))}
    if form == 1:
        return {"type": "string", "format": random.choice(FORMATS[:8])}
    if form == 2:
        return {
            "enum": random.sample(["red", "green", "blue", 1, 2.5, None, True, "ünïcode", ""], random.randint(1, 6))
        }
    if form == 3:
        low = random.randint(-100, 100)
        return {"type": random.choice(("integer", "number")), "minimum": low, "maximum": low + random.randint(0, 1000)}
    if form == 4:
        return {"type": random.choice(KNOWN), "description": "A value.", "title": "Value"}
    if form == 5:
        return {"type": "string", "pattern": random.choice(("^[a-z]{1,8}$", r"^\d{4}-\d{2}-\d{2}$", "^[A-Z][a-z]+$"))}
    if form == 6:
        return {"const": random.choice(("fixed", 3, None, [1, 2], {"a": "b"}))}
    if form == 7:
        return {"type": "array", "items": honest(random, depth - 1), "minItems": 1, "maxItems": random.randint(1, 9)}
    if form == 8:
        return {"anyOf": [honest(random, depth - 1) for _ in range(random.randint(1, 4))]}
    if form == 9:
        node = {
            "type": "object",
            "properties": {
                "value": honest(random, depth - 1),
                "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"n": node}, "$ref": "#/$defs/n"}
    names = [
        random.choice(("name", "size", "items", "ok", "größe", "a b")) + str(index)
        for index in range(random.randint(1, 8))
    ]
    return {
        "type": "object",
        "properties": {name: honest(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.6],
        "additionalProperties": random.choice((False, True, {"type": "string"})),
    }


def hostile(random: Random) -> Schema:
    """A schema that asks for much work, has no end, or is none."""
    return random.choice(_HOSTILE)(random)


def _text_limits(random: Random) -> Schema:
    low, high = random.choice((0, 1, 300, 5_000, 10**6, 2**31, 2**63)), random.choice((0, 10, 10**5, 10**9, 2**64))
    limits = random.choice(({"minLength": low}, {"maxLength": high}, {"minLength": low, "maxLength": high}))
    pattern = {"pattern": random.choice(PATTERNS)} if random.random() < 0.5 else {}
    return {"type": "string", **limits, **pattern}


def _pattern(random: Random) -> Schema:
    if random.random() < 0.3:
        return {"type": "object", "patternProperties": {random.choice(PATTERNS): {"type": "integer"} for _ in range(3)}}
    return {"type": "string", "pattern": random.choice(PATTERNS)}


def _large_enum(random: Random) -> Schema:
    count, kind = random.choice((100, 1_000, 3_000, 8_000)), random.randrange(4)
    values: list[Any] = [[index, f"value {index}", {"id": index}, "x" * (index % 40)][kind] for index in range(count)]
    return {"enum": values}


def _many_keys(random: Random) -> Schema:
    count = random.choice((50, 200, 520, 1_500))
    inner: Any = random.choice(({"type": "string"}, {"type": "integer"}, {}, {"enum": ["a", "b"]}))
    names = [f"{random.choice(('k', 'key_', 'ключ'))}{index}" for index in range(count)]
    required = names if random.random() < 0.2 else [] if random.random() < 0.6 else names[::7]
    return {
        "type": "object",
        "properties": dict.fromkeys(names, inner),
        "required": required,
        "additionalProperties": random.random() < 0.3,
    }


def _references(random: Random) -> Schema:
    return random.choice(
        (
            {"$ref": "#"},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            {"$ref": "#/$defs/missing"},
            {"$ref": "https://example.com/schema.json"},
            {"$ref": "file:///etc/passwd"},
            {"$ref": 3},
            {"$ref": ""},
            {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
            {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
            {"not": {"$ref": "#"}},
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
            {
                "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}
                | {"d25": {"type": "null"}},
                "$ref": "#/$defs/d0",
            },
            {
                "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)} | {"d25": {}},
                "$ref": "#/$defs/d0",
            },
            {"$id": "https://example.com/x", "$anchor": "a", "$dynamicRef": "#a"},
            {"$defs": {"é/~": {}}, "$ref": "#/$defs/%C3%A9~1~0"},
        )
    )


def _deep(random: Random) -> Schema:
    """A mark that `_encoded` replaces: deeper values than Python's encoder takes."""
    return {"$comment": f"{_DEEP}{random.randrange(len(_NESTED))}.{random.choice((20, 100, 300, 480, 900, 2_000))}"}


_DEEP = "deep-schema-goes-here:"
_NESTED = (
    ('{"type": "array", "items": ', "}"),
    ('{"type": "object", "properties": {"a": ', "}}"),
    ('{"anyOf": [', "]}"),
    ('{"allOf": [', "]}"),
    ('{"oneOf": [', "]}"),
    ('{"not": ', "}"),
    ('{"additionalProperties": ', "}"),
)


def _encoded(body: dict[str, Any]) -> bytes:
    def nested(mark: re.Match[str]) -> str:
        opening, closing = _NESTED[int(mark[1])]
        return opening * int(mark[2]) + "{}" + closing * int(mark[2])

    return re.sub(r'\{"\$comment": "' + _DEEP + r'(\d+)\.(\d+)"\}', nested, json.dumps(body)).encode()


def _wide(random: Random) -> Schema:
    """Many alternatives, and products of them."""
    word = random.choice(("anyOf", "allOf", "oneOf"))
    if random.random() < 0.5:
        return {word: [honest(random, 1) for _ in range(random.choice((10, 100, 300)))]}
    choices: list[Schema] = [
        {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)
    ]
    return {"allOf": choices}


def _array_limits(random: Random) -> Schema:
    low, high = random.choice((0, 1, 1_000, 10**6, 2**40)), random.choice((0, 5, 10**4, 10**9))
    inner = random.choice(
        ({}, {"type": "integer"}, {"type": "array", "items": {"type": "array", "minItems": 1_000}, "minItems": 1_000})
    )
    return {"type": "array", "items": inner, "minItems": low, "maxItems": high, "uniqueItems": random.random() < 0.3}


def _number_limits(random: Random) -> Schema:
    numbers = (0, 1, -1, 0.1, 1e-300, 1e300, 2**63, -(2**63), 10**40, 1e308, 3.141592653589793)
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    limits = {name: random.choice(numbers) for name in random.sample(names, random.randint(1, 4))}
    return {"type": random.choice(("integer", "number")), **limits}


def _nonsense(random: Random) -> Schema:
    return random.choice(
        (
            {},
            True,
            False,
            {"type": "no such"},
            {"type": []},
            {"type": ["string", "no such"]},
            {"type": None},
            {"type": {"type": "string"}},
            {"properties": []},
            {"properties": {"a": 3}},
            {"required": "a"},
            {"required": ["missing"], "additionalProperties": False},
            {"enum": []},
            {"enum": {}},
            {"anyOf": []},
            {"allOf": [False]},
            {"not": {}},
            {"const": None},
            {"items": 3},
            {"prefixItems": [{}] * 500},
            {"format": 3},
            {"if": {"type": "string"}, "then": {"minLength": 3}, "else": False},
            {"dependentSchemas": {"a": {"required": ["b"]}}},
            {"minLength": "3"},
            {"type": "string", "minLength": 3, "maxLength": 2},
            {"minimum": "x"},
            {"contains": {"type": "null"}},
            {"unevaluatedProperties": False},
            {"type": "string", "minLength": -1},
            {"type": "string", "maxLength": 1.5},
            {"type": "array", "minItems": 2, "maxItems": 1},
            {"type": "string", "contentEncoding": "base64"},
            {"x-guidance": {"whitespace_flexible": False}},
            {"x-guidance": 3},
            {"lark": "start: /a/"},
            {
                "type": "object",
                "properties": {"\0": {}, "": {}, "🙂" * 50: {}, "a" * 5_000: {}},
                "required": ["", "\0"],
            },
            {"const": "x" * 60_000},
            {"type": "object", "minProperties": 10**6},
            {"type": "object", "maxProperties": 0, "required": ["a"]},
            {"enum": ["\ud800"]},
            {"type": "object", "propertyNames": {"pattern": "^(a+)+$"}},
            {"description": "x" * 70_000},
            {"$schema": "http://json-schema.org/draft-03/"},
        )
    )


_HOSTILE = (
    _text_limits,
    _text_limits,
    _pattern,
    _pattern,
    _large_enum,
    _many_keys,
    _references,
    _deep,
    _wide,
    _array_limits,
    _number_limits,
    _nonsense,
)
