"""The messages of a chat, checked and in the form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import checked_text

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 4_096
_KEYS = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "refusal",
    "reasoning_content",
    "annotations",
    "audio",
}


def read_messages(value: object) -> list[dict[str, Any]]:
    """The messages; the text parts of a content are joined. Raises RequestError."""
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        raise wrong("messages", f"a list of 1 to {MOST_MESSAGES} messages", value)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: object, key: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong(key, "an object", message)
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{key}.role", f"one of {', '.join(ROLES)}", role)
    for name in message:
        if name not in _KEYS:
            raise RequestError(400, f"{key}.{name[:60]}: no such key", param=f"{key}.{name[:60]}")
    content = message.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise wrong(f"{key}.content", "text", None)
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise wrong(f"{key}.tool_calls", "a list of objects", calls)
    read = {} if calls is None else {"tool_calls": [_tool_call(call) for call in calls]}
    return {**message, "content": _content(content, f"{key}.content"), **read}


def _tool_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call with its arguments as an object, which templates expect, where OpenAI's form has JSON in a text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _content(content: object, key: str) -> str | None:
    """The text of a content: text, or a list of parts of text."""
    if content is None:
        return None
    if isinstance(content, str):
        return checked_text(content, key)
    if not isinstance(content, list):
        raise wrong(key, "text, or a list of parts", content)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong(key, 'parts {"type": "text", "text": …}; there are no images or audio', part)
        texts.append(checked_text(part["text"], key))
    return "".join(texts)
