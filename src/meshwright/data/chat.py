"""Chats as documents: the text that a template renders from the messages of a record, and the ranges of this text to train on.

A template may mark what the assistant writes with `{% generation %}`. If it does not, `message_ranges` finds the range of each message.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data.chat_forms import COMMON_KEYS, MESSAGES, BadChat, ChatForm, form_of, no_form
from meshwright.data.chat_template import (
    REASONING_KEYS,
    SPECIAL_TOKENS_MAP,
    TEMPLATE,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
    ChatTemplate,
    TemplateRefusal,
    folder_template,
    folder_tool_template,
    read_object,
    read_text,
    special_tokens,
)
from meshwright.data.corpus import CorpusDocument, FromFile, checked_document
from meshwright.data.file_formats import LAYOUTS
from meshwright.data.inputs import InputFile, NotRead, Reason
from meshwright.data.message_ranges import ASSISTANT, END_OF_REASONING, InexactTemplate, MessageRanges, Span
from meshwright.data.preference_forms import preference_form_of
from meshwright.data.records import BadDocument, DataRecord, first_records, read_records
from meshwright.data.spelled_tokens import SpelledTokens
from meshwright.durable.writes import digest, write_durable
from meshwright.spec.errors import BadInput, nearest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
WeightedSpan = tuple[int, int, float]
"""A range [start, stop) of characters, and its weight in the loss."""
CHAT_ENDINGS = [ending for ending, layout in LAYOUTS.items() if layout in ("lines", "json", "parquet")]
"""Endings of files that may have chats; csv has text only."""
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "weight", "train")
"""Known keys of a message. Other keys are allowed if the template contains them."""
UNUSED_KEYS = (
    "functions",
    "function_call",
    "documents",
    "chat_template_kwargs",
    "history",
    "label",
    "rejected_response",
)
"""Keys of a chat that have a meaning for other programs. They are refused, because their content would be lost."""
ALMOST = 0.85
"""If an unknown key is at least this similar to a known one, it is taken for a misspelling."""
LEAST_WEIGHT = 1e-6
MOST_WEIGHT = 1e6
"""Least and largest weight of a message or chat. A weight of 0 is allowed too."""


@dataclass(frozen=True)
class ChatFiles:
    """The template of a tokenizer's folder, or a template given in its place.

    `config` is the folder's tokenizer_config.json, with tokens added that only special_tokens_map.json names."""

    source: str
    config: dict[str, Any]
    name: str
    tool_source: str | None = None
    """Template for chats with tools, if it differs."""

    @property
    def digest(self) -> str:
        """Digest of the templates and of the tokens to which they can refer."""
        tools = [] if self.tool_source is None else [self.tool_source]
        tokens = map(repr, sorted(special_tokens(self.config).items()))
        return digest("\n".join([self.source, *tools, *tokens]).encode())

    def write(self, folder: Path) -> None:
        """Write the template, and the configuration without its own template, into `folder`."""
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        write_durable(folder / TEMPLATE, self.source.encode())
        if self.tool_source is not None:
            (folder / TOOL_TEMPLATE).parent.mkdir(exist_ok=True)
            write_durable(folder / TOOL_TEMPLATE, self.tool_source.encode())
        write_durable(folder / TOKENIZER_CONFIG, json.dumps(config, indent=1, ensure_ascii=False).encode() + b"\n")


