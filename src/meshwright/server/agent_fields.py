"""What the Responses and the Messages API have in common: both translate an agent's request into a chat request.

Agents send keys that this server does not need. Such keys are ignored and counted in the metrics.
"""

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
"""Labels of the metric that counts ignored things.

Most labels are names of keys. `billing_header` is the header that Claude Code puts into its system prompt. The labels
`another_…` count blocks, items, keys and tools of kinds that have no label of their own.
"""


class AgentFields:
    """Collects the keys of a chat request (/v1/chat/completions) while an agent's request is read."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.ignored: list[str] = []
        """One label of `IGNORED` for each thing that was ignored."""
        self.chat: dict[str, Any] = {}
        """The chat request so far: values by chat keys."""
        self.tool_names: dict[str, dict[str, str]] = {}
        """Tools that the client and the model know by different names: the client's names, by the name that the model sees."""
        self.names: dict[str, str] = {}
        """The body's key for each chat key that was copied; errors name the body's key."""

    def copy(self, *keys: str, **renamed: str) -> None:
        """Copy values from the body into the chat request.

        `keys` have the same name on both sides. `renamed` gives the others as `body_key="chat_key"`.
        """
        for key, name in [*((key, key) for key in keys), *renamed.items()]:
            self.names[name] = key
            if (value := self.fields.take(key)) is not None:
                self.chat[name] = value

    def ignore(self, label: str) -> None:
        """Count one ignored thing under `label`, one of `IGNORED`."""
        self.ignored.append(label)

    def ignore_others(self) -> None:
        """Ignore every key of the body that has not been read."""
        for key in self.fields.unread:
            self.ignore(key if key in IGNORED else "another_key")

    def refuse(self, keys: Mapping[str, str]) -> None:
        """Raise RequestError if the body uses a feature that this server does not have.

        `keys` maps each such key to the reason in the error's message. Null and false are allowed.
        """
        for key, reason in keys.items():
            if self.fields.take(key) not in (None, False):
                raise RequestError(400, f"{key}: {reason}", param=key)

    def renamed(self, error: RequestError) -> RequestError:
        """Return an error about a chat key as an error about the body's key, which the client has sent."""
        if error.param is None or (name := self.names.get(error.param, error.param)) == error.param:
            return error
        message = (
            name + error.message.removeprefix(error.param) if error.message.startswith(error.param) else error.message
        )
        return RequestError(error.status, message, param=name, code=error.code)


def objects(value: object, key: str) -> Sequence[tuple[Mapping[str, Any], str]]:
    """Return each object of a list with its path, for example `input[2]`.

    Raises RequestError unless it is a list of objects.
    """
    if not isinstance(value, list):
        raise wrong(key, "a list of objects", value)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"{key}[{index}]", "an object", item)
    return [(item, f"{key}[{index}]") for index, item in enumerate(value)]


def text_of(values: Mapping[str, Any], name: str, key: str, default: str | None = None) -> str:
    """Return the text `values[name]`, or `default` if the object has none.

    `key` is the object's path in the body, for messages. Raises RequestError for a value that is not text, and for a
    missing value without a default.
    """
    value = values.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise wrong(f"{key}.{name}", "text", value)
    return checked_text(value, f"{key}.{name}")


def reasoning_keys(effort: object, key: str) -> dict[str, Any]:
    """Return the chat keys that ask for a reasoning effort; no keys if `effort` is None. `key` is its path in the body."""
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise wrong(key, "text", effort)
    return {"reasoning_effort": effort}
