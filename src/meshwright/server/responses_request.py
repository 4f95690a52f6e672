"""Translates a request to /v1/responses (OpenAI's API, without stored state) into a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.server.agent_fields import AgentFields, objects, reasoning_keys, text_of
from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import Fields

CUSTOM = "input"
"""Parameter name for `custom` tools, whose input is free text. The model sees such a tool as a function with this parameter."""
SEPARATOR = "__"
"""Separates namespace and name in a tool name that the model sees: `files__read`."""
_NOT_HERE = {
    "previous_response_id": "answers are not kept here; send the whole conversation as input",
    "conversation": "conversations are not kept here; send the whole conversation as input",
    "background": "answers are not kept here; leave it out",
    "prompt": "there are no stored prompts here; send instructions and input",
}
"""Keys for features that this server does not have, with the error's reason."""
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
"""Types of content parts with text."""


def read_responses_body(fields: Fields) -> AgentFields:
    """Return the body as the keys of a chat request. Raises RequestError for wrong values."""
    body = AgentFields(fields)
    body.refuse(_NOT_HERE)
    body.copy("model", "temperature", "top_p", "stream", "parallel_tool_calls", max_output_tokens="max_tokens")
    body.names |= {"messages": "input", "response_format": "text.format"}
    _tools(body)
    messages = _messages(body, fields.take("input"))
    if (instructions := fields.text("instructions", None)) is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    body.chat["messages"] = messages
    _choice(body)
    _format(body)
    reasoning = fields.section("reasoning")
    if reasoning is not None:
        body.chat |= reasoning_keys(reasoning.take("effort"), "reasoning.effort")
    body.ignore_others()
    return body


def _messages(body: AgentFields, value: object) -> list[dict[str, Any]]:
    """Return the messages of the input.

    One answer of the model may be several items in a row: reasoning, text and calls. They become one assistant message.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for item, key in objects(value, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            message = _message(item, key)
            if message["role"] == "assistant":
                answer = _answer(messages)
                answer["content"] += message["content"]
            else:
                messages.append(message)
        elif kind == "reasoning":
            answer = _answer(messages, begins=True)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + _reasoning(item, key)
        elif kind in ("function_call", "custom_tool_call"):
            _answer(messages).setdefault("tool_calls", []).append(_call(item, key))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            text = output if isinstance(output, str) else _text(output, f"{key}.output")
            messages.append({"role": "tool", "tool_call_id": text_of(item, "call_id", key), "content": text})
        else:
            body.ignore("another_item")
    for message in messages:
        if message.get("reasoning_content") == "":
            del message["reasoning_content"]
    return messages


def _answer(messages: list[dict[str, Any]], *, begins: bool = False) -> dict[str, Any]:
    """Return the assistant message to which an item belongs: the last message, or a new one.

    With `begins`, the item is reasoning. Reasoning comes first in an answer, so a new message begins if the last one
    already has text or calls.
    """
    last = messages[-1] if messages else {}
    used = begins and bool(last.get("content") or last.get("tool_calls"))
    if last.get("role") != "assistant" or used:
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _message(item: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a message item as a message of a chat request. `key` is its path in the body, for errors."""
    role = item.get("role")
    content = item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise wrong(f"{key}.role", "user, assistant, system or developer", role)
    return {"role": role, "content": content if isinstance(content, str) else _text(content, f"{key}.content")}


def _text(content: object, key: str) -> str:
    """Return the text of a list of content parts. Raises RequestError for other parts."""
    texts = []
    for part, at in objects(content, key):
        kind = part.get("type")
        if kind not in _TEXTS:
            raise RequestError(400, f"{at}: expected text; there are no images, audio or files", param=at)
        texts.append(text_of(part, "refusal" if kind == "refusal" else "text", at))
    return "\n".join(texts)


def _reasoning(item: Mapping[str, Any], key: str) -> str:
    """Return the text of a reasoning item. Encrypted reasoning is left out: only the server that wrote it can read it."""
    return _text(item.get("content") or [], f"{key}.content")


