"""Translates a request to /v1/messages (Anthropic's API) into a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.server.agent_fields import AgentFields, objects, reasoning_keys, text_of
from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import Fields

BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a line that starts so and differs in every turn.

This line is removed, because no later token would be found in the prefix cache otherwise.
"""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's `tool_choice` by Anthropic's."""


def read_messages_body(fields: Fields) -> AgentFields:
    """Return the body as the keys of a chat request. Raises RequestError for wrong values."""
    body = AgentFields(fields)
    body.copy("model", "temperature", "top_p", "top_k", "stream", "max_tokens", stop_sequences="stop")
    system = _system(body, fields.take("system"))
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", "a list of at least one message", given)
    messages = [message for value, key in objects(given, "messages") for message in _messages(body, value, key)]
    body.chat["messages"] = [*([{"role": "system", "content": system}] if system else []), *messages]
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "tool_calls" not in last:
        body.chat |= {"continue_final_message": True, "add_generation_prompt": False}
    _tools(body)
    _thinking(body)
    body.ignore_others()
    return body


def _system(body: AgentFields, value: object) -> str:
    """Return the system prompt without the billing header; empty if there is none."""
    if value is None:
        return ""
    texts = [value] if isinstance(value, str) else _texts(body, value, "system")
    if texts and texts[0].startswith(BILLING):
        body.ignore("billing_header")
        rest = texts[0].partition("\n")[2]
        texts[:1] = [rest] if rest else []
    return "\n".join(texts)


def _texts(body: AgentFields, value: object, key: str) -> list[str]:
    """Return the texts of a list of content blocks. Images and documents are errors; other kinds of blocks are ignored."""
    texts = []
    for block, at in objects(value, key):
        if block.get("type") == "text":
            texts.append(text_of(block, "text", at))
        elif block.get("type") == "tool_reference":
            texts.append(text_of(block, "tool_name", at, ""))
        elif block.get("type") in ("image", "document"):
            raise RequestError(400, f"{at}: expected text; there are no images or documents", param=at)
        else:
            body.ignore("another_block")
    return texts


def _messages(body: AgentFields, message: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return one message as messages of a chat request. Each tool result becomes a message of its own."""
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{key}.role", "user, assistant or system", role)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_assistant(body, content, f"{key}.content")]
    if role == "system":
        texts = _texts(body, content, f"{key}.content")
        return [{"role": role, "content": "\n".join(texts)}] if texts else []
    found: list[dict[str, Any]] = []
    for block, at in objects(content, f"{key}.content"):
        if block.get("type") == "tool_result":
            found.append(_result(body, block, at))
            continue
        for text in _texts(body, [block], at):
            if found and found[-1]["role"] == "user":
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
    return found


def _result(body: AgentFields, block: Mapping[str, Any], key: str) -> dict[str, Any]:
    content = block.get("content")
    text = content if isinstance(content, str) else "\n".join(_texts(body, content or [], f"{key}.content"))
    return {"role": "tool", "tool_call_id": text_of(block, "tool_use_id", key), "content": text}


def _assistant(body: AgentFields, content: object, key: str) -> dict[str, Any]:
    """Return an assistant message with its text, reasoning and tool calls."""
    texts = list[str]()
    thoughts = list[str]()
    calls = list[dict[str, Any]]()
    for block, at in objects(content, key):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(text_of(block, "thinking", at))
        elif kind == "tool_use":
            called = {"name": text_of(block, "name", at), "arguments": block.get("input") or {}}
            calls.append({"id": text_of(block, "id", at), "type": "function", "function": called})
        elif kind != "redacted_thinking":
            texts += _texts(body, [block], at)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _tools(body: AgentFields) -> None:
    """Copy the client's tools and `tool_choice` into the chat request. Tools that Anthropic's servers run are ignored."""
    fields = body.fields
    tools = []
    for tool, key in objects(fields.take("tools") or [], "tools"):
        if tool.get("type") not in (None, "custom"):
            body.ignore("another_tool")
            continue
        function = {"name": text_of(tool, "name", key), "description": text_of(tool, "description", key, "")}
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise wrong(f"{key}.input_schema", "a JSON schema", schema)
        tools.append({"type": "function", "function": {**function, "parameters": schema}})
    if tools:
        body.chat["tools"] = tools
    choice = fields.section("tool_choice")
    if choice is None:
        return
    kind = choice.text("type", "auto", (*_CHOICES, "tool"))
    body.chat["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    named = {"type": "function", "function": {"name": choice.text("name", "")}}
    if tools or kind in ("any", "tool"):
        body.chat["tool_choice"] = named if kind == "tool" else _CHOICES[kind]


def _thinking(body: AgentFields) -> None:
    """Translate `thinking` and `output_config`: whether the model reasons, how much, and the format of its answer."""
    fields = body.fields
    thinking = fields.section("thinking")
    output = fields.section("output_config")
    if output is not None:
        body.chat |= reasoning_keys(output.take("effort"), "output_config.effort")
        body.chat |= _format(output.section("format"))
    kind = None if thinking is None else thinking.text("type", None, ("enabled", "disabled", "adaptive"))
    if kind == "disabled":
        body.chat["reasoning_effort"] = "none"
    elif kind == "enabled":
        body.chat["chat_template_kwargs"] = {"enable_thinking": True, "thinking": True}


def _format(section: Fields | None) -> dict[str, Any]:
    """Return the chat key that forces the answer to follow a JSON schema; nothing without a section."""
    if section is None:
        return {}
    section.text("type", "json_schema", ("json_schema",))
    schema = section.take("schema")
    if not isinstance(schema, dict):
        raise wrong("output_config.format.schema", "a JSON schema", schema)
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def counted(prompt_tokens: int) -> bytes:
    """Return the answer of /v1/messages/count_tokens."""
    return json.dumps({"input_tokens": prompt_tokens}).encode("ascii")
