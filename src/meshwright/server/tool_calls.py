"""Tool calls in a model's text: found as the text arrives, in the notation of the model's family."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from meshwright.serve.stops import StringSearch

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
    """How a notation writes calls; each is an object with a name and arguments."""

    opening: str | None
    """Text that begins calls anywhere; None: only `first` begins them."""
    before: Sequence[str]
    """Texts that may come before an object, also between two. None begins another that comes after it."""
    after: Sequence[str] = ()
    """Texts that may follow an object at once."""
    first: str = ""
    """Characters that begin calls at the start of the text."""
    named: bool = False
    """Whether the name may come before an object of arguments alone."""


_SYNTAX: Mapping[Notation, _Syntax] = {
    "hermes": _Syntax("<tool_call>", ("<tool_call>",), ("</tool_call>",)),
    "llama3": _Syntax("<|python_tag|>", ("<|python_tag|>", ";"), first="{"),
    "mistral": _Syntax("[TOOL_CALLS]", ("[TOOL_CALLS]", "[", ","), ("]",), named=True),
    "array": _Syntax(None, ("[", ","), ("]",), first="["),
}
_SEARCH = {
    notation: StringSearch(() if syntax.opening is None else (syntax.opening,)) for notation, syntax in _SYNTAX.items()
}
_NAMED = re.compile(r"([\w.-]{1,256})(?:\[CALL_ID\]\w{1,256})?(?:\[ARGS\])?\s{0,64}(?={)")
"""Name before the arguments in Mistral's newer notation."""
_BEGINS_NAMED = re.compile(r"[\w.-]{1,256}(?:\[\w{0,7}\]?\w{0,256}){0,2}\s{0,64}")
"""Every text that may become one with such a name."""
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
    """Splits one text into plain text and calls. Text that is no call after all stays text.

    The result does not depend on the pieces in which the text comes, and each character is looked at a few times at most:
    only the text of what may be a call is held, in pieces, and parsed once.
    """

    def __init__(self, notation: Notation, *, parallel: bool = True) -> None:
        """Without `parallel` only the first call counts."""
        self._syntax, self._search, self._parallel = _SYNTAX[notation], _SEARCH[notation], parallel
        self._take: Callable[[str], str | None] = self._begin
        """Reader of the text that comes next; returns the end of it that another takes, or None once it has taken all."""
        self._space: list[str] = []
        """White space that is left out if a call follows."""
        self._held: list[str] = []
        """Text after it that may belong to a call."""
        self._tail = ""
        """The end of the text so far that cannot be told yet: of limited length."""
        self._state = 0
        """State of the search for the opening."""
        self._after_call = False
        """Whether a call came just before."""
        self._shown = False
        """Whether there was plain text."""
        self._object = _ObjectEnd()
        self._object_text: list[str] = []
        self._name: str | None = None
        """Name that came before the object."""
        self._plain: list[str] = []
        self._calls: list[ToolCall] = []
        self.count = 0
        """Calls so far."""

    def add(self, text: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        """The plain text that is certain, and the calls that `text` completes; `final`: no more follows."""
        self._read(text)
        while final and self._take in (self._before_object, self._read_object):
            if self._after_call and self._is_separators():
                break
            self._read(self._give_up(""))
        else:
            if final:
                self._plain += [*self._space, self._tail]
        plain, self._plain = "".join(self._plain), []
        calls, self._calls = self._calls, []
        return plain, calls

    def _read(self, text: str) -> None:
        rest: str | None = text
        while rest:
            rest = self._take(rest)

    def _begin(self, text: str) -> str | None:
        """Read white space at the start of the text, and decide whether a call begins there."""
        rest = self._take_space(text)
        if not rest:
            return None
        self._take = self._before_object if rest[0] in self._syntax.first else self._read_plain
        return rest

    def _read_plain(self, text: str) -> str | None:
        """Read up to the opening of calls; white space before it, and what may begin it, are held."""
        self._state, end, opening = self._search.advance(self._state, text)
        before = self._tail + text[:end]
        marker = len(opening) if opening is not None else self._search.length[self._state]
        certain, marker_text = before[: len(before) - marker], before[len(before) - marker :]
        shown = certain.rstrip()
        if shown:
            self._shown = True
            self._plain += [*self._space, shown]
            self._space.clear()
        if len(shown) < len(certain):
            self._space.append(certain[len(shown) :])
        if opening is None:
            self._tail = marker_text
            return None
        self._tail, self._state, self._after_call = "", 0, False
        self._held.append(marker_text)
        self._take = self._before_object
        return text[end:]

    def _before_object(self, text: str) -> str | None:
        """Read white space and marks before an object, and a name."""
        if not self._tail:
            text = self._take_space(text)
            if not text:
                return None
        text, self._tail = self._tail + text, ""
        syntax, closes = self._syntax, self._after_call and not self._held
        for mark in (*syntax.before, *(syntax.after if closes else ())):
            if text.startswith(mark):
                if mark in syntax.before:
                    self._held.append(mark)
                else:
                    self._space.clear()
                return text[len(mark) :]
            if mark.startswith(text):
                self._tail = text
                return None
        named = _NAMED.match(text) if syntax.named else None
        if named is not None or text[0] == "{":
            self._name = None if named is None else named[1]
            start = 0 if named is None else named.end()
            if start:
                self._held.append(text[:start])
            self._object, self._take = _ObjectEnd(), self._read_object
            return text[start:]
        if syntax.named and _BEGINS_NAMED.fullmatch(text):
            self._tail = text
            return None
        return self._give_up(text)

    def _read_object(self, text: str) -> str | None:
        """Read up to the end of an object, and take it as a call if it is one."""
        end = self._object.find(text)
        if end is None:
            self._object_text.append(text)
            return None
        call = None
        if end:
            self._object_text.append(text[:end])
            call = _read_call("".join(self._object_text), self._name)
            text = text[end:]
        if call is None:
            return self._give_up(text)
        if self._parallel or not self.count:
            # Templates of Mistral's models accept ids of nine letters or digits only.
            self._calls.append(ToolCall(self.count, secrets.token_hex(5)[:9], *call))
            self.count += 1
        for held in (self._space, self._held, self._object_text):
            held.clear()
        self._after_call, self._take = True, self._before_object
        return text

    def _give_up(self, text: str) -> str:
        """Return the text to read on with, as no call is held: behind its first opening."""
        held = "".join(self._held) + "".join(self._object_text) + self._tail
        if self._after_call and not (self._held or self._shown):
            self._space.clear()
        begin = -1 if self._syntax.opening is None else held.find(self._syntax.opening)
        if begin >= 0:
            end = begin + len(self._syntax.opening or "")
            self._shown = True
            self._plain += [*self._space, held[:end]]
            self._space.clear()
            held = held[end:]
        self._held.clear()
        self._object_text.clear()
        self._tail, self._state, self._after_call, self._take = "", 0, False, self._read_plain
        return held + text

    def _is_separators(self) -> bool:
        """Whether what is held only separates calls."""
        return not (self._object_text or self._tail) and self._syntax.opening not in self._held

    def _take_space(self, text: str) -> str:
        """Hold the white space at the beginning; returns the rest."""
        end = len(text) - len(text.lstrip())
        if end:
            (self._held if self._held else self._space).append(text[:end])
        return text[end:]


class _ObjectEnd:
    """Search for the end of a JSON object in a text that comes in pieces, the first of which begins with it."""

    _STRING = re.compile(r'["\\\x00-\x1f]')
    """Characters of a string that need attention."""
    _OTHER = re.compile(r"[^ \t\n\r:,+\-.0-9Eaeflnrstu]")
    """Such characters outside of strings: all but white space, numbers and words."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Return where the object ends in this piece; None if it goes on, 0 if it is no object of JSON."""
        position = 0
        while True:
            if self._escaped and text[position:]:
                self._escaped, position = False, position + 1
            found = (self._STRING if self._in_string else self._OTHER).search(text, position)
            if found is None:
                return None
            position = found.start()
            character = text[position]
            position += 1
            if character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                if character != "\\":
                    return 0
                self._escaped = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return position
            else:
                return 0


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _read_call(text: str, name: str | None) -> tuple[str, str] | None:
    """Name and arguments of a call by its object, or by its name and the object of its arguments; None if it is no call."""
    try:
        value = _DECODER.decode(text)
        if name is None:
            name, value = value["name"], value["arguments" if "arguments" in value else "parameters"]
            if isinstance(value, str):
                value = _DECODER.decode(value)
    except (ValueError, KeyError, RecursionError):
        return None
    arguments = {} if value is None else value
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
