"""The forms in which data sets have chats, and the messages that a record of each becomes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
"""The role of a message by its sender, as ShareGPT names it; the value of a function_call or tool_call is the JSON of calls."""


class BadChat(Exception):
    """A record that is no chat: the key, and what was expected."""


@dataclass(frozen=True)
class ChatForm:
    """A form of records. `keys` are those that each record has, `also` those that it may have; `meaning` is for people."""

    name: str
    keys: tuple[str, ...]
    also: tuple[str, ...]
    meaning: str

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.keys)})"

    def messages(self, record: Mapping[str, Any]) -> list[Any]:
        """The messages of a record, with those of a list as they are. Raises BadChat."""
        if self.name == "Alpaca":
            more = _text(record, "input") if record.get("input") is not None else ""
            question = _text(record, "instruction") + (f"\n\n{more}" if more else "")
            found = [_message("user", question), _message("assistant", _text(record, "output"))]
        elif self.name == "prompt and completion":
            found = [*_turn(record, "prompt", "user"), *_turn(record, "completion", "assistant")]
        else:
            key = self.keys[0]
            found = _listed(record.get(key), key)
        if record.get("system"):
            found = [_message("system", _text(record, "system")), *found]
        return found


MESSAGES = ChatForm("messages", ("messages",), (), "a list of objects with `role` and `content`, as of OpenAI's API")
FORMS = (
    MESSAGES,
    ChatForm("ShareGPT", ("conversations",), (), "a list of objects with `from` (human, gpt, …) and `value`"),
    ChatForm("Alpaca", ("instruction", "output"), ("input",), "instruction, a blank line and input: the question; output: the answer"),
    ChatForm("prompt and completion", ("prompt", "completion"), (), "question and answer, each a text or a list of messages"),
)  # fmt: skip
"""The forms that are recognised by the keys of a record."""
COMMON_KEYS = ("tools", "system")
"""Keys that a chat of any form may have: tools, and the text of a system message before the others."""


def form_of(names: Collection[str], text_key: str | None = None) -> ChatForm | None:
    """The form of records with these keys; `text_key` names a list of messages. None if it is none of those known."""
    if text_key is not None:
        return ChatForm(MESSAGES.name, (text_key,), (), MESSAGES.meaning) if text_key in names else None
    return next((form for form in FORMS if set(form.keys) <= set(names)), None)


def no_form(record: Mapping[str, Any], text_key: str | None) -> str:
    """Why a record is of no form, for a person: what was seen, what is known, and the key to give."""
    seen = f"its records have {', '.join(map(repr, record))}"
    lists = [name for name, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if text_key is not None:
        near = nearest(text_key, record)
        return f"no key {text_key!r}; {seen}" + (f" (nearest: {near!r})" if near else "")
    hint = f"--text-key {lists[0]}, if that is a list of messages" if lists else "--text-key KEY for a list of messages"
    near = next((found for form in FORMS for key in form.keys if (found := nearest(key, record))), None)
    known = ", ".join(map(str, FORMS))
    return (
        f"{seen}" + (f" (nearest: {near!r})" if near else "") + f", which is no known form of chats: {known}; or {hint}"
    )


def _listed(value: Any, key: str) -> list[Any]:
    """A list of messages, those with `from` and `value` as messages with role and content. Raises BadChat."""
    if not isinstance(value, list) or not value:
        raise BadChat(f"{key}: expected a list of messages")
    return [
        _sent(item, f"{key}[{index}]") if isinstance(item, dict) and "from" in item and "role" not in item else item
        for index, item in enumerate(value)
    ]


def _sent(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    sender, others = item["from"], {name: value for name, value in item.items() if name not in ("from", "value")}
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


def _turn(record: Mapping[str, Any], key: str, role: str) -> list[Any]:
    value = record.get(key)
    return _listed(value, key) if isinstance(value, list) else [_message(role, _text(record, key))]


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise BadChat(f"{key}: expected text, got {type(value).__name__}")
    return value


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
