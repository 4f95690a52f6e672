"""Reads tool calls from the text of an answer, while the text arrives in parts.

`read_calls` reads one call, or a list of calls, by the pattern of the model's notation (`server.notations`). The readers are generators: a
reader yields when it needs more text, and the caller sends it the next part. So `name = yield from source.name(...)` reads a name, however
the text is divided into parts. A mark is a fixed text of the notation, such as `<tool_call>`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from meshwright.serve.stops import StringSearch
from meshwright.server.notations import Notation, Parameters, Sequences

Wait = Generator[None, str, Any]
"""A reader: a generator that yields when it needs more text. The next part of the text is sent to it."""
LONGEST_NAME = 256
"""Largest number of characters of a name. Also the largest number of characters that are looked at to find marks after a value."""
Types = Mapping[str, Mapping[str, Collection[str]]]
"""By function name and parameter name: the JSON types that the function's schema allows, such as "string" and "null"."""


class NoCall(Exception):
    """Raised if the text is not a call."""


class ReadCall(NamedTuple):
    """A call that was read from the text."""

    name: str
    """Name of the function."""
    arguments: str
    """The arguments: a JSON object as text."""


class TextSource:
    """The text of an answer, which arrives in parts. A reader takes characters from its beginning."""

    def __init__(self) -> None:
        self.rest = ""
        """Text that has arrived and that no reader has taken yet."""
        self.final = False
        """Whether all text has arrived."""
        self.held: list[str] = []
        """The text that was taken so far for a call. If the text turns out not to be a call, it becomes text of the answer again."""

    def more(self) -> Wait:
        """Wait for the next part of the text. Returns false at the end of the answer."""
        if self.final:
            return False
        self.rest += yield
        return not self.final

    def any(self) -> Wait:
        """Wait until `rest` is not empty. Returns false if the answer ends before."""
        while not self.rest:
            if not (yield from self.more()):
                return False
        return True

    def take(self, count: int) -> str:
        """Take the first `count` characters of `rest`, and add them to `held`. Returns them."""
        text = self.rest[:count]
        self.rest = self.rest[count:]
        self.held.append(text)
        return text

    def space(self) -> Wait:
        """Take white space."""
        while (yield from self.any()):
            end = len(self.rest) - len(self.rest.lstrip())
            self.take(end)
            if self.rest:
                return

    def begins(self, marks: Sequence[str]) -> Wait:
        """Return the first one of `marks` with which the remaining text begins, or None. No text is taken."""
        while True:
            for mark in marks:
                if self.rest.startswith(mark):
                    return mark
                if mark.startswith(self.rest) and not self.final:
                    break
            else:
                return None
            yield from self.more()

    def mark(self, mark: str) -> Wait:
        """Take white space and then `mark`. Raises NoCall if the text goes on with something else."""
        yield from self.space()
        if (yield from self.begins((mark,))) is None:
            raise NoCall
        self.take(len(mark))

    def name(self, stops: Sequence[str]) -> Wait:
        """Take the text before the first occurrence of one of `stops`, and return it without white space around it.

        Raises NoCall if there is none within `LONGEST_NAME` characters.
        """
        while True:
            ends = [end for stop in stops if (end := self.rest.find(stop)) >= 0]
            if ends and min(ends) <= LONGEST_NAME:
                return self.take(min(ends)).strip()
            if len(self.rest) > LONGEST_NAME + max(map(len, stops)) or not (yield from self.more()):
                raise NoCall

    def continues(self, sequences: Sequences) -> Wait:
        """Return whether the text goes on with one of `sequences`, a sequence of marks with white space between them. No text is taken.

        At the end of the answer, the first mark of a sequence is enough.
        """
        while True:
            states = [_sequence_state(self.rest, sequence) for sequence in sequences]
            if any(state is True for state in states):
                return True
            if not any(state is None for state in states) or len(self.rest) > LONGEST_NAME:
                return False
            if not (yield from self.more()):
                text = self.rest.lstrip()
                return any(text.startswith(sequence[0]) for sequence in sequences)

    def value(self, search: StringSearch, following: Sequences) -> Wait:
        """Take a value and its closing mark. Returns the value's text, without the mark.

        `search` finds the closing mark. A closing mark ends the value only if one of the sequences `following` comes after it; otherwise it
        belongs to the value. Raises NoCall if the answer ends before.
        """
        pieces: list[str] = []
        state = 0
        while (yield from self.any()):
            state, end, found = search.advance(state, self.rest)
            pieces.append(self.take(end))
            if found is None:
                continue
            state = 0
            if (yield from self.continues(following)):
                text = "".join(pieces)
                return text[: len(text) - len(found)]
        raise NoCall

    def bracketed(self, scanner: ObjectEnd, opening: str = "{") -> Wait:
        """Take a value that begins with the bracket `opening`, up to the end that `scanner` finds. Returns the text of the value.

        Raises NoCall if the text does not begin with the bracket, if it is malformed, or if the answer ends before the value.
        """
        yield from self.space()
        if not self.rest.startswith(opening):
            raise NoCall
        pieces: list[str] = []
        while (yield from self.any()):
            end = scanner.find(self.rest)
            if end == 0:
                raise NoCall
            pieces.append(self.take(len(self.rest) if end is None else end))
            if end is not None:
                return "".join(pieces)
        raise NoCall


