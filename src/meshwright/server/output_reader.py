"""Splits a model's answer into reasoning, text and calls of tools as it arrives, in the notation of the model's family."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from meshwright.serve.stops import StringSearch
from meshwright.server.call_syntax import NoCall, ReadCall, TextSource, Types, Wait, object_text, read_calls
from meshwright.server.notations import NOTATIONS, NotationKey

PartKind = Literal["reasoning", "text", "call"]
MOST_REREAD = 256 << 10
"""After so many characters that looked like calls and were not, the rest of an answer is read as text."""


class ToolCall(NamedTuple):
    """A call of a tool."""

    index: int
    """Number of the call within the answer, from 0."""
    id: str
    name: str
    arguments: str
    """Arguments as the text of a JSON object."""

    @property
    def message(self) -> dict[str, Any]:
        """The call in a whole answer, in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class AnswerPart(NamedTuple):
    """A part of an answer: a piece of reasoning or of text, or a whole call."""

    kind: PartKind
    text: str
    call: ToolCall | None = None


class OutputFormat(NamedTuple):
    """How the answers of a request are read."""

    notation: NotationKey
    calls: bool = True
    """Whether there may be calls."""
    parallel: bool = True
    """Whether an answer may have several calls; else only the first counts."""
    named: bool = False
    """Whether the request names the function to call. The finish reason is then not `tool_calls`, as in OpenAI's API."""
    types: Types = {}
    """JSON types of the parameters of each function, for notations that write values as raw text."""
    reasons: bool = True
    """Whether there may be reasoning."""
    inside: bool = False
    """Whether the prompt has begun the reasoning."""

    @property
    def special(self) -> bool:
        """Whether special tokens of the answer belong to the notation."""
        return self.calls or NOTATIONS[self.notation].special

    def reader(self) -> OutputReader:
        """A reader for one answer."""
        return OutputReader(self)


