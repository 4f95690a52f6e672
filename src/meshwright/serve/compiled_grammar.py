"""Compiles a grammar with llguidance (the extra `grammar`), within limits. This module imports no torch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.spec.errors import BadInput

Notation = Literal["json_schema", "regex", "lark"]
LIMITS: Mapping[str, Any] = {
    "max_items_in_row": 5000,  # an object needs about two items for each optional key, an enum one for each object
    "step_lexer_fuel": 50_000,  # with this, a mask of a difficult pattern takes about 10 ms
    "max_lexer_states": 50_000,  # up to 2 kB for each state
    "verbose_errors": False,
}
"""Limits of llguidance's parser."""


class BadGrammar(BadInput):
    """A grammar that cannot be used: it is wrong or exceeds a limit, or the engine lacks a package or a tokenizer for it."""

    code = "grammar"


@dataclass(frozen=True)
class Grammar:
    """A grammar that the generated text of a request must match as a whole."""

    notation: Notation
    text: str
    """The schema as JSON, the regular expression, or the grammar in Lark's notation with the rule `start`."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of JSON that is valid for a schema (an object, or its JSON). An empty schema allows any JSON."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def compiled(library: Any, tokens: Any, grammar: Grammar) -> Any:
    """Return llguidance's matcher of a grammar, after computing its first mask. Raises BadGrammar.

    `library` is the llguidance module, `tokens` its LLTokenizer. The library releases the GIL while it works.
    """
    if grammar.notation == "json_schema":
        _check_json(grammar.text)
    limits = library.LLParserLimits(**LIMITS)
    converted = getattr(library.LLMatcher, f"grammar_from_{grammar.notation}")(grammar.text)
    matcher = library.LLMatcher(tokens, converted, log_level=0, limits=limits)
    if matcher.is_error():
        raise BadGrammar(f"grammar: this {grammar.notation} cannot be used: {first_line(matcher.get_error())}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise BadGrammar(exceeded(matcher))
    return matcher


def exceeded(matcher: Any) -> str:
    """Return the error message for a matcher that has stopped with an error."""
    reason = first_line(matcher.get_error())
    return f"grammar: it is too complex to be followed, or the text cannot go on: {reason}; simplify the grammar"


def _check_json(text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"grammar: the schema is not JSON: {error}") from None


def llguidance() -> Any:
    """Return the llguidance module. Raises BadGrammar if the extra `grammar` is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise BadGrammar("grammar: needs the extra `grammar`: pip install 'meshwright[grammar]'") from None


def first_line(message: str) -> str:
    """Return the first line of a message of the library."""
    return message.strip().split("\n", 1)[0]
