"""Log probabilities of new tokens in OpenAI's two forms, written as JSON while the tokens come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Protocol

from meshwright.data.token_bytes import TokenBytes

text_as_json: Callable[[str], str] = encode_basestring_ascii
LOWEST = "-9999.0"
"""The logarithm of 0, which JSON cannot write, as OpenAI writes it."""


class TokenLogprobs(Protocol):
    """The log probabilities of one text, as JSON."""

    def add(self, text: str, content: bytes, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append a token by what it adds to the text, its log probability, and those of the likeliest tokens."""

    def take(self) -> str:
        """The JSON of the tokens since the last call."""


class CompletionLogprobs:
    """The form of /v1/completions."""

    def __init__(self, tokens: TokenBytes, offset: int) -> None:
        """`offset`: characters before the first token."""
        self._tokens, self._offset = tokens, offset
        self._parts: tuple[list[str], ...] = ([], [], [], [])
        """Texts, log probabilities, likeliest tokens and offsets."""

    def add(self, text: str, content: bytes, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append a token."""
        likeliest: dict[str, float] = {}
        for token, value in top:
            name = self._tokens.name(token)[0]
            likeliest[f"token_id:{token}" if name in likeliest else name] = value
        shown = ",".join([f"{text_as_json(name)}:{_number(value)}" for name, value in likeliest.items()])
        entry = (text_as_json(text), _number(logprob), f"{{{shown}}}", str(self._offset))
        for part, value in zip(self._parts, entry, strict=True):
            part.append(value)
        self._offset += len(text)

    def take(self) -> str:
        """The JSON of the tokens since the last call."""
        texts, values, top, offsets = (f"[{','.join(part)}]" for part in self._parts)
        for part in self._parts:
            part.clear()
        return f'{{"tokens":{texts},"token_logprobs":{values},"top_logprobs":{top},"text_offset":{offsets}}}'


class ChatLogprobs:
    """The form of /v1/chat/completions."""

    def __init__(self, tokens: TokenBytes, offset: int) -> None:
        """`offset` is not shown in this form."""
        self._tokens = tokens
        self._entries: list[str] = []

    def add(self, text: str, content: bytes, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append a token."""
        name = self._tokens.name
        likeliest = ",".join([f"{_entry(*name(token), value)}}}" for token, value in top])
        self._entries.append(f'{_entry(text, content, logprob)},"top_logprobs":[{likeliest}]}}')

    def take(self) -> str:
        """The JSON of the tokens since the last call."""
        entries = ",".join(self._entries)
        self._entries.clear()
        return f'{{"content":[{entries}],"refusal":null}}'


def _entry(text: str, content: bytes, logprob: float) -> str:
    """The beginning of an object."""
    return f'{{"token":{text_as_json(text)},"logprob":{_number(logprob)},"bytes":[{",".join(map(str, content))}]'


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else LOWEST
