"""Calls that a request forces: what the grammar of each notation allows, the notation's reader reads as calls that fit the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from meshwright.serve.compiled_grammar import Grammar, compiled
from meshwright.server.forced_calls import behind_reasoning, calls_grammar
from meshwright.server.notations import NOTATIONS, NotationKey
from meshwright.server.output_reader import OutputFormat
from meshwright.server.tools import parameter_types
from tests.server.helpers import byte_tokenizer

llguidance = pytest.importorskip("llguidance")
FORCED: Sequence[NotationKey] = [name for name, notation in NOTATIONS.items() if notation.forced is not None]
PAINT = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {
            "count": {"$ref": "#/$defs/count"},
            "colour": {"enum": ["red", "light blue"]},
            "on": {"type": "boolean"},
        },
        "required": ["count"],
        "additionalProperties": False,
        "$defs": {"count": {"enum": [1, 20, 3]}},
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
NOTE = {
    "name": "note",
    "parameters": {
        "type": "object",
        "properties": {"text": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Any"}},
        "required": ["text"],
    },
}
TEXT = '  a "b" </x>\n\tline {1} é'


def tools(*functions: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in functions]


def matcher_of(grammar: Any, tokenizer: Any) -> Any:
    tokens = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=[0])
    return compiled(llguidance, tokens, Grammar(*grammar))


def marks(name: NotationKey) -> list[str]:
    """Marks that are special tokens here: those of Kimi K2 and of DeepSeek V3.1."""
    notation = NOTATIONS[name]
    further = {"kimi_k2": ["<|tool_call_argument_begin|>"], "deepseek_v31": ["<｜tool▁sep｜>"]}.get(name)
    return [] if further is None else [*dict.fromkeys([*notation.before, *notation.after, *further])]


def drawn(grammar: Any, tokenizer: Any, draw: random.Random) -> str:
    """A text at random that a grammar allows; it ends as soon as it may."""
    matcher, ids = matcher_of(grammar, tokenizer), list[int]()
    while not matcher.is_accepting():
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        solid = [int(token) for token in allowed if token and tokenizer.decode([token], False).strip()]
        ids.append(draw.choice(solid or allowed.tolist()))
        assert matcher.consume_token(ids[-1]) and len(ids) < 2000
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", FORCED)
def test_all_that_a_grammar_allows_is_read_as_calls(name: NotationKey, several: bool) -> None:
    tokenizer, functions = byte_tokenizer(*marks(name)), (PAINT, NOW)
    special = {mark: tokenizer.token_to_id(mark) for mark in marks(name)}
    grammar = calls_grammar(functions, NOTATIONS[name], special, several=several)
    seen = set()
    for seed in range(12):
        text = drawn(grammar, tokenizer, random.Random(seed))
        parts = OutputFormat(name, types=parameter_types(tools(*functions))).reader().add(text, final=True)
        assert {part.kind for part in parts} == {"call"} and (several or len(parts) == 1), text
        for call in (part.call for part in parts):
            assert call is not None
            arguments = json.loads(call.arguments)
            seen.add(call.name)
            if call.name == "paint":
                assert arguments.pop("count") in (1, 20, 3)
                assert arguments.pop("colour", "red") in ("red", "light blue")
                assert arguments.pop("on", True) in (True, False)
            assert arguments == {}
    assert seen == {"paint", "now"}


WRITTEN: dict[NotationKey, Any] = {
    "qwen3_coder": lambda t: (
        f"<tool_call>\n<function=note>\n<parameter=text>\n{t}\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": lambda t: f"<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>{t}</arg_value>\n</tool_call>",
    "seed": lambda t: (
        f"<seed:tool_call>\n<function=note>\n<parameter=text>{t}</parameter>\n</function>\n</seed:tool_call>"
    ),
    "minimax": lambda t: (
        f'<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">{t}</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_texts_are_raw_and_may_be_anything(name: NotationKey) -> None:
    tokenizer = byte_tokenizer()
    text = WRITTEN[name](TEXT)
    for several in (False, True):
        matcher = matcher_of(calls_grammar([NOTE], NOTATIONS[name], {}, several=several), tokenizer)
        ids = tokenizer.encode(text + ("\n" + text if several and name != "minimax" else "")).ids
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    (part,) = OutputFormat(name, types=parameter_types(tools(NOTE))).reader().add(text, final=True)
    assert part.call is not None and json.loads(part.call.arguments) == {"text": TEXT}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a+"},
        {"type": "string", "maxLength": 3},
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
        {"enum": ["a", 1]},
        {"enum": 3},
        {"anyOf": 3, "type": "string", "$ref": "#"},
        False,
    ],
    ids=str,
)
def test_limits_of_raw_texts_need_an_array(schema: Any) -> None:
    """`RequestReader` then asks for the calls as a JSON array, whose strings a grammar can limit."""
    limited = {"name": "f", "parameters": {"properties": {"text": schema}}}
    assert calls_grammar([NOW, limited], NOTATIONS["glm"], {}, several=True) is None
    assert calls_grammar([NOW, limited], NOTATIONS["hermes"], {}, several=True) is not None
    assert calls_grammar([NOW], NOTATIONS["mistral"], {}, several=True) is None
    odd = {"name": "a\n<arg_key>", "parameters": {"required": 3}}
    assert calls_grammar([odd], NOTATIONS["glm"], {}, several=True) is None
    assert calls_grammar([odd], NOTATIONS["hermes"], {}, several=True) is not None


def test_reasoning_may_end_with_a_special_token() -> None:
    tokenizer = byte_tokenizer("[/THINK]")
    special = {"[/THINK]": tokenizer.token_to_id("[/THINK]")}
    for given, text in ((special, 'a [ b[/THINK]\n{"a": 1}'), ({}, 'a [ b</think>\n{"a": 1}')):
        end = "[/THINK]" if given else "</think>"
        matcher = matcher_of(behind_reasoning(("json_schema", '{"type": "object"}'), end, given), tokenizer)
        ids = tokenizer.encode(text).ids
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
