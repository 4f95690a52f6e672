"""Writes answers of /v1/responses in OpenAI's format, as one body or as events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.server.bodies import TextPiece, joined
from meshwright.server.errors import RequestError
from meshwright.server.output_reader import AnswerPart, ToolCall
from meshwright.server.responses_request import CUSTOM
from meshwright.server.text_request import CheckedTextRequest
from meshwright.server.token_logprobs import ChatLogprobs, CompletionLogprobs, text_as_json

_NAMES = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
"""Beginning of the names of a part's events, by the kind of part."""


class ResponsesBody:
    """Writes one answer of /v1/responses. A part of the answer (text, reasoning or tool call) is an output item."""

    logprobs: type[CompletionLogprobs | ChatLogprobs] = ChatLogprobs
    """Format of log probabilities. This API never shows them; the class is needed for the interface of all bodies."""

    def __init__(self, number: str, created: int, model: str, request: CheckedTextRequest) -> None:
        """`number` makes the answer's id unique.

        `created` is its Unix time in seconds. `model` is the model's name in the API.
        """
        self._number = number
        self._tool_names = request.tool_names
        self._base: dict[str, Any] = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": created,
            "model": model,
        }
        self._base |= {"error": None, "incomplete_details": None, **request.shown}
        self._sequence = 0
        """`sequence_number` of the next event."""
        self._items: list[dict[str, Any]] = []
        """The output items that are complete."""
        self._open = ""
        """Kind of the item that has begun and not ended (`text` or `reasoning`); empty if none is open."""
        self._texts: list[str] = []
        """The text of the open item so far, in pieces."""
        self._delta = ("", "")
        """The constant beginning and end of a delta event of the open item.

        The text is between them, the event's number after.
        """
        self._reason = ""
        """Finish reason of the answer."""

    def first(self, index: int, tokens: Mapping[str, Any]) -> bytes:
        """Return the events that begin the answer.

        `index` is always 0, and `tokens` is the usage object so far (`bodies.usage`).
        """
        response = self._response("in_progress")
        names = ("response.created", "response.in_progress")
        return "".join([self._event(name, {"response": response}) for name in names]).encode("ascii")

    def event(self, index: int, piece: TextPiece, tokens: Mapping[str, Any] | None = None) -> bytes:
        """Return the events for the next part of the answer."""
        if (text := piece.goes_on(self._open)) is not None:
            return self._piece(text).encode("ascii")
        events = []
        for part in piece.all_parts:
            if part.call is not None:
                events.append(self._call(part.call))
                continue
            if part.kind != self._open:
                events.append(self._begin(part))
            events.append(self._piece(part.text))
        if piece.finish_reason is not None:
            events.append(self._end())
            self._reason = piece.finish_reason
        return "".join(events).encode("ascii")

    def _piece(self, text: str) -> str:
        """Return the event with further text of the open item."""
        self._texts.append(text)
        head, tail = self._delta
        event = f"{head}{text_as_json(text)}{tail}{self._sequence}}}\n\n"
        self._sequence += 1
        return event

    def last(self, tokens: Mapping[str, Any]) -> bytes:
        """Return the event with the complete answer."""
        response = self._ended(self._items, self._reason, tokens)
        return self._event(f"response.{response['status']}", {"response": response}).encode("ascii")

    def failure(self, error: RequestError) -> bytes:
        """Return the event that ends a failed answer."""
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", {"response": response}).encode("ascii")

    def whole(self, texts: Sequence[TextPiece], tokens: Mapping[str, Any]) -> bytes:
        """Return the complete answer as JSON.

        `texts` has exactly one sequence; `tokens` is the usage object (`bodies.usage`).
        """
        (piece,) = texts
        items = [
            self._call_item(part.call, index) if part.call is not None else self._text_item(part, index)
            for index, part in enumerate(joined(piece.all_parts))
        ]
        return json.dumps(self._ended(items, piece.finish_reason or "", tokens)).encode("ascii")

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._base, "status": status, "output": [*self._items], "usage": None}

    def _ended(self, items: Sequence[Any], reason: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer object of a complete answer. The finish reason `length` makes its status `incomplete`."""
        response = {**self._response("completed"), "output": [*items], "usage": _usage(tokens)}
        if reason == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return response

    def _event(self, name: str, members: Mapping[str, Any]) -> str:
        content = json.dumps({"type": name, **members, "sequence_number": self._sequence})
        self._sequence += 1
        return f"event: {name}\ndata: {content}\n\n"

    def _id(self, kind: str, index: int) -> str:
        """Return the id of item `index`."""
        return f"{ {'text': 'msg', 'reasoning': 'rs', 'call': 'fc'}[kind] }_{self._number}_{index}"

    def _begin(self, part: AnswerPart) -> str:
        """Return the events that end the open item and begin an item with text or reasoning."""
        events = [self._end()]
        self._open = part.kind
        index = len(self._items)
        item = self._text_item(AnswerPart(part.kind, ""), index)
        id = item["id"]
        name = _NAMES[part.kind]
        where = {"item_id": id, "output_index": index, "content_index": 0}
        begun = {**item, "content": []} | ({} if part.kind == "reasoning" else {"status": "in_progress"})
        events.append(self._event("response.output_item.added", {"output_index": index, "item": begun}))
        events.append(self._event("response.content_part.added", {**where, "part": item["content"][0]}))
        fixed = json.dumps({"type": f"{name}.delta", **where})[:-1]
        tail = ', "logprobs": []' if part.kind == "text" else ""
        self._delta = f'event: {name}.delta\ndata: {fixed}, "delta": ', f'{tail}, "sequence_number": '
        return "".join(events)

    def _end(self) -> str:
        """Return the events that end the open item; an empty text if none is open."""
        if not self._open:
            return ""
        kind = self._open
        index = len(self._items)
        text = "".join(self._texts)
        name = _NAMES[kind]
        self._texts.clear()
        self._open = ""
        item = self._text_item(AnswerPart("text" if kind == "text" else "reasoning", text), index)
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        self._items.append(item)
        logprobs = {"logprobs": []} if kind == "text" else {}
        return "".join(
            [
                self._event(f"{name}.done", {**where, "text": text, **logprobs}),
                self._event("response.content_part.done", {**where, "part": item["content"][0]}),
                self._event("response.output_item.done", {"output_index": index, "item": item}),
            ]
        )

    def _call(self, call: ToolCall) -> str:
        """Return the events of a tool call: its item, its arguments and its end."""
        events = [self._end()]
        index = len(self._items)
        item = self._call_item(call, index)
        custom = item["type"] == "custom_tool_call"
        key, name = (
            ("input", "response.custom_tool_call_input")
            if custom
            else ("arguments", "response.function_call_arguments")
        )
        where = {"item_id": item["id"], "output_index": index}
        begun = {**item, key: "", "status": "in_progress"}
        events.append(self._event("response.output_item.added", {"output_index": index, "item": begun}))
        events.append(self._event(f"{name}.delta", {**where, "delta": item[key]}))
        named = {} if custom else {"name": item["name"]}
        events.append(self._event(f"{name}.done", {**where, **named, key: item[key]}))
        events.append(self._event("response.output_item.done", {"output_index": index, "item": item}))
        self._items.append(item)
        return "".join(events)

    def _call_item(self, call: ToolCall, index: int) -> dict[str, Any]:
        """Return the output item of a tool call, with the client's name of the tool."""
        tool = self._tool_names.get(call.name, {"type": "function", "name": call.name, "namespace": ""})
        item = {"id": self._id("call", index), "call_id": call.id, "name": tool["name"], "status": "completed"}
        if tool["namespace"]:
            item["namespace"] = tool["namespace"]
        if tool["type"] == "custom":
            return {"type": "custom_tool_call", **item, "input": str(json.loads(call.arguments).get(CUSTOM, ""))}
        return {"type": "function_call", **item, "arguments": call.arguments}

    def _text_item(self, part: AnswerPart, index: int) -> dict[str, Any]:
        """Return the output item of a text (a message) or of reasoning."""
        id = self._id(part.kind, index)
        if part.kind == "reasoning":
            content: list[Any] = [{"type": "reasoning_text", "text": part.text}]
            return {"type": "reasoning", "id": id, "summary": [], "content": content, "encrypted_content": None}
        content = [{"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}]
        return {"type": "message", "id": id, "status": "completed", "role": "assistant", "content": content}


def _usage(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage object in the format of this API."""
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": tokens["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": tokens.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": tokens["total_tokens"],
    }