def _sequence_state(text: str, marks: Sequence[str]) -> bool | None:
    """Return whether `text` begins with the sequence `marks`, with any white space before each mark. None if the text is too short."""
    for mark in marks:
        text = text.lstrip()
        if not text.startswith(mark):
            return None if mark.startswith(text) else False
        text = text[len(mark) :]
    return True


class ObjectEnd:
    """Finds the end of a value in brackets, in a text that arrives in parts. The first part must begin with the opening bracket."""

    def __init__(self, strings: str, escape: str, inside: str, outside: str) -> None:
        """Describe the syntax of the value.

        - `strings`: the quotation marks of strings. Brackets in a string do not count.
        - `escape`: the character that protects the next character in a string.
        - `inside`: regular expression for the characters in a string that must be looked at.
        - `outside`: regular expression for the characters outside of strings that must be looked at.
        """
        self._strings = strings
        self._escape = escape
        self._inside = re.compile(inside)
        self._outside = re.compile(outside)
        self._depth = 0
        self._string = ""
        self._escaped = False

    @classmethod
    def json(cls) -> ObjectEnd:
        """Make an object that finds the end of a JSON value. Control characters in strings, and unknown characters, are errors."""
        return cls('"', "\\", r'["\\\x00-\x1f]', r"[^ \t\n\r:,+\-.0-9Eaeflnrstu]")

    @classmethod
    def python(cls) -> ObjectEnd:
        """Make an object that finds the end of a Python list."""
        return cls("\"'", "\\", r"[\"'\\]", r"[\"'()\[\]{}]")

    def find(self, text: str) -> int | None:
        """Search the next part of the text. Returns the index after the value's end, None if the value goes on, 0 for an error."""
        position = 0
        while True:
            if self._escaped and text[position:]:
                self._escaped = False
                position = position + 1
            found = (self._inside if self._string else self._outside).search(text, position)
            if found is None:
                return None
            position = found.end()
            character = found[0]
            if self._string:
                if character == self._string:
                    self._string = ""
                elif character == self._escape:
                    self._escaped = True
                elif character not in self._strings:
                    return 0
            elif character in self._strings:
                if not self._depth:
                    return 0
                self._string = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return position if self._depth == 0 else 0
            else:
                return 0


_FIELD = re.compile(r"\{(\?[^}]*|[a-z]+)\}")


@lru_cache(maxsize=256)
def _items(pattern: str) -> Sequence[tuple[str, str]]:
    """Return the parts of a pattern of `Notation.patterns`, in order: ("text", TEXT), ("optional", TEXT) or (FIELD, "").

    Example: "<f={name}>{?X}" has the parts ("text", "<f="), ("name", ""), ("text", ">") and ("optional", "X").
    """
    items: list[tuple[str, str]] = []
    for index, part in enumerate(_FIELD.split(pattern)):
        if index % 2 and part.startswith("?"):
            items.append(("optional", part[1:]))
        elif index % 2:
            items.append((part, ""))
        elif part:
            items.append(("text", part))
    return items


_NAME = re.compile(r"""[^\s<>{}()\[\]"']{1,256}""")
_WORD = re.compile(r"[\w.:/-]{0,256}")


