"""The bodies of answers with text, in OpenAI's forms, joined from parts in JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from meshwright.server.errors import RequestError
from meshwright.server.output_reader import AnswerPart, PartKind, ToolCall
from meshwright.server.text_request import CheckedTextRequest
from meshwright.server.token_logprobs import ChatLogprobs, CompletionLogprobs, text_as_json

DONE = b"data: [DONE]\n\n"


class TextPiece(NamedTuple):
    """A piece of a text, or the whole text."""

    text: str
    logprobs: str | None = None
    """Log probabilities as JSON."""
    parts: Sequence[AnswerPart] | None = None
    """Reasoning, text and calls in order; None if all is of one `kind`."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """Stop string or token id that ended the text, if the request named it."""
    prompt_logprobs: str | None = None
    """Log probabilities of the prompt in vLLM's form, as JSON."""
    kind: PartKind = "text"
    """Kind of the text, if it is one part."""

    @property
    def all_parts(self) -> Sequence[AnswerPart]:
        """The parts in order."""
        if self.parts is not None:
            return self.parts
        return (AnswerPart(self.kind, self.text),) if self.text else ()

    def goes_on(self, kind: str) -> str | None:
        """The text of a piece that only continues a part of this kind, as most pieces do; else None."""
        parts = self.parts
        if self.finish_reason is not None:
            return None
        if parts is None:
            return self.text if kind == self.kind else None
        return parts[0].text if len(parts) == 1 and parts[0].kind == kind and kind != "call" else None

    @property
    def end(self) -> str:
        """The JSON members about log probabilities and the end of the text."""
        if self.finish_reason is None:
            return f'"logprobs":{self.logprobs or "null"},"finish_reason":null'
        stop = json.dumps(self.stop_reason)
        return f'"logprobs":{self.logprobs or "null"},"finish_reason":"{self.finish_reason}","stop_reason":{stop}'


def usage(
    prompt_tokens: int, new_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """The numbers of tokens of a request; those of reasoning only if reasoning is recognised."""
    details = {} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        **details,
    }


class ResponseBody(Protocol):
    """Writes the answers to one request in the form of an API."""

    logprobs: type[CompletionLogprobs | ChatLogprobs]
    """Form of log probabilities."""

    def __init__(self, number: str, created: int, model: str, request: CheckedTextRequest) -> None:
        """`number` is unique; `created` is the time in seconds; `model` is the name for clients."""

    def first(self, index: int, tokens: Mapping[str, Any]) -> bytes:
        """The events that begin a text; empty if there are none."""

    def event(self, index: int, piece: TextPiece, tokens: Mapping[str, Any] | None = None) -> bytes:
        """The events with a piece of text `index`, and the numbers of tokens so far if every event has them."""

    def last(self, tokens: Mapping[str, Any]) -> bytes:
        """The events that end a stream after all texts."""

    def failure(self, error: RequestError) -> bytes:
        """The events that end a stream which has failed after its beginning."""

    def whole(self, texts: Sequence[TextPiece], tokens: Mapping[str, Any]) -> bytes:
        """The answer with all texts."""