def read_chat_files(tokenizer: Path, template: Path | None) -> ChatFiles:
    """The chat files of `tokenizer`, a folder or a file in it. `template`, if given, replaces its template. Raises BadInput without one."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = {**special_tokens(read_object(folder / SPECIAL_TOKENS_MAP)), **read_object(folder / TOKENIZER_CONFIG)}
    source = read_text(template) if template is not None else folder_template(folder, config)
    if source is None:
        raise BadInput(
            f"{folder}: has no chat template; expected {TEMPLATE} or chat_template in {TOKENIZER_CONFIG}, or --chat-template FILE"
        )
    tool_source = folder_tool_template(folder, config) if template is None else None
    return ChatFiles(source, config, str(template or folder), tool_source)


def reads_chats(file: InputFile) -> bool:
    """Whether files of this format can have chats."""
    return not file.format.refused and file.format.layout in {LAYOUTS[ending] for ending in CHAT_ENDINGS}


@dataclass(frozen=True)
class Chat:
    """A checked chat: its messages as templates expect them, and the weight of each message in the loss."""

    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[dict[str, Any]] | None = None


@dataclass
class ChatCounts:
    """Number of chats that were read, by form, and of their messages, by role."""

    forms: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    without_reasoning: int = 0
    """Chats whose last answer has reasoning that the template does not write."""

    def __str__(self) -> str:
        forms = ", ".join(f"{count:,} {form}" for form, count in self.forms.most_common())
        return f"chats: {forms}; messages: " + ", ".join(
            f"{count:,} {role}" for role, count in self.roles.most_common()
        )


class ChatReader:
    """Reads the chats of files. Messages of the given `roles` are trained on."""

    unknown_form: Reason = "no chats"
    default_form: Any = MESSAGES
    """The form that is assumed for a file without records."""

    def __init__(self, files: ChatFiles, roles: Sequence[str], tokenizer: Tokenizer, now_ns: int) -> None:
        """`now_ns` is the time that a template may write. It stays the same when a run is repeated, so the output does too.

        Raises BadInput if the template cannot be used.
        """
        self.name = files.name
        self.roles = tuple(roles)
        self.counts = ChatCounts()
        now = datetime.fromtimestamp(now_ns // 10**9, UTC)
        self._sources = {False: files.source, True: files.tool_source or files.source}
        """The template for chats without tools (False) and with tools (True)."""
        self._template = ChatTemplate(files.source, special_tokens(files.config), lambda: now, files.tool_source)
        self._spelled = SpelledTokens(tokenizer, special_tokens(files.config).values())
        self._named_by_template = lru_cache(maxsize=None)(self._is_named)
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._ranges = MessageRanges(self._template.render, added, self._spelled.special)

    def read(self, file: InputFile, key: str | None) -> Iterator[FromFile]:
        """The chats of a file. Their form is recognised from the first records; `key` is the key of a list of messages, if given.

        Raises BadInput if the template writes a chat in such a way that the ranges of its messages are not certain.
        """
        if not reads_chats(file):
            yield NotRead(file.name, "format not read", f"chats are in {', '.join(CHAT_ENDINGS)} files", file.size)
            return
        form = self.default_form
        first = None
        for record in first_records(file):
            first = first or record
            if (found := self.form_of(record, key)) is not None:
                form = found
                first = None
                break
        if first is not None:
            yield NotRead(file.name, self.unknown_form, self.no_form(first, key), file.size)
            return
        for record in read_records(file, form.keys[0], (*form.keys, *form.also, *COMMON_KEYS, *UNUSED_KEYS)):
            if not isinstance(record, DataRecord):
                yield record
                continue
            try:
                yield from self._documents(file, record, form)
            except BadChat as error:
                yield BadDocument(record.where, str(error))

    def form_of(self, names: Collection[str], key: str | None) -> Any:
        """The form of records with these keys; None if they match none."""
        return form_of(names, key)

    def no_form(self, record: Mapping[str, Any], key: str | None) -> str:
        """Why a record matches no form."""
        if key is None and (form := preference_form_of(list(record))) is not None:
            return f"its records have {', '.join(map(repr, record))}, preferences of the form {form.name}: --preferences reads them"
        return no_form(record, key)

    def _documents(self, file: InputFile, record: DataRecord, form: Any) -> Iterator[CorpusDocument | BadDocument]:
        """The documents of a record of this form. Raises BadChat before it yields any."""
        chat = self._chat(record, form)
        document = self._document(file, record, chat)
        if isinstance(document, CorpusDocument):
            self.counts.forms[form.name] += 1
            self._count(chat, document)
        yield document

    def _count(self, chat: Chat, document: CorpusDocument) -> None:
        self.counts.roles.update(message["role"] for message in chat.messages)
        self.counts.without_reasoning += _reasoning(chat.messages) not in document.text

    def _chat(self, record: DataRecord, form: ChatForm) -> Chat:
        """The chat of a record. Raises BadChat."""
        tools = self._tools(record.fields.get("tools"))
        key = form.keys[0]
        self._check_record(record, (*form.keys, *form.also, *COMMON_KEYS, "id"))
        of_chat = _weight(record.fields.get("weight"), "weight")
        messages = []
        weights = []
        for index, message in enumerate(form.messages(record.fields)):
            where = f"{key}[{index}]"
            messages.append(checked_message(message, where))
            self._check_keys(messages[-1], where, bool(tools))
            weights.append(of_chat * self._weight(messages[-1], where))
        return Chat(messages, weights, tools)

    def _tools(self, value: Any) -> list[dict[str, Any]] | None:
        """The tools of a chat. Raises BadChat if they are not a list, or if the template does not write tools."""
        tools = _tools(value)
        if tools and not self._named_by_template("tools", True):
            raise BadChat(f"tools: the chat template of {self.name} does not write them")
        return tools

    def _check_record(self, record: DataRecord, known: Sequence[str]) -> None:
        """Raise BadChat if a record has a key that would be lost, or that looks like a misspelling of a `known` one."""
        for name in (name for name, value in record.fields.items() if value is not None and name not in known):
            near = nearest(name, (*known, "train"), ALMOST)
            if name in UNUSED_KEYS or near is not None:
                hint = f" (nearest: {near!r})" if near else ""
                hint += "; --preferences reads it" if name in ("label", "rejected_response") else ""
                raise BadChat(f"{name}: unknown key{hint}; a chat has {', '.join(map(repr, known))}")

    def _check_keys(self, message: Mapping[str, Any], where: str, with_tools: bool) -> None:
        """Raise BadChat if a message has a key that would be lost."""
        for name in message:
            if name == "tool_calls" and message[name] and not self._named_by_template(name, with_tools):
                raise BadChat(f"{where}.{name}: the chat template of {self.name} does not write them")
            if name not in MESSAGE_KEYS and not self._named_by_template(name, with_tools):
                near = nearest(name, MESSAGE_KEYS)
                hint = f" (nearest: {near!r})" if near else ""
                known = f"known: {', '.join(MESSAGE_KEYS)}, and what the chat template of {self.name} reads"
                raise BadChat(f"{where}.{name}: unknown key{hint}; {known}")

    def _is_named(self, key: str, with_tools: bool) -> bool:
        """Whether the word `key` occurs in the template."""
        return re.search(rf"\b{re.escape(key)}\b", self._sources[with_tools]) is not None

    def _weight(self, message: dict[str, Any], where: str) -> float:
        """The weight of a message in the loss. Removes `weight` and `train` from the message. Raises BadChat."""
        given = [name for name in ("weight", "train") if name in message]
        train = message.pop("train", None)
        if not (train is None or isinstance(train, bool)):
            raise BadChat(f"{where}.train: expected true or false, got {json.dumps(train, default=str)}")
        stated = message.pop("weight", None)
        weight = _weight(stated, f"{where}.weight")
        if stated is not None and train is not None and train != (weight != 0):
            raise BadChat(f"{where}: weight and train contradict each other")
        weight = 0.0 if train is False else weight
        if given and weight and message["role"] not in self.roles:
            raise BadChat(f"{where}.{given[0]}: to train on role {message['role']}, name it in --train-roles")
        return weight

    def _document(self, file: InputFile, record: DataRecord, chat: Chat) -> CorpusDocument | BadDocument:
        try:
            text, spans = self._fitting(chat)
        except TemplateRefusal as error:
            return BadDocument(record.where, f"the chat template refuses the messages: {error}")
        except InexactTemplate as error:
            raise BadInput(
                f"{record.where}: the chat template of {self.name} does not show which tokens to train on: {error}; "
                "put {% generation %} and {% endgeneration %} around what the assistant writes, in a copy for --chat-template"
            ) from None
        if not spans:
            without = "the weight of each is 0" if not any(chat.weights) else ""
            roles = f"no text of role {' or '.join(self.roles)}"
            return BadDocument(record.where, f"nothing to train on: {without or roles}")
        document = checked_document(file, record, text, tuple((start, stop) for start, stop, _ in spans))
        if isinstance(document, BadDocument):
            return document
        if any(weight != 1 for _, _, weight in spans):
            document = replace(document, span_weights=tuple(weight for _, _, weight in spans))
        if not self._spelled.found_in((chat.messages, chat.tools)):
            return document
        marked = self._spelled.write(self._render, chat.messages, chat.tools)
        if not text.startswith(marked.text):  # `text` may be longer, by the end of its last answer
            return BadDocument(record.where, "the chat template changes a special token that a message spells")
        return replace(document, spelled=marked.spelled)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return self._template.render(messages, tools, add_generation_prompt=False)

    def _fitting(self, chat: Chat) -> tuple[str, list[WeightedSpan]]:
        """Like `text_and_spans`, but if necessary with the arguments of tool calls as JSON text or as an object, as the template needs."""
        try:
            return self.text_and_spans(chat.messages, chat.tools, chat.weights)
        except TemplateRefusal:
            if not any(message.get("tool_calls") for message in chat.messages):
                raise
            chat.messages[:] = [_with_arguments(message, _as_text) for message in chat.messages]
            return self.text_and_spans(chat.messages, chat.tools, chat.weights)

    def text_and_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        weights: Sequence[float] | None = None,
    ) -> tuple[str, list[WeightedSpan]]:
        """The text of a chat, and the ranges of its characters to train on, ascending, each with the weight of its message.

        `weights` has the weight of each message; a message of weight 0 is not trained on. None means that all are 1.

        If a template ends answers only by the start of the next message, this start is appended after the last answer, too.

        Raises TemplateRefusal if the template refuses the messages, and InexactTemplate if the ranges are not certain.
        """
        spans: list[WeightedSpan] = []
        searched = set(self.roles)
        weights = [1.0] * len(messages) if weights is None else weights
        if ASSISTANT in searched and GENERATION.search(self._sources[bool(tools)]):
            text, generated = self._template.generated_spans(messages, tools)
            searched.remove(ASSISTANT)
            of_spans = self._weights_of(generated, text, messages, tools, weights)
            spans = [(*span, weight) for span, weight in zip(generated, of_spans, strict=True) if weight]
        else:
            text = self._render(messages, tools)
        wanted = [index for index, message in enumerate(messages) if message["role"] in searched and weights[index]]
        text, found = self._ranges.find(text, messages, tools, wanted)
        ranges = [(*span, weights[index]) for index, span in zip(wanted, found, strict=True) if span[1] > span[0]]
        return text, sorted([*spans, *ranges])

    def _weights_of(
        self,
        spans: Sequence[Span],
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        weights: Sequence[float],
    ) -> list[float]:
        """The weight of each generated span: that of its answer. Raises InexactTemplate if a span covers answers of different weights."""
        answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        if len(answers) == len(spans):
            return [weights[index] for index in answers]
        if all(weights[index] == 1 for index in answers):
            return [1.0] * len(spans)
        _, ranges = self._ranges.find(text, messages, tools, answers)
        found = []
        for begin, end in spans:
            inside = {
                weights[index]
                for index, (start, stop) in zip(answers, ranges, strict=True)
                if begin < stop and start < end
            }
            if len(inside) > 1:
                raise InexactTemplate("it writes answers of different weights in one generation block")
            found.append(next(iter(inside), 1.0))
        return found


def _weight(value: Any, where: str) -> float:
    """The weight that a message or chat states; 1 if it states none. Raises BadChat."""
    if value is None:
        return 1.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and value < 0:
        raise BadChat(f"{where}: expected no negative weight, got {value}; data cannot train a model away from a text")
    if not (number and (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT)):
        expected = f"0, or a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:,.0f}"
        raise BadChat(f"{where}: expected {expected}, got {json.dumps(value, default=str)}")
    return float(value)


def _reasoning(messages: Sequence[Mapping[str, Any]]) -> str:
    """The reasoning of the last message if that is an answer, from a separate key or from the content; empty if there is none."""
    last = messages[-1]
    if last["role"] != ASSISTANT:
        return ""
    named = next((value for key in REASONING_KEYS if isinstance(value := last.get(key), str)), "")
    content = last["content"] or ""
    inside = content.rpartition(END_OF_REASONING)[0].rpartition("<think>")[2] if END_OF_REASONING in content else ""
    return (named or inside).strip()


def checked_message(value: Any, where: str) -> dict[str, Any]:
    """A message without null values, except for its content. Text parts of a content are joined. Raises BadChat."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise BadChat(f"{where}: expected an object with a role")
    content = value.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else 0
    if not (isinstance(content, str) or (content is None and value.get("tool_calls"))):
        raise BadChat(f"{where}.content: expected text, or parts that are text")
    return _with_arguments(
        {**{key: item for key, item in value.items() if item is not None}, "content": content}, _as_object
    )


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The message with `change` applied to the arguments of its tool calls, if these are objects with a function."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return {**message, "tool_calls": [changed(call) for call in calls]}


def _as_object(arguments: Any) -> Any:
    """If the arguments are JSON text, as in OpenAI's API, the object in it; otherwise the arguments as they are."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a chat. They may be JSON text, as in columns of parquet files. Raises BadChat."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise BadChat(f"tools: expected a list of objects, got text that is not JSON: {error}") from None
    if value and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise BadChat("tools: expected a list of objects")
    return value or None