def read_calls(source: TextSource, notation: Notation, types: Types) -> Wait:
    """Read the text of one pattern. Returns its calls, a list of one or more `ReadCall`. Raises NoCall if the text is not a call.

    The marks before and after the pattern (`Notation.before` and `after`) are not read.
    """
    pattern = notation.patterns.get(source.rest[:1], notation.patterns[""])
    parts = _items(pattern)
    if parts[0][0] == "name" and not source.held:
        raise NoCall  # Without a mark before the name, any word could be a name.
    name = ""
    arguments = "{}"
    for index, (kind, text) in enumerate(parts):
        if kind == "text":
            yield from source.mark(text.strip())
        elif kind == "optional":
            yield from _optional(source, text)
        elif kind == "name":
            name = yield from _name(source, notation, parts[index + 1 :])
        elif kind == "call":
            written = yield from source.bracketed(ObjectEnd.json())
            name, arguments = _named_call(written)
        elif kind == "json":
            arguments = object_text((yield from source.bracketed(ObjectEnd.json())))
        elif kind == "python":
            return _python_calls((yield from source.bracketed(ObjectEnd.python(), "[")))
        elif kind == "gemma":
            arguments = json.dumps(_gemma_value((yield from _gemma_text(source))), ensure_ascii=False)
        elif kind == "params":
            assert notation.parameters is not None
            arguments = yield from _parameters(source, notation.parameters, types.get(name, {}))
    if not _NAME.fullmatch(name):
        raise NoCall
    if parts[-1][0] == "params":  # Only a mark of `Notation.after` shows that no further argument comes.
        yield from source.space()
        if (yield from source.begins(notation.after)) is None:
            raise NoCall
    return [ReadCall(name, arguments)]


def _name(source: TextSource, notation: Notation, after: Sequence[tuple[str, str]]) -> Wait:
    """Take the name of a function. It ends where the next part of the pattern begins; `after` has the parts after the name."""
    yield from source.space()
    kind, text = after[0]
    if kind == "text":
        return (yield from source.name([text[0] if text[0] == "\n" else text]))
    if kind == "params":
        assert notation.parameters is not None
        opening = notation.parameters.opening.partition("{")[0]
        return (yield from source.name(["\n", opening, *notation.after]))
    return (yield from _word(source))


def _optional(source: TextSource, mark: str) -> Wait:
    """Take `mark` if the text begins with it. After the mark `[CALL_ID]`, take the id too."""
    if (yield from source.begins((mark,))) is None:
        return
    source.take(len(mark))
    if mark == "[CALL_ID]":
        yield from _word(source)


def _word(source: TextSource) -> Wait:
    """Take the characters that match `_WORD`: letters, digits and some others. Raises NoCall if there are more than `LONGEST_NAME`."""
    while (match := _WORD.match(source.rest)) is not None and match.end() == len(source.rest):
        if len(source.rest) >= LONGEST_NAME or not (yield from source.more()):
            raise NoCall
    assert match is not None, "the pattern matches everywhere"
    return source.take(match.end())


def _parameters(source: TextSource, parameters: Parameters, types: Mapping[str, Collection[str]]) -> Wait:
    """Take arguments that are written one after the other, in the syntax `parameters`. Returns a JSON object as text.

    `types` has the JSON types of each parameter.
    """
    parts = _items(parameters.opening)
    search = _closing(parameters.closing)
    values: dict[str, Any] = {}
    while True:
        yield from source.space()
        if (yield from source.begins((parts[0][1],))) is None:
            return json.dumps(values, ensure_ascii=False)
        fields: dict[str, str] = {}
        for index, (kind, text) in enumerate(parts):
            if kind == "text":
                yield from source.mark(text)
            elif kind != "optional":
                fields[kind] = yield from source.name([parts[index + 1][1]])
        value = yield from source.value(search, parameters.next)
        if parameters.newlines:
            value = value.removeprefix("\n").removesuffix("\n")
        known = types.get(fields["key"], ("string",))
        if "string" in fields:  # In this notation the text says of each value whether it is a string.
            known = ("string",) if fields["string"] == "true" else ("object",)
        values[fields["key"]] = typed_value(value, known)


@lru_cache(maxsize=64)
def _closing(mark: str) -> StringSearch:
    return StringSearch((mark,))


