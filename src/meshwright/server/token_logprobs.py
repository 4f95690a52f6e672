"""Log probabilities of new tokens in OpenAI's two forms, written as JSON while the tokens come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from typing import NamedTuple, Protocol

from meshwright.data.token_bytes import TokenBytes

text_as_json: Callable[[str], str] = encode_basestring_ascii
LOWEST = "-9999.0"
"""The logarithm of 0, which JSON cannot write, as OpenAI writes it."""


class CompletionEntry(NamedTuple):
    """A token in the form of /v1/completions, whose members are JSON."""

    text: str
    logprob: str
    top: str
    """The likeliest tokens."""
    offset: str
    """Characters before it."""


NO_ENTRY = CompletionEntry('""', "null", "null", "0")
"""The first token of a prompt, without its text."""


def completion_entry(
    name: Callable[[int], tuple[str, bytes]], text: str, logprob: float, top: Sequence[tuple[int, float]], offset: int
) -> CompletionEntry:
    """A token by what it adds to a text; `name` names the likeliest. Of tokens with equal names the later ones are shown by their ids."""
    likeliest: dict[str, float] = {}
    for token, value in top:
        shown = name(token)[0]
        likeliest[f"token_id:{token}" if shown in likeliest else shown] = value
    members = ",".join([f"{text_as_json(shown)}:{number_as_json(value)}" for shown, value in likeliest.items()])
    return CompletionEntry(text_as_json(text), number_as_json(logprob), f"{{{members}}}", str(offset))


class TextLogprobs(Protocol):
    """The log probabilities of one text, as JSON."""

    def add(self, text: str, content: bytes, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append a token by what it adds to the text, its log probability, and those of the likeliest tokens."""

    def take(self) -> str:
        """The JSON of the tokens since the last call."""


class CompletionLogprobs:
    """The form of /v1/completions."""

    def __init__(self, tokens: TokenBytes, offset: int) -> None:
        """`offset`: characters before the first token."""
        self._tokens = tokens
        self._offset = offset
        self._entries: list[CompletionEntry] = []

    def add(self, text: str, content: bytes, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append a token."""
        self._entries.append(completion_entry(self._tokens.name, text, logprob, top, self._offset))
        self._offset += len(text)

    def add_prompt(self, entries: Sequence[CompletionEntry]) -> None:
        """Put the tokens of the prompt before those of the text."""
        self._entries += entries

    def take(self) -> str:
        """The JSON of the tokens since the last call."""
        columns = zip(*self._entries, strict=True) if self._entries else ((), (), (), ())
        texts, values, top, offsets = (f"[{','.join(column)}]" for column in columns)
        self._entries.clear()
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
    return f'{{"token":{text_as_json(text)},"logprob":{number_as_json(logprob)},"bytes":[{",".join(map(str, content))}]'


def number_as_json(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else LOWEST
