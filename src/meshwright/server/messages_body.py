"""Writes answers of /v1/messages in Anthropic's format, as one body or as events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.server.bodies import TextPiece
from meshwright.server.errors import MESSAGES_PATH, RequestError, failure_event
from meshwright.server.output_reader import AnswerPart
from meshwright.server.text_request import CheckedTextRequest
from meshwright.server.token_logprobs import ChatLogprobs, CompletionLogprobs, text_as_json

_DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
"""Type of the delta event, and key of its text, by the kind of part."""
_OPENINGS = {
    "text": '{"type":"text","text":""}',
    "reasoning": '{"type":"thinking","thinking":"","signature":""}',
}
"""The block with which a part begins, as JSON, by the kind of part."""


class MessagesBody:
    """Writes one answer of /v1/messages. A part of the answer (text, reasoning or tool call) is a content block."""

    logprobs: type[CompletionLogprobs | ChatLogprobs] = ChatLogprobs
    """Format of log probabilities. This API never shows them; the class is needed for the interface of all bodies."""

    def __init__(self, number: str, created: int, model: str, request: CheckedTextRequest) -> None:
        """`number` makes the answer's id unique.

        `created` (Unix time) is not shown by this API. `model` is the model's name.
        """
        self._base = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": model}
        self._index = -1
        """Index of the newest block; -1 before the first."""
        self._open = ""
        """Kind of the block that has begun and not ended (`text` or `reasoning`); empty if none is open."""
        self._delta = ""
        """The constant beginning of a delta event of the open block; the text and the closing braces follow."""
        self._stop: tuple[str, str | None] = ("end_turn", None)
        """`stop_reason` and `stop_sequence` of the answer."""

    def first(self, index: int, tokens: Mapping[str, Any]) -> bytes:
        """Return the event that begins the message.

        `index` is always 0, and `tokens` is the usage object so far (`bodies.usage`).
        """
        message = {**self._base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(tokens)}
        return _event("message_start", f'"message":{json.dumps(message)}').encode("ascii")

    def event(self, index: int, piece: TextPiece, tokens: Mapping[str, Any] | None = None) -> bytes:
        """Return the events for the next part of the answer."""
        if (text := piece.goes_on(self._open)) is not None:
            return f"{self._delta}{text_as_json(text)}}}}}\n\n".encode("ascii")
        events = []
        for part in piece.all_parts:
            if part.kind == "call":
                events.append(self._call(part))
                continue
            if part.kind != self._open:
                events.append(self._begin(part.kind, _OPENINGS[part.kind]))
                form, key = _DELTAS[part.kind]
                self._delta = (
                    f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
                    f'"delta":{{"type":"{form}","{key}":'
                )
            events.append(f"{self._delta}{text_as_json(part.text)}}}}}\n\n")
        if piece.finish_reason is not None:
            events.append(self._end())
            self._stop = _stop(piece)
        return "".join(events).encode("ascii")

    def last(self, tokens: Mapping[str, Any]) -> bytes:
        """Return the final events, with the stop reason and the usage."""
        reason, sequence = self._stop
        delta = json.dumps({"stop_reason": reason, "stop_sequence": sequence})
        usage = json.dumps(_usage(tokens))
        return (_event("message_delta", f'"delta":{delta},"usage":{usage}') + _event("message_stop")).encode("ascii")

    def failure(self, error: RequestError) -> bytes:
        """Return an error as the last event."""
        return failure_event(error, MESSAGES_PATH)

    def whole(self, texts: Sequence[TextPiece], tokens: Mapping[str, Any]) -> bytes:
        """Return the whole message as JSON. `texts` has exactly one sequence; `tokens` is the usage object (`bodies.usage`)."""
        (piece,) = texts
        reason, sequence = _stop(piece)
        content = [_block(part) for part in piece.all_parts]
        ends = {"stop_reason": reason, "stop_sequence": sequence, "usage": _usage(tokens)}
        return json.dumps({**self._base, "content": content, **ends}).encode("ascii")

    def _begin(self, kind: str, block: str) -> str:
        """Return the events that end the open block and begin a new one. `block` is the new block as JSON."""
        ending = self._end()
        self._index = self._index + 1
        self._open = kind
        return ending + _event("content_block_start", f'"index":{self._index},"content_block":{block}')

    def _end(self) -> str:
        """Return the event that ends the open block; an empty text if none is open."""
        if not self._open:
            return ""
        self._open = ""
        return _event("content_block_stop", f'"index":{self._index}')

    def _call(self, part: AnswerPart) -> str:
        """Return the events of a tool call, which is a block of its own."""
        assert part.call is not None
        block = {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
        delta = json.dumps({"type": "input_json_delta", "partial_json": part.call.arguments})
        begun = self._begin("call", json.dumps(block))
        return begun + _event("content_block_delta", f'"index":{self._index},"delta":{delta}') + self._end()


def _event(name: str, members: str = "") -> str:
    return f'event: {name}\ndata: {{"type":"{name}"{"," if members else ""}{members}}}\n\n'


def _block(part: AnswerPart) -> dict[str, Any]:
    """Return a part of the answer as a content block."""
    if part.call is not None:
        called = {"id": part.call.id, "name": part.call.name, "input": json.loads(part.call.arguments)}
        return {"type": "tool_use", **called}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _stop(piece: TextPiece) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` in Anthropic's terms."""
    if piece.finish_reason == "stop" and isinstance(piece.stop_reason, str):
        return "stop_sequence", piece.stop_reason
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(piece.finish_reason or "", "end_turn"), None


def _usage(tokens: Mapping[str, Any]) -> dict[str, int]:
    """Return Anthropic's usage object. `input_tokens` counts only prompt tokens that were not in the cache."""
    cached = tokens["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": tokens["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": tokens["completion_tokens"],
    }
