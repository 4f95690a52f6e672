"""The bodies of answers with text, in OpenAI's forms, joined from parts in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.server.token_logprobs import ChatLogprobs, CompletionLogprobs, text_as_json
from meshwright.server.tool_calls import ToolCall

DONE = b"data: [DONE]\n\n"


class Piece(NamedTuple):
    """A piece of a text, or the whole."""

    text: str
    logprobs: str | None = None
    """Log probabilities as JSON."""
    calls: Sequence[ToolCall] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """Stop string or token id that ended the text, if it is one of the request's."""

    @property
    def end(self) -> str:
        """The members of JSON about log probabilities and the end."""
        if self.finish_reason is None:
            return f'"logprobs":{self.logprobs or "null"},"finish_reason":null'
        stop = json.dumps(self.stop_reason)
        return f'"logprobs":{self.logprobs or "null"},"finish_reason":"{self.finish_reason}","stop_reason":{stop}'


def usage(prompt_tokens: int, new_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The numbers of tokens of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class CompletionBody:
    """Answers of /v1/completions."""

    object = whole_object = "text_completion"
    prefix = "cmpl-"
    logprobs: type[CompletionLogprobs | ChatLogprobs] = CompletionLogprobs
    """Form of log probabilities."""

    def __init__(self, number: str, created: int, model: str, *, with_usage: bool = False) -> None:
        """`with_usage`: every event of a stream has the key `usage`, which is null where there are no numbers."""
        self._base = {"id": self.prefix + number, "object": self.object, "created": created, "model": model}
        self._head = f"data: {json.dumps(self._base, separators=(',', ':'))[:-1]},"
        self._tail = ',"usage":null}\n\n' if with_usage else "}\n\n"

    def first(self, index: int, tokens: Mapping[str, Any] | None = None) -> bytes:
        """The event that begins a text; empty if there is none."""
        return b""

    def event(self, index: int, piece: Piece, tokens: Mapping[str, Any] | None = None) -> bytes:
        """The event with a piece of text `index`, and the numbers of tokens so far."""
        content = self._piece(piece.text, piece.calls)
        return f'{self._head}"choices":[{{"index":{index},{content},{piece.end}}}]{self._end(tokens)}'.encode("ascii")

    def usage_event(self, tokens: Mapping[str, Any]) -> bytes:
        """The last event of a stream, with the numbers of tokens."""
        return f'{self._head}"choices":[]{self._end(tokens)}'.encode("ascii")

    def whole(self, texts: Sequence[Piece], tokens: Mapping[str, Any]) -> bytes:
        """The answer with all texts."""
        choices = ",".join(
            f'{{"index":{index},{self._message(piece.text, piece.calls)},{piece.end}}}'
            for index, piece in enumerate(texts)
        )
        base = json.dumps({**self._base, "object": self.whole_object}, separators=(",", ":"))
        return f'{base[:-1]},"choices":[{choices}],"usage":{json.dumps(tokens)}}}'.encode("ascii")

    def _end(self, tokens: Mapping[str, Any] | None) -> str:
        return self._tail if tokens is None else f',"usage":{json.dumps(tokens)}}}\n\n'

    def _piece(self, text: str, calls: Sequence[ToolCall]) -> str:
        return f'"text":{text_as_json(text)}'

    def _message(self, text: str, calls: Sequence[ToolCall]) -> str:
        return self._piece(text, calls)


class ChatBody(CompletionBody):
    """Answers of /v1/chat/completions."""

    object, whole_object = "chat.completion.chunk", "chat.completion"
    prefix = "chatcmpl-"
    logprobs = ChatLogprobs

    def first(self, index: int, tokens: Mapping[str, Any] | None = None) -> bytes:
        return (
            f'{self._head}"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{self._end(tokens)}'
        ).encode("ascii")

    def _piece(self, text: str, calls: Sequence[ToolCall]) -> str:
        if calls:
            content = {"content": text} if text else {}
            delta = {**content, "tool_calls": [{"index": call.index, **call.message} for call in calls]}
            return f'"delta":{json.dumps(delta)}'
        return f'"delta":{{"content":{text_as_json(text)}}}' if text else '"delta":{}'

    def _message(self, text: str, calls: Sequence[ToolCall]) -> str:
        content = "null" if calls and not text else text_as_json(text)
        shown = f',"tool_calls":{json.dumps([call.message for call in calls])}' if calls else ""
        return f'"message":{{"role":"assistant","content":{content},"refusal":null{shown}}}'