def _call(item: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an item with a call as a tool call of a chat request. A tool in a namespace is named NAMESPACE__NAME."""
    name = text_of(item, "name", key)
    if item.get("namespace") is not None:
        name = text_of(item, "namespace", key) + SEPARATOR + name
    if item.get("type") == "custom_tool_call":
        arguments: Any = {CUSTOM: text_of(item, "input", key)}
    else:
        arguments = text_of(item, "arguments", key)
    return {"id": text_of(item, "call_id", key), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(body: AgentFields) -> None:
    """Copy the client's tools into the chat request.

    A tool in a namespace is named NAMESPACE__NAME for the model. Kinds of tools other than functions and `custom` ones
    are ignored.
    """
    tools: list[dict[str, Any]] = []
    for tool, key in objects(body.fields.take("tools") or [], "tools"):
        if tool.get("type") == "namespace":
            namespace = text_of(tool, "name", key)
            for inner, at in objects(tool.get("tools") or [], f"{key}.tools"):
                _add_tool(body, inner, at, tools, namespace)
        else:
            _add_tool(body, tool, key, tools)
    if tools:
        body.chat["tools"] = tools


def _add_tool(
    body: AgentFields,
    tool: Mapping[str, Any],
    key: str,
    tools: list[dict[str, Any]],
    namespace: str = "",
) -> None:
    """Append one tool to `tools` as a function.

    A `custom` tool becomes a function with one text, the parameter `CUSTOM`.

    The client's name of a `custom` tool, or of a tool in a namespace, is remembered in `body.tool_names`.
    """
    kind = tool.get("type", "function" if namespace else None)
    if kind not in ("function", "custom"):
        body.ignore("another_tool")
        return
    own = text_of(tool, "name", key)
    name = namespace + SEPARATOR + own if namespace else own
    function: dict[str, Any] = {"name": name, "description": text_of(tool, "description", key, "")}
    function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
    if kind == "custom":
        if isinstance(described := tool.get("format"), dict) and described.get("type") == "grammar":
            body.ignore("another_key")
        parameters = {"type": "object", "properties": {CUSTOM: {"type": "string"}}, "required": [CUSTOM]}
        function["parameters"] = parameters
    if kind == "custom" or namespace:
        body.tool_names[name] = {"type": kind, "name": own, "namespace": namespace}
    tools.append({"type": "function", "function": function})


def _choice(body: AgentFields) -> None:
    """Translate `tool_choice`: whether, and which, tools must be called."""
    choice = body.fields.take("tool_choice")
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            choice = choice.get("mode", "auto")
        elif kind in ("function", "custom"):
            name = text_of(choice, "name", "tool_choice")
            flat = next((flat for flat, tool in body.tool_names.items() if tool["name"] == name), name)
            choice = {"type": "function", "function": {"name": flat}}
        else:
            raise wrong("tool_choice", "none, auto, required, or a function", choice)
    if choice is not None and ("tools" in body.chat or choice not in ("auto", "none")):
        body.chat["tool_choice"] = choice


def _format(body: AgentFields) -> None:
    """Translate `text.format`: the grammar of the answer's text."""
    section = body.fields.section("text")
    described = None if section is None else section.section("format")
    if described is None:
        return
    kind = described.text("type", "text", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        schema = described.take("schema")
        if not isinstance(schema, dict):
            raise wrong("text.format.schema", "a JSON schema", schema)
        body.chat["response_format"] = {"type": kind, "json_schema": {"name": "answer", "schema": schema}}
    elif kind == "json_object":
        body.chat["response_format"] = {"type": kind}


def shown_request(body: AgentFields) -> dict[str, Any]:
    """Return the keys of the request that the answer repeats."""
    chat = body.chat
    return {
        "instructions": None,
        "max_output_tokens": chat.get("max_tokens"),
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "temperature": chat.get("temperature"),
        "top_p": chat.get("top_p"),
        "tool_choice": chat["tool_choice"] if isinstance(chat.get("tool_choice"), str) else "auto",
        "tools": [],
        "metadata": {},
        "store": False,
    }
