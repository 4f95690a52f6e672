"""The bodies of answers with text, in OpenAI's forms; streamed events are joined from prepared parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.server.tool_calls import ToolCall

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DONE = b"data: [DONE]\n\n"
text_as_json: Callable[[str], str] = encode_basestring_ascii


class Choice(NamedTuple):
    """Finished text of an answer."""

    text: str
    finish_reason: str
    logprobs: Sequence[TokenEntry] | None
    calls: Sequence[ToolCall] = ()


class TokenEntry(NamedTuple):
    """A new token with its log probability."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """The numbers of tokens of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


class TokenTexts:
    """The texts of single tokens, for log probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """The text of a token; special tokens by name."""
        if (text := self._texts.get(token)) is None:
            text = self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


class CompletionBody:
    """Answers of /v1/completions."""

    object = whole_object = "text_completion"
    prefix = "cmpl-"

    def __init__(self, number: str, created: int, model: str, tokens: TokenTexts, *, with_usage: bool = False) -> None:
        """`with_usage`: every event of a stream has the key `usage`, which is null but in the last."""
        self._base = {"id": self.prefix + number, "object": self.object, "created": created, "model": model}
        self._tokens = tokens
        self._head = f"data: {json.dumps(self._base, separators=(',', ':'))[:-1]},"
        self._tail = ',"usage":null}\n\n' if with_usage else "}\n\n"
        self._offsets: dict[int, int] = {}
        """Characters of each text so far, by the texts of its tokens."""

    def first(self, index: int) -> bytes:
        """The event that begins a text; empty if there is none."""
        return b""

    def event(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenEntry] | None,
        finish_reason: str | None,
        calls: Sequence[ToolCall] = (),
    ) -> bytes:
        """The event with a piece of text `index`, and calls in it."""
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        shown = "null" if logprobs is None else json.dumps(self._logprobs(index, logprobs), allow_nan=False)
        return (
            f'{self._head}"choices":[{{"index":{index},{self._piece(text, calls)},"logprobs":{shown},'
            f'"finish_reason":{reason}}}]{self._tail}'
        ).encode("ascii")

    def usage_event(self, tokens: Mapping[str, int]) -> bytes:
        """The last event of a stream, with the numbers of tokens."""
        return f'{self._head}"choices":[],"usage":{json.dumps(tokens)}}}\n\n'.encode("ascii")

    def whole(self, choices: Sequence[Choice], tokens: Mapping[str, int]) -> bytes:
        """The answer with all texts."""
        shown = [
            {
                "index": index,
                **self._message(choice.text, choice.calls),
                "logprobs": None if choice.logprobs is None else self._logprobs(index, choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return json.dumps(
            {**self._base, "object": self.whole_object, "choices": shown, "usage": tokens}, allow_nan=False
        ).encode("ascii")

    def _piece(self, text: str, calls: Sequence[ToolCall]) -> str:
        return f'"text":{text_as_json(text)}'

    def _message(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        texts = [self._tokens[entry.token] for entry in entries]
        offset, offsets = self._offsets.get(index, 0), []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            # Of tokens with the same text, such as parts of a character, the likeliest counts.
            "top_logprobs": [{self._tokens[token]: value for token, value in reversed(entry.top)} for entry in entries],
            "text_offset": offsets,
        }


class ChatBody(CompletionBody):
    """Answers of /v1/chat/completions."""

    object, whole_object = "chat.completion.chunk", "chat.completion"
    prefix = "chatcmpl-"

    def first(self, index: int) -> bytes:
        return (
            f'{self._head}"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{self._tail}'
        ).encode("ascii")

    def _piece(self, text: str, calls: Sequence[ToolCall]) -> str:
        if calls:
            content = {"content": text} if text else {}
            delta = {**content, "tool_calls": [{"index": call.index, **call.message} for call in calls]}
            return f'"delta":{json.dumps(delta)}'
        return f'"delta":{{"content":{text_as_json(text)}}}' if text else '"delta":{}'

    def _message(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.message for call in calls]}
        return {"message": message}

    def _logprobs(self, index: int, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {
            "content": [
                {**self._entry(entry.token, entry.logprob), "top_logprobs": [self._entry(*pair) for pair in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokens[token]
        # Bytes of an incomplete character are not known from the text.
        content = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode("utf-8"))
        return {"token": text, "logprob": logprob, "bytes": content}
