"""Checks the messages of a chat and brings them into one form, whatever form the client has sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import checked_text

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 4_096
"""Maximum number of messages in a chat."""
_PARTS = ("text", "refusal")
"""Types of content parts. The text of a part is in the key that has the name of its type: `{"type": "text", "text": …}`."""


def read_messages(value: object) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates expect. Raises RequestError for wrong values.

    Each content becomes one text, and the arguments of each tool call become an object. Keys whose value is null are
    dropped. So are unknown keys, because clients send back whole answers of other servers.
    """
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        raise wrong("messages", f"a list of 1 to {MOST_MESSAGES} messages", value)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: object, key: str) -> dict[str, Any]:
    """Return one message in the common form. `key` is its path in the body, for errors."""
    if not isinstance(message, dict):
        raise wrong(key, "an object", message)
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{key}.role", f"one of {', '.join(ROLES)}", role)
    read: dict[str, Any] = {"role": role, "content": _content(message.get("content"), f"{key}.content")}
    read |= _texts(message, key, "name", "tool_call_id")
    if role == "assistant":
        read |= _of_assistant(message, key)
        read["content"] = read["content"] or _text(message, key, "refusal") or ""
    if read["content"] is None:
        raise wrong(f"{key}.content", "text", None)
    return read


def _of_assistant(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the tool calls and the reasoning of an assistant message.

    The reasoning gets both of its names, because some templates read `reasoning_content` and others `reasoning`.
    """
    if message.get("function_call") is not None:
        raise RequestError(400, f"{key}.function_call: use tool_calls", param=f"{key}.function_call")
    thoughts = _text(message, key, "reasoning_content") or _text(message, key, "reasoning")
    read: dict[str, Any] = {} if thoughts is None else {"reasoning_content": thoughts, "reasoning": thoughts}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise wrong(f"{key}.tool_calls", "a list of objects", calls)
    if calls:
        read["tool_calls"] = [_tool_call(call, f"{key}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return read


def _tool_call(call: object, key: str) -> dict[str, Any]:
    """Return one tool call in the common form. `key` is its path in the body, for errors."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise wrong(key, 'a call {"id", "type": "function", "function": {"name", "arguments"}}', call)
    if not isinstance(function.get("name"), str):
        raise wrong(f"{key}.function.name", "text", function.get("name"))
    called = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
    return {**_texts(call, key, "id"), "type": "function", "function": called}


def _arguments(value: object) -> object:
    """Return the arguments of a call as an object; in OpenAI's API they are a JSON text.

    A text that is not a JSON object is returned unchanged: the model has written it.
    """
    if not isinstance(value, str):
        return {} if value is None else value
    if not value.strip():
        return {}
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if read is None:
        return {}
    return read if isinstance(read, dict) else value


def _content(content: object, key: str) -> str | None:
    """Return a content as one text. A list of text parts is joined with line breaks; null becomes None."""
    if content is None:
        return None
    if isinstance(content, str):
        return checked_text(content, key)
    if not isinstance(content, list):
        raise wrong(key, "text, or a list of parts", content)
    return "\n".join(_part(part, key) for part in content)


def _part(part: object, key: str) -> str:
    form = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or form not in _PARTS or not isinstance(part.get(form), str):
        raise wrong(key, 'parts {"type": "text", "text": …}; there are no images or audio', part)
    return checked_text(part[form], key)


def _texts(values: Mapping[str, Any], key: str, *names: str) -> dict[str, str]:
    """Return those of the values `names` that are present. Raises RequestError for one that is not text."""
    return {name: text for name in names if (text := _text(values, key, name)) is not None}


def _text(values: Mapping[str, Any], key: str, name: str) -> str | None:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(f"{key}.{name}", "text", value)
    return value
