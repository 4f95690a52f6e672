"""Chats as documents: the template's text of each line's messages, and the ranges of it to train on.

A template may mark what the assistant writes by `{% generation %}`. Otherwise the range of a message follows from the
text of the messages before it and up to it, which must each be a beginning of the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data.chat_template import (
    TEMPLATE,
    TOKENIZER_CONFIG,
    ChatTemplate,
    TemplateRefusal,
    folder_template,
    read_object,
    read_text,
    special_tokens,
)
from meshwright.data.corpus import BadDocument, Document, InputFile, Record, checked_document, read_records
from meshwright.durable.writes import digest, write_durable
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ASSISTANT = "assistant"
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
Span = tuple[int, int]


@dataclass(frozen=True)
class ChatFiles:
    """The template of a tokenizer's folder, or the one in its place; `config` is the folder's tokenizer_config.json."""

    source: str
    config: dict[str, Any]
    name: str

    @property
    def digest(self) -> str:
        """Digest of the template and of the tokens that it can name."""
        return digest("\n".join([self.source, *map(repr, sorted(special_tokens(self.config).items()))]).encode())

    def write(self, folder: Path) -> None:
        """Write the template and the configuration, without its own template, into `folder`."""
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        write_durable(folder / TEMPLATE, self.source.encode())
        write_durable(folder / TOKENIZER_CONFIG, json.dumps(config, indent=1, ensure_ascii=False).encode() + b"\n")


def read_chat_files(tokenizer: Path, template: Path | None) -> ChatFiles:
    """The files beside `tokenizer` (a folder, or a file in it); `template` replaces its template. Raises BadInput without one."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = read_object(folder / TOKENIZER_CONFIG)
    source = read_text(template) if template is not None else folder_template(folder, config)
    if source is None:
        raise BadInput(
            f"{folder}: has no chat template; expected {TEMPLATE} or chat_template in {TOKENIZER_CONFIG}, or --chat-template FILE"
        )
    return ChatFiles(source, config, str(template or folder))


class InexactTemplate(Exception):
    """The range of a message in the text of a chat is not certain."""


class ChatReader:
    """Reads the chats of `.jsonl` files. `roles` are those to train on."""

    def __init__(self, files: ChatFiles, roles: Sequence[str], tokenizer: Tokenizer, now_ns: int) -> None:
        """`now_ns` is the time that the template can show: the same for each run, so that its output is.

        Raises BadInput if the template cannot be used.
        """
        self.name, self.roles = files.name, tuple(roles)
        now = datetime.fromtimestamp(now_ns // 10**9, UTC)
        self._template = ChatTemplate(files.source, special_tokens(files.config), lambda: now)
        self._marked_by_template = bool(GENERATION.search(files.source))
        added = sorted(
            (token.content for token in tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True
        )
        self._after_end = re.compile(f"(?:{'|'.join(map(re.escape, added))})(\\s*)\\Z") if added else None

    def read(self, file: InputFile, key: str) -> Iterator[Document | BadDocument]:
        """The chats of a file, whose messages are under `key`.

        Raises BadInput for a chat that the template writes in a way that does not show the range of each message.
        """
        for record in read_records(file, key):
            if isinstance(record, BadDocument):
                yield record
                continue
            messages = _messages(record.value)
            tools = record.fields.get("tools") or None
            if isinstance(messages, str):
                yield BadDocument(record.where, f"{key}{messages}")
            elif tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
                yield BadDocument(record.where, "tools: expected a list of objects")
            else:
                yield self._document(file, record, messages, tools)

    def _document(
        self, file: InputFile, record: Record, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> Document | BadDocument:
        try:
            text, spans = self.text_and_spans(messages, tools)
        except TemplateRefusal as error:
            return BadDocument(record.where, f"the chat template refuses the messages: {error}")
        except InexactTemplate as error:
            raise BadInput(
                f"{record.where}: the chat template of {self.name} does not show which tokens to train on: {error}; "
                "put {% generation %} and {% endgeneration %} around what the assistant writes, in a copy for --chat-template"
            ) from None
        if not spans:
            return BadDocument(record.where, f"nothing to train on: no text of role {' or '.join(self.roles)}")
        return checked_document(file, record, text, tuple(spans))

    def text_and_spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[Span]]:
        """The text of a chat, and the ranges of its characters to train on, ascending.

        Raises TemplateRefusal if the template refuses the messages, InexactTemplate if the ranges are not certain.
        """
        spans: list[Span] = []
        searched = set(self.roles)
        if self._marked_by_template and ASSISTANT in searched:
            text, spans = self._template.generated_spans(messages, tools)
            searched.remove(ASSISTANT)
        else:
            text = self._template.render(messages, tools, add_generation_prompt=False)
        for index, message in enumerate(messages):
            if message["role"] in searched:
                start, stop = self._span(text, messages, index, tools)
                spans += [(start, stop)] if stop > start else []
        return text, sorted(spans)

    def _span(self, text: str, messages: Sequence[Mapping[str, Any]], index: int, tools: Any) -> Span:
        """The range of a message, from the first character behind its header to the end of its end token."""
        content = (messages[index]["content"] or "").strip()
        before = 0 if index == 0 else self._length(text, messages[:index], tools, prompt=False)
        stop = self._length(text, messages[: index + 1], tools, prompt=False)
        if messages[index]["role"] == ASSISTANT:
            start = self._length(text, messages[:index], tools, prompt=True)
            if start == before and content and not text[start:stop].lstrip().startswith(content):
                raise InexactTemplate("add_generation_prompt does not add the header of the assistant")
        else:
            if not content or text[before:stop].count(content) != 1:
                raise InexactTemplate(f"it does not write the content of messages[{index}] unchanged and once")
            start = text.index(content, before)
        if stop < start:
            raise InexactTemplate(f"messages[{index}] ends before its header does")
        end = self._after_end.search(text, start, stop) if self._after_end else None
        return start, end.start(1) if end else stop

    def _length(self, text: str, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool) -> int:
        """The characters of `text` that `messages` make, with the header of the next answer if `prompt`."""
        shown = f"the first {len(messages)} messages" + (" with the header of the answer" if prompt else "")
        try:
            beginning = self._template.render(messages, tools, add_generation_prompt=prompt)
        except TemplateRefusal as error:
            raise InexactTemplate(f"it refuses {shown}: {error}") from None
        if not text.startswith(beginning):
            raise InexactTemplate(f"the text of {shown} is no beginning of the whole text")
        return len(beginning)


def _messages(value: Any) -> list[dict[str, Any]] | str:
    """The messages in the form that templates expect: text parts of a content joined. Text if they are wrong: where and why."""
    if not isinstance(value, list) or not value:
        return ": expected a list of messages"
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"[{index}]: expected an object with a role"
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else 0
        if not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
            return f"[{index}].content: expected text, or parts that are text"
        messages.append({**message, "content": content})
    return messages