def typed_value(text: str, types: Collection[str]) -> Any:
    """Convert the text of an argument to a value, by the JSON types that the parameter's schema allows.

    If the text cannot be converted, the result is the text itself. Example: "5" is "5" if `types` has "string", and else the number 5.
    """
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if "string" in types:
        return text
    if "boolean" in types and text.strip() in ("True", "False"):
        return text.strip() == "True"
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return text


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _decoded(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise NoCall from None


def object_text(text: str) -> str:
    """Return the text unchanged. Raises NoCall if it is not a JSON object."""
    if not isinstance(_decoded(text), dict):
        raise NoCall
    return text


def _named_call(text: str) -> tuple[str, str]:
    """Return the name and the arguments of a call that is written as one JSON object, such as `{"name": "f", "arguments": {"a": 1}}`.

    The key "parameters" is accepted in place of "arguments". Raises NoCall for another text.
    """
    value = _decoded(text)
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        raise NoCall
    key = "arguments" if "arguments" in value else "parameters"
    if key not in value:
        raise NoCall
    arguments = value[key]
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise NoCall
    return name, json.dumps(arguments, ensure_ascii=False)


_PYTHON_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def _python_calls(text: str) -> list[ReadCall]:
    """Return the calls of a Python list such as `[f(a=1), g(b="x")]`. Raises NoCall for any other text."""
    # Chat templates write newlines in strings without an escape. So models do it too, but Python does not allow it.
    text = _PYTHON_TEXT.sub(lambda found: found[0].replace("\n", "\\n").replace("\r", "\\r"), text.strip())
    try:
        tree = ast.parse(text, mode="eval").body
        calls = [_python_call(call) for call in tree.elts] if isinstance(tree, ast.List) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoCall from None
    if not calls:
        raise NoCall
    return calls


def _python_call(call: ast.expr) -> ReadCall:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("a call has arguments by name")
    arguments = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("a call has arguments by name")
        arguments[keyword.arg] = _python_value(keyword.value)
    return ReadCall(ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _python_value(value: ast.expr) -> Any:
    """Return the value of a Python literal. It may contain `true`, `false` and `null` of JSON. Raises ValueError for other expressions."""
    if isinstance(value, ast.Name) and value.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[value.id]
    if isinstance(value, ast.List):
        return [_python_value(item) for item in value.elts]
    if isinstance(value, ast.Dict):
        keys = [ast.literal_eval(key) for key in value.keys if key is not None]
        return {str(key): _python_value(item) for key, item in zip(keys, value.values, strict=True)}
    found = ast.literal_eval(value)
    if not isinstance(found, str | int | float | bool | None):
        raise ValueError("a literal of JSON")
    return found


_QUOTE = '<|"|>'
_GEMMA_OUTSIDE = StringSearch((_QUOTE, "{", "}", "[", "]"))
_GEMMA_STRING = StringSearch((_QUOTE,))


def _gemma_text(source: TextSource) -> Wait:
    """Take an object of arguments in Gemma's syntax, and return its text. In this syntax strings are between `<|"|>`."""
    yield from source.space()
    pieces: list[str] = []
    depth = state = 0
    in_text = False
    while (yield from source.any()):
        if not pieces and not source.rest.startswith("{"):
            raise NoCall
        state, end, found = (_GEMMA_STRING if in_text else _GEMMA_OUTSIDE).advance(state, source.rest)
        pieces.append(source.take(end))
        if found is None:
            continue
        state = 0
        if found == _QUOTE:
            in_text = not in_text
        else:
            depth += 1 if found in "{[" else -1
            if not depth:
                return "".join(pieces)
    raise NoCall


_GEMMA_PART = re.compile(r'\s*(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<mark>[{}\[\],:])|(?P<word>[^{}\[\],:<]+))', re.DOTALL)


def _gemma_value(text: str) -> Any:
    """Return the object that a text in Gemma's syntax describes. Raises NoCall if it is not such an object."""
    parts = [
        (found.lastgroup or "", found[found.lastgroup or 0]) for found in _GEMMA_PART.finditer(text) if found.lastgroup
    ]
    parts.reverse()
    try:
        value = _gemma_parsed(parts)
    except (IndexError, RecursionError):
        raise NoCall from None
    if parts or not isinstance(value, dict):
        raise NoCall
    return value


def _gemma_parsed(parts: list[tuple[str, str]]) -> Any:
    kind, text = parts.pop()
    if kind == "text":
        return text
    if kind == "word":
        return typed_value(text.strip(), ("null", "boolean"))
    if text == "[":
        items: list[Any] = []
        _gemma_items(parts, "]", lambda: items.append(_gemma_parsed(parts)))
        return items
    if text != "{":
        raise NoCall
    members: dict[str, Any] = {}

    def member() -> None:
        key = parts.pop()[1].strip()
        if parts.pop() != ("mark", ":"):
            raise NoCall
        members[key] = _gemma_parsed(parts)

    _gemma_items(parts, "}", member)
    return members


def _gemma_items(parts: list[tuple[str, str]], closing: str, read: Callable[[], None]) -> None:
    """Remove items with commas between them from the end of `parts` (which are in reverse order), and the bracket `closing` after them.

    `read` removes and stores one item. Raises NoCall if there is anything else between the items.
    """
    while parts[-1] != ("mark", closing):
        read()
        if parts[-1] == ("mark", ","):
            parts.pop()
        elif parts[-1] != ("mark", closing):
            raise NoCall
    parts.pop()