class CompletionBody:
    """Answers of /v1/completions."""

    object = whole_object = "text_completion"
    prefix = "cmpl-"
    logprobs: type[CompletionLogprobs | ChatLogprobs] = CompletionLogprobs
    """Form of log probabilities."""

    def __init__(self, number: str, created: int, model: str, request: CheckedTextRequest) -> None:
        """With `include_usage` every event of a stream has the key `usage`, which is null where there are no numbers."""
        self._base = {"id": self.prefix + number, "object": self.object, "created": created, "model": model}
        self._head = f"data: {json.dumps(self._base, separators=(',', ':'))[:-1]},"
        self._with_usage = request.include_usage
        self._continuous = request.continuous_usage
        self._tail = ',"usage":null}\n\n' if self._with_usage else "}\n\n"

    def first(self, index: int, tokens: Mapping[str, Any]) -> bytes:
        """The event that begins a text; empty if there is none."""
        return b""

    def event(self, index: int, piece: TextPiece, tokens: Mapping[str, Any] | None = None) -> bytes:
        """The event with a piece of text `index`, and the numbers of tokens so far."""
        content = self._piece(piece)
        return f'{self._head}"choices":[{{"index":{index},{content},{piece.end}}}]{self._end(tokens)}'.encode("ascii")

    def last(self, tokens: Mapping[str, Any]) -> bytes:
        """The end of a stream, with the numbers of tokens if they were asked for."""
        return f'{self._head}"choices":[]{self._end(tokens)}'.encode("ascii") + DONE if self._with_usage else DONE

    def failure(self, error: RequestError) -> bytes:
        """The error as an event, and the end."""
        return b"data: %b\n\n%b" % (error.content, DONE)

    def whole(self, texts: Sequence[TextPiece], tokens: Mapping[str, Any]) -> bytes:
        """The answer with all texts."""
        choices = ",".join(
            f'{{"index":{index},{self._message(piece)},{piece.end}{self._of_prompt(piece)}}}'
            for index, piece in enumerate(texts)
        )
        base = json.dumps({**self._base, "object": self.whole_object}, separators=(",", ":"))
        return f'{base[:-1]},"choices":[{choices}],"usage":{json.dumps(tokens)}{self._beside(texts)}}}'.encode("ascii")

    def _of_prompt(self, piece: TextPiece) -> str:
        """The member of a choice about its prompt."""
        return "" if piece.prompt_logprobs is None else f',"prompt_logprobs":{piece.prompt_logprobs}'

    def _beside(self, texts: Sequence[TextPiece]) -> str:
        """Members of a whole answer beside its choices."""
        return ""

    def _end(self, tokens: Mapping[str, Any] | None) -> str:
        return self._tail if tokens is None else f',"usage":{json.dumps(tokens)}}}\n\n'

    def _piece(self, piece: TextPiece) -> str:
        return f'"text":{text_as_json(piece.text)}'

    def _message(self, piece: TextPiece) -> str:
        return self._piece(piece)


class ChatBody(CompletionBody):
    """Answers of /v1/chat/completions."""

    object = "chat.completion.chunk"
    whole_object = "chat.completion"
    prefix = "chatcmpl-"
    logprobs = ChatLogprobs

    def first(self, index: int, tokens: Mapping[str, Any]) -> bytes:
        return (
            f'{self._head}"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{self._end(tokens if self._continuous else None)}'
        ).encode("ascii")

    def _of_prompt(self, piece: TextPiece) -> str:
        return ""

    def _beside(self, texts: Sequence[TextPiece]) -> str:
        return super()._of_prompt(texts[0])

    def _piece(self, piece: TextPiece) -> str:
        if piece.parts is None:
            if not piece.text:
                return '"delta":{}'
            shown = text_as_json(piece.text)
            if piece.kind == "text":
                return f'"delta":{{"content":{shown}}}'
            return f'"delta":{{"reasoning_content":{shown},"reasoning":{shown}}}'
        text, reasoning, calls = _sorted(piece.parts)
        members = [f'"content":{text_as_json(text)}'] if text else []
        if reasoning:
            shown = text_as_json(reasoning)
            members.append(f'"reasoning_content":{shown},"reasoning":{shown}')
        if calls:
            members.append(f'"tool_calls":{json.dumps([{"index": call.index, **call.message} for call in calls])}')
        return f'"delta":{{{",".join(members)}}}'

    def _message(self, piece: TextPiece) -> str:
        text, reasoning, calls = _sorted(piece.all_parts)
        content = "null" if calls and not text else text_as_json(text)
        shown = f',"tool_calls":{json.dumps([call.message for call in calls])}' if calls else ""
        if reasoning:
            shown += f',"reasoning_content":{text_as_json(reasoning)},"reasoning":{text_as_json(reasoning)}'
        return f'"message":{{"role":"assistant","content":{content},"refusal":null{shown}}}'


def _sorted(parts: Sequence[AnswerPart]) -> tuple[str, str, list[ToolCall]]:
    """Text, reasoning and calls of an answer."""
    if len(parts) == 1 and parts[0].kind == "text":
        return parts[0].text, "", []
    text = "".join([part.text for part in parts if part.kind == "text"])
    reasoning = "".join([part.text for part in parts if part.kind == "reasoning"])
    return text, reasoning, [part.call for part in parts if part.call is not None]


def joined(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """The parts of a whole answer: pieces of one kind that follow each other are one part."""
    runs = [(kind, [*run]) for kind, run in itertools.groupby(parts, key=lambda part: part.kind)]
    whole: list[AnswerPart] = []
    for kind, run in runs:
        whole += run if kind == "call" else [AnswerPart(kind, "".join([part.text for part in run]))]
    return whole