class OutputReader:
    """Reads one answer. Text that looked like a call and is not one stays text.

    The result does not depend on how the answer is divided into pieces. Each character is looked at a few times at most: only text that
    may be a call is held back, and it is parsed once. After `MOST_REREAD` characters of failed calls all further text is text.
    """

    def __init__(self, format: OutputFormat) -> None:
        self._format = format
        self._notation = NOTATIONS[format.notation]
        self._source = TextSource()
        self._space: list[str] = []
        """White space that is left out if a call or the end of the reasoning comes next."""
        self._shown = self._reasoned = False
        """Whether there was text; whether there was reasoning."""
        self._openings = self._notation.opening if format.calls else ()
        self._reread = 0
        """Number of characters that looked like calls and were not."""
        self._parts: list[AnswerPart] = []
        self._idle: tuple[StringSearch, Callable[[str], str]] | None = None
        """While nothing but white space is held back: the search for the end of text or reasoning, and the function that shows it."""
        self._plain = False
        """Whether everything from here on is text."""
        self.count = 0
        """Number of calls so far."""
        self.reasoning = format.inside
        """Whether the text so far ends within reasoning."""
        self.may_reason = format.reasons
        """Whether reasoning may still come."""
        self._ids: set[str] = set()
        self._reading = self._channels() if self._notation.channels else self._answer()
        next(self._reading)

    def go_on(self, text: str) -> str | None:
        """Fast path for text that only continues the text or the reasoning: what can be shown now. Else None.

        After None the caller passes the same text to `add`.
        """
        if self._plain:
            return text
        idle = self._idle
        return None if idle is None or idle[0].may_begin(text) else idle[1](text)

    def add(self, text: str, *, final: bool) -> list[AnswerPart]:
        """The parts that are certain now; `final`: no more text follows."""
        kind: PartKind = "reasoning" if self.reasoning else "text"
        shown = self.go_on(text)
        if shown:
            self._parts.append(AnswerPart(kind, shown))
        elif shown is None and text:
            self._send(text)
        if final and not self._plain:
            self._source.final = True
            self._send("")
        parts = self._parts
        self._parts = []
        return parts

    def _send(self, text: str) -> None:
        try:
            self._reading.send(text)
        except StopIteration:
            assert self._source.final, "an answer is read to its end"

    def _answer(self) -> Wait:
        """Read reasoning, if it comes first, then text and calls."""
        source = self._source
        markers = self._notation.reasoning if self._format.reasons else None
        if self._format.inside:
            assert markers is not None, "the prompt has begun reasoning"
            space = yield from self._reasoning(markers[1])
        else:
            space = yield from self._leading_space()
            if markers is not None and (yield from source.begins(markers[:1])) is not None:
                source.rest = source.rest[len(markers[0]) :]
                space = yield from self._reasoning(markers[1])
        self.may_reason = False
        self._hold(space)
        if self._format.calls and source.rest and source.rest[0] in self._notation.first:
            yield from self._calls("")
        yield from self._content()

    def _leading_space(self) -> Wait:
        """Take the white space that comes next; returns it."""
        source = self._source
        taken = list[str]()
        while (yield from source.any()):
            end = len(source.rest) - len(source.rest.lstrip())
            taken.append(source.rest[:end])
            source.rest = source.rest[end:]
            if source.rest:
                break
        return "".join(taken)

    def _show_until(self, search: StringSearch, kind: PartKind) -> Wait:
        """Show text or reasoning up to the next mark that `search` finds; returns the mark, or None at the end of the answer."""
        shown = self._shown_text if kind == "text" else self._shown_reasoning
        return (yield from self._until(search, lambda text: self._show(text, kind), (search, shown)))

    def _until(
        self,
        search: StringSearch,
        pass_on: Callable[[str], None],
        idle: tuple[StringSearch, Callable[[str], str]] | None = None,
    ) -> Wait:
        """Pass text on up to the next mark that `search` finds; returns the mark, or None at the end of the answer.

        `idle` is what `_idle` is while no mark has begun.
        """
        source = self._source
        state = 0
        tail = ""
        while True:
            if not state and not source.rest:
                self._idle = idle
            more = yield from source.any()
            self._idle = None
            if not more:
                break
            state, end, found = search.advance(state, source.rest)
            text = tail + source.rest[:end]
            source.rest = source.rest[end:]
            certain = len(text) - (search.length[state] if found is None else len(found))
            tail = text[certain:]
            if certain:
                pass_on(text[:certain])
            if found is not None:
                return found
        if tail:
            pass_on(tail)
        return None

    def _reasoning(self, end: str) -> Wait:
        """Read reasoning. Returns the white space after it that belongs to the text.

        An opening mark of calls ends it too, unless the end mark of the reasoning comes later.
        """
        source = self._source
        inside = _search((end, *self._openings))
        self.reasoning = True
        found = yield from self._show_until(inside, "reasoning")
        if found is not None and found != end:
            held = [found]
            found = yield from self._until(_search((end,)), held.append)
            if found is None:
                source.rest = "".join(held)
            else:
                self._show("".join(held), "reasoning")
        self.reasoning = False
        self._space.clear()
        return (yield from self._leading_space()).lstrip("\n")

    def _content(self) -> Wait:
        """Read text and calls to the end of the answer."""
        if not self._openings and not self._source.rest:
            self._flush()
            self._plain = not self._source.final
        while (opening := (yield from self._show_until(_search(self._openings), "text"))) is not None:
            yield from self._calls(opening)
        self._flush()

    def _flush(self) -> None:
        """Show the white space that was held back."""
        if self._space:
            self._parts.append(AnswerPart("text", "".join(self._space)))
            self._space.clear()

    def _calls(self, opening: str) -> Wait:
        """Read calls as long as they come; `opening` has been taken. If the text is not a call, it is shown as text."""
        source = self._source
        after_call = False
        if opening in self._notation.before:
            source.held.append(opening)
        else:
            source.rest = opening + source.rest
        while True:
            try:
                if not (yield from self._marks(after_call=after_call)):
                    if after_call and not any(text in self._openings for text in source.held):
                        source.held.clear()
                        self._space.clear()
                        return
                    raise NoCall
                calls = yield from read_calls(source, self._notation, self._format.types)
            except NoCall:
                self._give_up(after_call=after_call)
                return
            for call in calls:
                self._add_call(call)
            self._space.clear()
            source.held.clear()
            after_call = True

    def _marks(self, *, after_call: bool) -> Wait:
        """Take white space and marks around calls; returns False at the end of the answer.

        With `after_call` a call has just ended, so the marks that close a list of calls are taken too.
        """
        source = self._source
        notation = self._notation
        while True:
            space = yield from self._leading_space()
            if space:
                (source.held if source.held else self._space).append(space)
            if not source.rest:
                return False
            closing = notation.after if after_call and not source.held else ()
            mark = yield from source.begins([*notation.before, *closing])
            if mark is None:
                return True
            if mark in notation.before:
                source.take(len(mark))
            else:
                source.rest = source.rest[len(mark) :]
                self._space.clear()

    def _give_up(self, *, after_call: bool) -> None:
        """Show the opening mark of the held text as text, because the held text is not a call; read on after the mark.

        With `after_call` a call has just ended.
        """
        source = self._source
        held = "".join(self._source.held)
        if after_call and not (held or self._shown):
            self._space.clear()
        source.held.clear()
        self._reread += len(held)
        if self._reread > MOST_REREAD:
            self._openings = ()
        ends = [at + len(opening) for opening in self._notation.opening if (at := held.find(opening)) >= 0]
        end = min(ends, default=0)
        if end:
            self._show(held[:end])
        source.rest = held[end:] + source.rest

    def _add_call(self, call: ReadCall) -> None:
        if self.count and not self._format.parallel:
            return
        # Templates of Mistral's models accept ids of nine letters or digits only.
        id = secrets.token_hex(5)[:9]
        name = call.name
        if self._notation.numbered:
            name = call.name.removeprefix("functions.").rpartition(":")[0] or call.name
            id = id if call.name in self._ids else call.name
            self._ids.add(id)
        self._parts.append(AnswerPart("call", "", ToolCall(self.count, id, name, call.arguments)))
        self.count += 1

    def _show(self, text: str, kind: PartKind = "text") -> None:
        """Show text or reasoning."""
        if shown := self._shown_text(text) if kind == "text" else self._shown_reasoning(text):
            self._parts.append(AnswerPart(kind, shown))

    def _shown_text(self, text: str) -> str:
        """Text with the held white space before it; white space at its end is held back."""
        end = len(text.rstrip())
        self._shown = self._shown or end > 0
        return self._certain(text, end)

    def _shown_reasoning(self, text: str) -> str:
        """Reasoning, without the newlines at its beginning and end."""
        if not self._reasoned:
            text = text.lstrip("\n")
            self._reasoned = bool(text)
        return self._certain(text, len(text.rstrip("\n")))

    def _certain(self, text: str, end: int) -> str:
        """The held white space and the first `end` characters of a text. The rest, which is white space, is held back."""
        if end == len(text) and not self._space:
            return text
        shown = "".join([*self._space, text[:end]]) if end else ""
        if end:
            self._space.clear()
        self._hold(text[end:])
        return shown

    def _hold(self, space: str) -> None:
        if space:
            self._space.append(space)

    def _channels(self) -> Wait:
        """Read messages in channels (harmony): `<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>`, one after the other."""
        source = self._source
        ends = _search(("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"))
        while True:
            space = yield from self._leading_space()
            if not source.rest:
                return
            if (yield from source.begins(("<|start|>", "<|channel|>", "to="))) is None:
                self._hold(space)
                break
            header: list[str] = []
            if (yield from self._until(_search(("<|message|>",)), header.append)) is None:
                return
            recipient = _RECIPIENT.search("".join(header))
            channel = _CHANNEL.search("".join(header))
            body: list[str] = []
            if recipient is not None and self._format.calls:
                found = yield from self._until(ends, body.append)
                self._add_channel_call(recipient[1], "".join(body))
            elif channel is not None and channel[1] == "analysis":
                self._hold("\n\n" if self._reasoned else "")
                self.reasoning = True
                found = yield from self._show_until(ends, "reasoning")
                self.reasoning = False
            else:
                self._hold("\n\n" if self._shown else "")
                found = yield from self._show_until(ends, "text")
            self._space.clear()
            if found in ("<|start|>", "<|channel|>"):
                source.rest = found + source.rest
        yield from self._content()

    def _add_channel_call(self, recipient: str, text: str) -> None:
        try:
            self._add_call(ReadCall(recipient.removeprefix("functions."), object_text(text.strip())))
        except NoCall:
            self._show(text)


_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@lru_cache(maxsize=256)
def _search(marks: Sequence[str]) -> StringSearch:
    return StringSearch(marks)
