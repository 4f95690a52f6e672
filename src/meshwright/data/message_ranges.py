"""Finds where each message is in the rendered text of a chat, for templates that do not mark answers with `{% generation %}`.

A template may write an earlier answer differently from the last answer. It may also drop its reasoning, move a system message or join two
messages. The text of the first n messages is therefore not always a prefix of the text of the whole chat. This module puts marks into the
contents instead and renders two chats:

    marked chat   The real chat, with one mark before and one mark after each content. Without its marks, the rendered text must be equal to
                  the text of the chat.
    outline       A chat with the same roles and the same kinds of messages, but with the content "x" in each message, also with marks. The
                  template writes the same text between two contents here as in the real chat.

The outline shows how to divide the text between two contents. For this it is compared with two other renderings: of the first messages
only, and of the first messages with the generation prompt. An example, where `|` is a cut:

    question | <|im_end|>⏎<|im_start|>assistant⏎ | answer <|im_end|> | ⏎<|im_start|>user⏎ | question
               end of the question, and the prompt  range of the answer  header of the next message
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.data.chat_template import TemplateRefusal
from meshwright.data.spelled_tokens import any_of

ASSISTANT = "assistant"
Span = tuple[int, int]
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
FIRST_MARK = 0x100000
MOST_MESSAGES = 0x7FF0
"""Longest chat, in messages. Each message needs two marks, and there are 2 · 0x7FF0 of them."""
MARKS = re.compile("[\U00100000-\U0010ffdf]")
"""Matches a mark: a private-use code point. Message n has the marks FIRST_MARK + 2n (before) and FIRST_MARK + 2n + 1 (after)."""
REASONING = re.compile(r"<think>|<\|channel>thought")
"""Matches the start of reasoning. If a prompt ends with it, it counts as part of the answer: a model writes the text that follows it."""
END_OF_REASONING = "</think>"
OPENING_TAG = re.compile(r"<\w{1,32}>\s*")
"""Matches a tag at the start of a content, such as <tool_response>. It stays outside the marks, because a template may search for it."""
CLOSING_TAG = re.compile(r"\s*</\w{1,32}>\Z")
"""Matches the tag at the end of a content, which also stays outside the marks."""
SHORT = "x"
MOST_OUTLINES = 4096


class InexactTemplate(Exception):
    """The range of a message in the text of a chat is not certain."""


class MessageParts(NamedTuple):
    """A message, cut into the text that is marked (`core`) and the text around it.

    If the message has no content, `core` is the name of its last tool call. If it has no tool call either, `core` is empty.
    """

    kind: tuple[Any, ...]
    """Two messages of equal kind have the same outline."""
    before: str = ""
    """Content before `core`, for example reasoning and an opening tag."""
    core: str = ""
    after: str = ""
    """Content after `core`, for example a closing tag."""
    short_before: str = ""
    """`before` with its reasoning replaced by "x"; the outline uses it."""
    is_call: bool = False
    """Whether `core` is the name of a tool call."""


class Mark(NamedTuple):
    """A mark that was found in a rendered text."""

    message: int
    """Index of the message in the chat."""
    ends: bool
    """Whether the mark is the one after the content; else it is the one before."""
    at: int
    """Position in the text without marks, in characters."""


class Marked(NamedTuple):
    """A rendered text without its marks, and the marks in ascending order of their positions."""

    text: str
    marks: list[Mark]

    def between(self, first: int | None, second: int | None) -> str:
        """The text between two marks, given by their indices in `marks`. None as `first` is the start of the text, as `second` its end."""
        return self.text[self.at(first, 0) : self.at(second, len(self.text))]

    def at(self, number: int | None, otherwise: int) -> int:
        """The position of mark `number`; `otherwise` if it is None."""
        return otherwise if number is None else self.marks[number].at

    def behind(self, mark: Mark | None) -> str:
        """The text after the last mark. Raises InexactTemplate if the last mark and `mark` are not of the same message and side."""
        last = self.marks[-1] if self.marks else None
        if (last is None) != (mark is None) or (last and mark and last[:2] != mark[:2]):
            raise InexactTemplate("it changes the order of the messages before it")
        return self.text[0 if last is None else last.at :]


class MessagePlace(NamedTuple):
    """How to find the range of one message in a text whose marks are in the order of the outline.

    The text around the range is: mark `before`, `lead`, the range, `behind`, mark `after`. Marks are given by their indices. None as
    `before` is the start of the text, and None as `after` its end. A user's message has its own first mark as `before` and an empty `lead`.
    """

    before: int | None
    lead: str
    """Text between mark `before` and the range. Of an answer: the end of the message before it, and the generation prompt."""
    after: int | None
    behind: str
    """Text between the range and mark `after`."""
    end: str
    """Token that the range ends with; empty without one."""
    missing: str = ""
    """Text to append to the chat, so that its last answer is ended. Some templates end an answer only by the token that begins the next
    message, and no message follows the last answer."""

    def range_in(self, chat: Marked) -> Span:
        """The range of the message in `chat`. Raises InexactTemplate if the text around it differs from the outline."""
        begin = chat.at(self.before, 0)
        after = chat.at(self.after, len(chat.text))
        start = begin + len(self.lead)
        stop = after - len(self.behind)
        whole = chat.text.startswith(self.lead, begin) and chat.text.endswith(self.behind, start, after)
        if stop < start or not whole or not chat.text.endswith(self.end, start, stop):
            raise InexactTemplate("what is written around it depends on the contents")
        return start, stop


class MessageRanges:
    """Finds the ranges of messages in the texts that a chat template renders. Outlines are cached by the kinds of the messages."""

    def __init__(self, render: Callable[..., str], added: Iterable[str], special: Iterable[str]) -> None:
        """`render` is the method of a ChatTemplate. `added` are all added tokens of the tokenizer; `special` are those that are special."""
        self._render = render
        self._added = _search_for(added)
        self._special = _search_for(special)
        self._outlines: dict[Any, _Outline] = {}

    def find(
        self, text: str, messages: Sequence[Message], tools: Tools, wanted: Sequence[int]
    ) -> tuple[str, list[Span]]:
        """The text of the chat, and a range (start, stop) in it for each message index of `wanted`, in the order of `wanted`.

        `text` is the rendered chat. A range begins after the header of its message and ends after its end token. The returned text differs
        from `text` only if the template ends an answer by the start of the next message: then that start is appended after the last answer.
        Raises InexactTemplate if a range is not certain, and TemplateRefusal if a message contains one of the code points used as marks.
        """
        if not wanted:
            return text, []
        if (found := MARKS.search(text)) is not None:
            raise TemplateRefusal(f"a message contains U+{ord(found[0]):X}, a code point for private use")
        if len(messages) > MOST_MESSAGES:
            raise InexactTemplate(f"it has {len(messages):,} messages, expected at most {MOST_MESSAGES:,}")
        parts = [_parts(message) for message in messages]
        contents = [f"{part.before}{_marked(number, part.core)}{part.after}" for number, part in enumerate(parts)]
        chat = self.marked(map(_with, messages, parts, contents), tools)
        if chat.text != text:
            raise InexactTemplate(f"{_place_of_difference(chat, text)} is written otherwise if its content is another")
        key = (*(part.kind for part in parts), tools is not None)
        if (known := self._outlines.get(key)) is not None:
            try:
                return known.ranges(chat, wanted)
            except InexactTemplate:
                pass  # the template may depend on a value that is not part of the key, so make a new outline
        outline = _Outline(self, messages, parts, tools)
        if len(self._outlines) < MOST_OUTLINES:
            self._outlines[key] = outline
        return outline.ranges(chat, wanted)

    def marked(self, messages: Iterable[Message], tools: Tools, *, prompt: bool = False) -> Marked:
        """Render messages that contain marks, and take the marks out. Raises InexactTemplate if the template refuses the messages."""
        try:
            text = self._render(list(messages), tools, add_generation_prompt=prompt)
        except TemplateRefusal as error:
            raise InexactTemplate(f"the template refuses a part of the chat: {error}") from None
        marks = []
        pieces = []
        end = 0
        for count, found in enumerate(MARKS.finditer(text)):
            message, ends = divmod(ord(found[0]) - FIRST_MARK, 2)
            marks.append(Mark(message, bool(ends), found.start() - count))
            pieces.append(text[end : found.start()])
            end = found.end()
        return Marked("".join([*pieces, text[end:]]), marks)

    def added_in(self, text: str) -> list[re.Match[str]]:
        """The matches of added tokens in a text."""
        return [] if self._added is None else list(self._added.finditer(text))

    def common(self, *texts: str) -> str:
        """The longest common prefix of the texts that does not cut an added token of any of them."""
        common = _common_beginning(texts)
        for text in texts:
            cut = (found.start() for found in self.added_in(text) if found.start() < len(common) < found.end())
            common = common[: next(cut, len(common))]
        return common

    def special_in(self, text: str) -> list[re.Match[str]]:
        """The matches of special tokens in a text."""
        return [] if self._special is None else list(self._special.finditer(text))

    def next_special(self, text: str) -> str:
        """The special token at the start of a text, together with the white space before it; empty if the text starts with other text."""
        found = self.special_in(text)
        return text[: found[0].end()] if found and not text[: found[0].start()].strip() else ""


class _Outline:
    """A chat with the content "x" in each message, and the places of its messages, which are found when they are first needed."""

    def __init__(
        self, ranges: MessageRanges, messages: Sequence[Message], parts: Sequence[MessageParts], tools: Tools
    ) -> None:
        self._of = ranges
        self._parts = parts
        self._tools = tools
        short = [
            f"{part.short_before}{_marked(number, SHORT if part.core else '')}{part.after}"
            for number, part in enumerate(parts)
        ]
        self._messages = list(map(_with, messages, parts, short))
        self._whole = ranges.marked(self._messages, tools)
        self._sequence = [mark[:2] for mark in self._whole.marks]
        self._places: dict[int, MessagePlace] = {}
        first = ranges.added_in(self._whole.text)
        self._openers = set[str]()
        """The added tokens at the very start of the text: the token that begins a text, and the token that begins a turn."""
        end = 0
        for found in first:
            if self._whole.text[end : found.start()].strip():
                break
            self._openers.add(found[0])
            end = found.end()

    def ranges(self, chat: Marked, wanted: Sequence[int]) -> tuple[str, list[Span]]:
        """The text of `chat` and the ranges of the `wanted` messages in it. Raises InexactTemplate if a range is not certain."""
        sequence = [mark[:2] for mark in chat.marks]
        if sequence != self._sequence:
            differing = next((a for a, b in zip(sequence, self._sequence, strict=False) if a != b), (0, False))
            raise InexactTemplate(f"messages[{differing[0]}] is written otherwise if its content is another")
        text = chat.text
        spans = []
        for message in wanted:
            try:
                if message not in self._places:
                    self._places[message] = self._place(message)
                place = self._places[message]
                start, stop = place.range_in(chat)
            except InexactTemplate as error:
                raise InexactTemplate(f"messages[{message}]: {error}") from None
            if place.missing:
                text += place.missing
                stop = len(text)
            spans.append((start, stop))
        return text, spans

    def _place(self, message: int) -> MessagePlace:
        """Compare renderings of the outline to find the place of a message. Raises InexactTemplate."""
        marks = self._whole.marks
        own = [number for number, mark in enumerate(marks) if mark.message == message]
        if self._parts[message].core:
            own = self._own_marks(message, own)
            before = own[0] - 1 if own[0] else None
            last = own[-1]
            after = own[-1] + 1
        else:
            before = max((number for number, mark in enumerate(marks) if mark.message < message), default=None)
            last = before
            after = 0 if before is None else before + 1
        after = None if after >= len(marks) else after
        is_answer = self._role(message) == ASSISTANT
        if is_answer:
            lead = self._lead(message, before, own[0] if own else after)
        elif own:
            before = own[0]
            lead = ""
        else:
            raise InexactTemplate("it has no content")
        end, behind, missing = self._end(message, last, after, lead)
        return MessagePlace(before, lead, after, behind, end, missing)

    def _own_marks(self, message: int, numbers: list[int]) -> list[int]:
        """From `numbers`, which are the marks of a message, keep only the marks in the message's own text.

        The name of a tool call can appear a second time, in the text of the tool's result.
        """
        first = numbers
        if self._parts[message].is_call:
            alone = self._of.marked(self._messages[: message + 1], self._tools)
            first = numbers[: sum(mark.message == message for mark in alone.marks)]
        consecutive = first == list(range(first[0], first[0] + len(first))) if first else False
        if not consecutive or (len(first) != 2 and not self._parts[message].is_call):
            what = "tool call" if self._parts[message].is_call else "content once and as it is"
            raise InexactTemplate(f"the template does not write its {what}")
        return first

    def _role(self, message: int) -> str:
        return self._messages[message]["role"]

    def _lead(self, message: int, before: int | None, own: int | None) -> str:
        """The text between mark `before` and an answer: the end of the message before, and the prompt of the answer.

        `own` is the first mark of the answer's content. Three renderings write this text before the answer: the generation prompt, the
        answer as the last message, and the answer inside the chat. Their common prefix, without the start of reasoning, is the result.
        """
        mark = None if before is None else self._whole.marks[before]
        earlier = self._messages[:message]
        prompt = self._of.marked(earlier, self._tools, prompt=True).behind(mark)
        plain = {"role": self._role(message), "content": _marked(message, SHORT)}
        alone = self._of.marked([*earlier, plain], self._tools)
        numbers = [number for number, each in enumerate(alone.marks) if each.message == message]
        if len(numbers) != 2:
            raise InexactTemplate("the template does not write its content once and as it is")
        Marked(alone.text, alone.marks[: numbers[0]]).behind(mark)
        written = alone.between(numbers[0] - 1 if numbers[0] else None, numbers[0])
        lead = self._of.common(prompt, written, self._whole.between(before, own))
        reasoning = REASONING.search(lead)
        lead = lead if reasoning is None else lead[: reasoning.start()]
        rest = prompt[len(lead) :].strip()
        if rest and not REASONING.match(rest):
            raise InexactTemplate("add_generation_prompt does not write what precedes the answer")
        unwritten = not rest and written[len(lead) :].strip() != ""
        if unwritten and prompt == self._of.marked(earlier, self._tools).behind(mark):
            raise InexactTemplate("add_generation_prompt does not add the header of the assistant")
        return lead

    def _end(self, message: int, last: int | None, after: int | None, lead: str) -> tuple[str, str, str]:
        """Three texts at the end of a message: the token that ends its range, the text between the range and mark `after`, the missing end.

        `last` is the last mark of the message. If no special token ends an answer, the special token that begins the next message is used
        as its end, unless that token also begins answers. The third text is this token if the answer is the last message, else it is empty.
        """
        of = self._of
        written = self._whole.between(last, after)
        mark = None if last is None else self._whole.marks[last]
        if after is None:
            end = self._without_next(written)
        else:
            alone = of.marked(self._messages[: message + 1], self._tools).behind(mark)
            end = of.common(written, alone)
            while (tokens := of.added_in(end)) and self._ends_with_opener(end, tokens):
                end = end[: tokens[-1].start()]
        missing = ""
        if self._role(message) == ASSISTANT and not self._is_ended(end):
            following = self._followed(message, mark) if after is None else written
            token = of.next_special(following.removeprefix(end))
            if token.strip() in self._openers and token.strip() in lead:
                token = ""
            missing, end = (token, end) if after is None else ("", end + token)
        tokens = of.added_in(end)
        if tokens and not end[tokens[-1].end() :].strip():
            end = end[: tokens[-1].end()]
        return (tokens[-1][0] if tokens and end.endswith(tokens[-1][0]) else ""), written[len(end) :], missing

    def _is_ended(self, end: str) -> bool:
        """Whether a text ends with a special token, apart from white space."""
        tokens = self._of.special_in(end)
        return bool(tokens) and not end[tokens[-1].end() :].strip()

    def _ends_with_opener(self, end: str, tokens: list[re.Match[str]]) -> bool:
        """Whether `end`, which contains these added `tokens`, ends with a token that begins a turn and has another token before it."""
        return len(tokens) > 1 and tokens[-1][0] in self._openers and not end[tokens[-1].end() :].strip()

    def _without_next(self, end: str) -> str:
        """`end` cut before the header of a next message, which some templates append at the end of a chat."""
        tokens = self._of.added_in(end)
        openers = [token for token in tokens[1:] if token[0] in self._openers]
        return end[: openers[0].start()] if openers else end

    def _followed(self, message: int, mark: Mark | None) -> str:
        """The text that the template writes between an answer and a next message; empty if the template refuses a next message."""
        role = "tool" if self._messages[message].get("tool_calls") else "user"
        number = len(self._messages)
        following = {"role": role, "content": _marked(number, SHORT)}
        try:
            longer = self._of.marked([*self._messages[: message + 1], following], self._tools)
        except InexactTemplate:
            return ""
        at = next((n for n, each in enumerate(longer.marks) if each.message == number), 0)
        before = longer.marks[at - 1] if at else None
        return longer.between(at - 1, at) if before and mark and before[:2] == mark[:2] else ""


def _parts(message: Message) -> MessageParts:
    """Cut a message into the text to mark and the text around it. Reasoning, white space and tags stay outside."""
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    text = content if isinstance(content, str) else ""
    cut = text.rfind(END_OF_REASONING) + len(END_OF_REASONING) if END_OF_REASONING in text else 0
    core = text[cut:].strip()
    kind = (message["role"], content is None, len(calls), *sorted(message))
    if not core:
        name = _name(calls[-1]) if calls else ""
        return MessageParts((*kind, text.strip() == "" and text, bool(name)), core=name, is_call=bool(name))
    at = text.index(core, cut)
    before = text[cut:at]
    after = text[at + len(core) :]
    if core[0] == "<" and (tag := OPENING_TAG.match(core)) and tag.end() < len(core):
        before = before + tag[0]
        core = core[tag.end() :]
    if core[-1] == ">" and (tag := CLOSING_TAG.search(core, max(0, len(core) - 64))) and tag.start():
        core = core[: tag.start()]
        after = tag[0] + after
    reasoning = text[:cut]
    opening = "<think>" if "<think>" in reasoning else ""
    short = f"{opening}\n{SHORT}\n{END_OF_REASONING}" if reasoning else ""
    return MessageParts((*kind, before, after, short), reasoning + before, core, after, short + before)


def _name(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _with(message: Message, parts: MessageParts, text: str) -> Message:
    """The message with `text` in place of its content, or in place of the name of its last tool call if `parts.is_call`."""
    if not parts.is_call:
        return {**message, "content": text} if parts.core else message
    *calls, last = message["tool_calls"]
    function = last.get("function")
    named = {**last, "name": text} if function is None else {**last, "function": {**function, "name": text}}
    return {**message, "tool_calls": [*calls, named]}


def _marked(number: int, text: str) -> str:
    mark = FIRST_MARK + 2 * number
    return f"{chr(mark)}{text}{chr(mark + 1)}" if text else ""


def _place_of_difference(chat: Marked, text: str) -> str:
    """The message, as `messages[n]`, in whose text the first difference between `chat` and `text` is."""
    same = len(_common_beginning((chat.text, text)))
    message = next((mark.message for mark in reversed(chat.marks) if mark.at <= same), 0)
    return f"messages[{message}]"


def _common_beginning(texts: Sequence[str]) -> str:
    """The characters that all texts begin with."""
    # Of sorted texts, the first and the last differ at the earliest position.
    first = min(texts)
    last = max(texts)
    different = (at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1])
    return first[: next(different, len(first))]


def _search_for(words: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches the longest of `words` at a position; None if there are no words."""
    pattern = any_of(filter(None, words))
    return re.compile(pattern) if pattern else None
