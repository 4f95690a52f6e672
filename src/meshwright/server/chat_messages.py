"""The messages and tools of a chat, checked and in the form that templates expect."""

from __future__ import annotations

from typing import Any

from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import Fields, checked_text

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 4_096
MOST_TOOLS = 128
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


def read_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The tools for the template; None without any, or with `tool_choice: none`. Raises RequestError."""
    value, choice = fields.take("tools"), fields.take("tool_choice")
    fields.flag("parallel_tool_calls")
    if choice not in (None, "none", "auto"):
        raise wrong("tool_choice", "none or auto; the model decides from its template", choice)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise wrong("tools", f"a list of at most {MOST_TOOLS} tools", value)
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"tools[{index}]", '{"type": "function", "function": {"name": …}}', tool)
    return None if choice == "none" or not value else value


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
    return {**message, "content": _content(content, f"{key}.content")}


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
