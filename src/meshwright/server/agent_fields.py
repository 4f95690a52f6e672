"""What the Responses and Messages APIs have in common: keys that agents send and no server needs are ignored and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import Fields, checked_text

IGNORED = (
    "betas",
    "client_metadata",
    "container",
    "context_management",
    "include",
    "max_tool_calls",
    "mcp_servers",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "speed",
    "store",
    "stream_options",
    "top_logprobs",
    "truncation",
    "user",
    "billing_header",
    "another_block",
    "another_item",
    "another_key",
    "another_tool",
)
"""Labels of what is ignored: keys by their names, the billing header of Claude Code, and other keys, items, blocks and kinds of tools."""


class AgentFields:
    """The keys of a body of an agent, which become those of a chat."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.ignored: list[str] = []
        """Labels of what was ignored."""
        self.chat: dict[str, Any] = {}
        """The keys of a chat so far."""
        self.tool_names: dict[str, dict[str, str]] = {}
        """How the client names a tool, by the name that the model sees, if that is another."""
        self.names: dict[str, str] = {}
        """Keys of the body by those of the chat, where they have other names."""

    def copy(self, *keys: str, **renamed: str) -> None:
        """Let the chat have these keys of the body, some under another name: `name_here="name_there"`."""
        for key, name in [*((key, key) for key in keys), *renamed.items()]:
            self.names[name] = key
            if (value := self.fields.take(key)) is not None:
                self.chat[name] = value

    def ignore(self, label: str) -> None:
        """Count something that is ignored."""
        self.ignored.append(label)

    def ignore_others(self) -> None:
        """Ignore all keys that were not read."""
        for key in self.fields.unread:
            self.ignore(key if key in IGNORED else "another_key")

    def refuse(self, keys: Mapping[str, str]) -> None:
        """Raise RequestError for a key that asks for what this server has not; `keys` are the reasons by key."""
        for key, reason in keys.items():
            if self.fields.take(key) not in (None, False):
                raise RequestError(400, f"{key}: {reason}", param=key)

    def renamed(self, error: RequestError) -> RequestError:
        """An error of the chat, with the body's name of its key."""
        if error.param is None or (name := self.names.get(error.param, error.param)) == error.param:
            return error
        message = (
            name + error.message.removeprefix(error.param) if error.message.startswith(error.param) else error.message
        )
        return RequestError(error.status, message, param=name, code=error.code)


def objects(value: object, key: str) -> Sequence[tuple[Mapping[str, Any], str]]:
    """The objects of a list, each with its place. Raises RequestError."""
    if not isinstance(value, list):
        raise wrong(key, "a list of objects", value)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"{key}[{index}]", "an object", item)
    return [(item, f"{key}[{index}]") for index, item in enumerate(value)]


def text_of(values: Mapping[str, Any], name: str, key: str, default: str | None = None) -> str:
    """A text of an object; `default` without one, or an error if that is None."""
    value = values.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise wrong(f"{key}.{name}", "text", value)
    return checked_text(value, f"{key}.{name}")


def reasoning_keys(effort: object, key: str) -> dict[str, Any]:
    """Keys of a chat that ask for an effort of reasoning, or for none."""
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise wrong(key, "text", effort)
    return {"reasoning_effort": effort}
