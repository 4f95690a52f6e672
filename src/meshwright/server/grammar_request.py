"""Reads the grammar that a request asks for: from `response_format` (OpenAI), or from the keys that vLLM has added.

Those are `structured_outputs` and the older `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import Fields, checked_text

LONGEST_SCHEMA = 64 << 10
"""Maximum number of characters of a schema, regular expression or grammar."""
_MEANING = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Characters with a special meaning in a regular expression."""


class GrammarRequest(NamedTuple):
    """A grammar, and the key of the body that asks for it.

    `notation` is `json_schema`, `regex` or `lark`; `text` is the grammar in this notation.
    """

    notation: str
    text: str
    key: str


def read_grammar(fields: Fields) -> GrammarRequest | None:
    """Return the grammar that a request asks for, or None. Raises RequestError for wrong values and for two grammars."""
    asked = [_response_format(fields), _structured_outputs(fields)]
    asked += [_of_key(fields, f"guided_{form}", f"guided_{form}", read) for form, read in _FORMS.items()]
    found = [grammar for grammar in asked if grammar is not None]
    if len(found) > 1:
        raise RequestError(400, f"{found[1].key}: excludes {found[0].key}", param=found[1].key)
    return found[0] if found else None


def schema_grammar(schema: Any, key: str) -> tuple[str, str]:
    """Return (notation, text) of the grammar of a JSON schema.

    `key` names the body's key. Raises RequestError if it is too long.
    """
    return "json_schema", text_of_length(json.dumps(schema), key)


def _response_format(fields: Fields) -> GrammarRequest | None:
    """Read `response_format`: a JSON schema, or any JSON object."""
    section = fields.section("response_format")
    if section is None:
        return None
    form = section.text("type", "text", ("text", "json_object", "json_schema"))
    schema: Any = {"type": "object"}
    described = section.section("json_schema")
    if form == "json_schema":
        if described is None:
            raise wrong("response_format.json_schema", "an object with the key schema", None)
        described.ignore("name", "description", "strict")
        schema = described.take("schema")
        described.finish()
        if not isinstance(schema, dict):
            raise wrong("response_format.json_schema.schema", "an object", schema)
    section.finish()
    if form == "text":
        return None
    return GrammarRequest(*schema_grammar(schema, "response_format.json_schema.schema"), "response_format")


def _structured_outputs(fields: Fields) -> GrammarRequest | None:
    """Read `structured_outputs`, an object with exactly one of the forms of a grammar."""
    section = fields.section("structured_outputs")
    if section is None:
        return None
    asked = [_of_key(section, form, f"structured_outputs.{form}", read) for form, read in _FORMS.items()]
    if section.flag("json_object"):
        asked.append(GrammarRequest(*schema_grammar({"type": "object"}, "structured_outputs"), "structured_outputs"))
    section.finish({"disable_fallback": False, "disable_any_whitespace": False, "disable_additional_properties": False})
    found = [grammar for grammar in asked if grammar is not None]
    if len(found) != 1:
        forms = ", ".join((*_FORMS, "json_object"))
        raise RequestError(400, f"structured_outputs: expected one of {forms}", param="structured_outputs")
    return found[0]._replace(key="structured_outputs")


def _of_key(fields: Fields, name: str, key: str, read: Callable[[Any, str], tuple[str, str]]) -> GrammarRequest | None:
    """Read one key whose value is a grammar in one form. `key` is its path in the body, for errors."""
    value = fields.take(name)
    return None if value is None else GrammarRequest(*read(value, key), key)


def _schema(value: Any, key: str) -> tuple[str, str]:
    """Return (notation, text) of a schema, which may also be given as JSON text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(text_of_length(value, key))
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, dict):
        raise wrong(key, "a JSON schema, an object", value)
    return schema_grammar(schema, key)


def _regex(value: Any, key: str) -> tuple[str, str]:
    return "regex", text_of_length(_checked(value, key), key)


def _choice(value: Any, key: str) -> tuple[str, str]:
    """Return (notation, text) of a regular expression that matches any of the given texts."""
    if not isinstance(value, list) or not value:
        raise wrong(key, "a list of texts", value)
    texts = [_MEANING.sub(r"\\\g<0>", _checked(text, key)) for text in value]
    return "regex", text_of_length("|".join(texts), key)


def _lark(value: Any, key: str) -> tuple[str, str]:
    text = _checked(value, key)
    if "::=" in text:
        raise wrong(key, 'a grammar in Lark\'s notation, as start: "yes" | "no"', value)
    return "lark", text_of_length(text, key)


_FORMS: Mapping[str, Callable[[Any, str], tuple[str, str]]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}
"""Reads the value of a key and returns (notation, text), by the form of the grammar."""


def _checked(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(key, "text of at least one character", value)
    return checked_text(value, key)


def text_of_length(text: str, key: str) -> str:
    """Return `text`, a schema, regular expression or grammar from the body's `key`. Raises RequestError if it is too long."""
    if len(text) > LONGEST_SCHEMA:
        raise wrong(key, f"at most {LONGEST_SCHEMA} characters", text)
    return text
