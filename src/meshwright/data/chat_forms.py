"""The forms in which data sets store chats, and how a record of each form becomes messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.spec.errors import nearest

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
"""Role of a message, by the sender's name in ShareGPT data. The text of a function_call or tool_call message is the JSON of its calls."""


class BadChat(Exception):
    """A record is not a valid chat: its key, and what was expected."""


@dataclass(frozen=True)
class ChatForm:
    """A form of records.

    Each record has the `keys`, and may have the keys in `also`. `meaning` describes the form in the docs about chats.
    """

    name: str
    keys: tuple[str, ...]
    meaning: str
    read: Callable[[Mapping[str, Any], str], list[Any]]
    """A function (record, its first key) that returns the messages. Raises BadChat."""
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.keys)})"

    def messages(self, record: Mapping[str, Any]) -> list[Any]:
        """The messages of a record. If the record has a list of messages, they are returned as they are. Raises BadChat."""
        found = self.read(record, self.keys[0])
        return [message("system", text_of(record, "system")), *found] if record.get("system") else found


def listed(record: Mapping[str, Any], key: str) -> list[Any]:
    """The list of messages under a key. Messages with `from` and `value` are changed to messages with role and content. Raises BadChat."""
    value = record.get(key)
    if not isinstance(value, list) or not value:
        raise BadChat(f"{key}: expected a list of messages")
    return [
        _sent(item, f"{key}[{index}]") if isinstance(item, dict) and "from" in item and "role" not in item else item
        for index, item in enumerate(value)
    ]


def _instructed(record: Mapping[str, Any], key: str) -> list[Any]:
    """Two messages: the text under `key`, with a blank line and `input` if there is one, as the question; `output` as the answer."""
    more = text_of(record, "input") if record.get("input") is not None else ""
    question = text_of(record, key) + (f"\n\n{more}" if more else "")
    return [message("user", question), message("assistant", text_of(record, "output"))]


def _prompted(record: Mapping[str, Any], key: str) -> list[Any]:
    """The question under a key and the answer under `completion`. Each is a text or a list of messages."""
    messages = []
    for name, role in ((key, "user"), ("completion", "assistant")):
        given_as_list = isinstance(record.get(name), list)
        messages += listed(record, name) if given_as_list else [message(role, text_of(record, name))]
    return messages


MESSAGES = ChatForm(
    "messages", ("messages",), "a list of objects with `role` and `content`, as of OpenAI's API", listed
)
FORMS = (
    MESSAGES,
    ChatForm("ShareGPT", ("conversations",), "a list of objects with `from` (human, gpt, …) and `value`", listed),
    ChatForm(
        "Alpaca",
        ("instruction", "output"),
        "instruction, a blank line and input: the question; output: the answer",
        _instructed,
        also=("input",),
    ),
    ChatForm(
        "prompt and completion",
        ("prompt", "completion"),
        "question and answer, each a text or a list of messages",
        _prompted,
    ),
)
"""The forms that are recognised by the keys of a record."""
COMMON_KEYS = ("tools", "system", "weight")
"""Keys that a chat of any form may have: tools; the text of a system message to put first; and the weight of the chat in the loss."""


def form_of(names: Collection[str], text_key: str | None = None) -> ChatForm | None:
    """The form of records with these keys; None if they match none. `text_key` is the key of a list of messages, if the user names one."""
    if text_key is not None:
        return replace(MESSAGES, keys=(text_key,)) if text_key in names else None
    return next((form for form in FORMS if set(form.keys) <= set(names)), None)


def no_form(record: Mapping[str, Any], text_key: str | None) -> str:
    """A message about why a record matches no form: which keys it has, which forms are known, and which key to give."""
    seen = f"its records have {', '.join(map(repr, record))}"
    lists = [name for name, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if text_key is not None:
        near = nearest(text_key, record)
        return f"no key {text_key!r}; {seen}" + (f" (nearest: {near!r})" if near else "")
    hint = f"--text-key {lists[0]}, if that is a list of messages" if lists else "--text-key KEY for a list of messages"
    pairs = ((nearest(key, record), key) for form in FORMS for key in form.keys)
    near = next((f" ({found!r} is near {key!r})" for found, key in pairs if found), "")
    known = ", ".join(map(str, FORMS))
    return f"{seen}{near}, which is no known form of chats: {known}; or {hint}"


def _sent(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    sender = item["from"]
    others = {name: value for name, value in item.items() if name not in ("from", "value")}
    role = ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise BadChat(f"{where}.from: expected one of {', '.join(ROLES)}, got {json.dumps(sender, default=str)}")
    if sender not in ("function_call", "tool_call"):
        return {**others, "role": role, "content": item.get("value")}
    try:
        calls = json.loads(item.get("value") or "")
    except (TypeError, ValueError):
        raise BadChat(f"{where}.value: expected JSON of a call with name and arguments") from None
    functions = calls if isinstance(calls, list) else [calls]
    return {
        **others,
        "role": role,
        "content": None,
        "tool_calls": [{"type": "function", "function": f} for f in functions],
    }


def text_of(record: Mapping[str, Any], key: str) -> str:
    """The text under a key. Raises BadChat if the value is not a text."""
    value = record.get(key)
    if not isinstance(value, str):
        raise BadChat(f"{key}: expected text, got {type(value).__name__}")
    return value


def message(role: str, content: str) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content}
