"""Tool calls in a model's text: found as the text arrives, in the notation of the model's family."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from meshwright.serve.stops import possible_start

Notation = Literal["hermes", "llama3", "mistral", "array"]
"""`array` is the JSON array that a request's grammar asks for."""


class ToolCall(NamedTuple):
    """A call of a tool."""

    index: int
    """Number of the call within the text, from 0."""
    id: str
    name: str
    arguments: str
    """Arguments as the text of a JSON object."""

    @property
    def message(self) -> dict[str, Any]:
        """The call in a whole answer, in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallFormat(NamedTuple):
    """Format of the tool calls of a request."""

    notation: Notation
    parallel: bool = True
    """Whether a text may have several calls."""
    named: bool = False
    """Whether the request names the function: then a call is no reason for the end of a text."""

    def reader(self) -> ToolCallReader:
        """A reader for one text."""
        return ToolCallReader(self.notation, parallel=self.parallel)


class _Syntax(NamedTuple):
    opening: str | None
    """Text that begins calls anywhere; None: only `first` begins them."""
    first: str
    """Characters that begin calls at the start of the text."""
    between: Sequence[str]
    """Texts before, between and after the objects of calls."""


_SYNTAX: Mapping[Notation, _Syntax] = {
    "hermes": _Syntax("<tool_call>", "", ("<tool_call>", "</tool_call>")),
    "llama3": _Syntax("<|python_tag|>", "{", ("<|python_tag|>", ";")),
    "mistral": _Syntax("[TOOL_CALLS]", "", ("[TOOL_CALLS]", "[", "]", ",")),
    "array": _Syntax(None, "[", ("[", "]", ",")),
}
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?={)")
"""Name before the arguments in Mistral's newer notation."""
_BEGINS_NAMED = re.compile(r"[\w.-]+(?:\[\w*\]?\w*)*\s*")
_OTHER_NOTATIONS = ("<function=", "<arg_key>")
"""Texts in templates whose models put something else than JSON between Hermes' markers."""


def template_notation(template: str) -> Notation | None:
    """The notation of the calls that a chat template describes; None if it is none of these."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return None if any(text in template for text in _OTHER_NOTATIONS) else "hermes"
    return "llama3" if '{"name": function name, "parameters":' in template or "<|python_tag|>" in template else None


class ToolCallReader:
    """Splits one text into plain text and calls. Text that is no call after all stays text."""

    def __init__(self, notation: Notation, *, parallel: bool = True) -> None:
        """Without `parallel` only the first call counts."""
        self._syntax, self._notation, self._parallel = _SYNTAX[notation], notation, parallel
        self._held = ""
        """Text that may belong to a call."""
        self._inside: bool | None = None
        """Whether an object is expected; None at the start of the text."""
        self._opened = ""
        """Text that began the calls; empty once a call has followed."""
        self._may_end = False
        """Whether an object may be complete: parsing is tried only then."""
        self.count = 0
        """Calls so far."""

    def add(self, text: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        """The plain text that is certain, and the calls that `text` completes; `final`: no more follows."""
        self._held += text
        self._may_end = "}" in text or final
        plain, calls = "", []
        searching = bool(self._held)
        while searching:
            before, call, searching = self._advance()
            plain += before
            if call is not None and (self._parallel or not self.count):
                name, arguments = call
                # Templates of Mistral's models accept ids of nine letters or digits only.
                calls.append(ToolCall(self.count, secrets.token_hex(5)[:9], name, arguments))
                self.count += 1
        if final:
            rest = self._opened + self._held
            plain += "" if self.count and rest.isspace() else rest
        return plain, calls

    def _advance(self) -> tuple[str, tuple[str, str] | None, bool]:
        """Plain text, a call, and whether more can be found in the text held now."""
        if self._inside is None:
            return self._begin()
        return self._take_object() if self._inside else self._search()

    def _begin(self) -> tuple[str, None, bool]:
        start = self._held.lstrip()
        if start:
            self._inside = start[0] in self._syntax.first
        return "", None, bool(start)

    def _search(self) -> tuple[str, None, bool]:
        """Return the plain text before the opening of calls, without white space at its end."""
        text, opening = self._held, self._syntax.opening
        if opening is None:
            self._held = ""
            return text, None, False
        position = text.find(opening)
        if position >= 0:
            self._inside, self._opened = True, opening
            self._held = text[position + len(opening) :]
            return text[:position].rstrip(), None, True
        certain = text[: len(text) - possible_start(text, opening)].rstrip()
        self._held = text[len(certain) :]
        return certain, None, False

    def _take_object(self) -> tuple[str, tuple[str, str] | None, bool]:
        text = self._held.lstrip()
        for part in self._syntax.between:
            if text.startswith(part):
                if part == self._syntax.opening:
                    self._opened = part
                self._held = text[len(part) :]
                return "", None, True
            if part.startswith(text):
                return "", None, False
        named = _NAMED.match(text) if self._notation == "mistral" else None
        start = 0 if named is None else named.end()
        if text[start] == "{":
            if not self._may_end:
                return "", None, False
            try:
                value, end = _DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                if "</tool_call>" not in text or self._notation != "hermes":
                    return "", None, False
            else:
                call = _call(value) if named is None else (named[1], json.dumps(value, ensure_ascii=False))
                if call is not None:
                    self._held, self._opened = text[end:], ""
                    return "", call, True
        elif self._notation == "mistral" and _BEGINS_NAMED.fullmatch(text):
            return "", None, False
        plain, self._opened, self._inside = self._opened, "", False
        self._held = self._held if plain else text
        return plain, None, True


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _call(value: Any) -> tuple[str, str] | None:
    """Name and arguments of an object; None if it is no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return None
    if arguments is None and ("arguments" in value or "parameters" in value):
        arguments = {}
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
