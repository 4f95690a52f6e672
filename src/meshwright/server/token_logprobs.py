"""Log probabilities of tokens as JSON, in the formats of OpenAI's two APIs, written while the tokens are generated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from typing import NamedTuple, Protocol

from meshwright.data.token_bytes import TokenBytes

text_as_json: Callable[[str], str] = encode_basestring_ascii
"""Returns a text as a JSON string."""
LOWEST = "-9999.0"
"""What OpenAI's API shows for the logarithm of 0, which JSON cannot express."""


class CompletionEntry(NamedTuple):
    """One token in the format of /v1/completions. All members are JSON."""

    text: str
    logprob: str
    top: str
    """Object with the likeliest tokens: their log probabilities by their text."""
    offset: str
    """Number of characters before the token."""


NO_ENTRY = CompletionEntry('""', "null", "null", "0")
"""Entry of a prompt's first token, whose text the caller adds. It has no log probability."""


def completion_entry(
    name: Callable[[int], tuple[str, bytes]], text: str, logprob: float, top: Sequence[tuple[int, float]], offset: int
) -> CompletionEntry:
    """Return the entry of one token.

    `text` is what the token adds to the text, `logprob` its log probability and `offset` the number of characters
    before it. `top` has (token id, log probability) of the likeliest tokens. `name` returns the text and bytes of a
    token id. If two of the likeliest tokens have the same text, the second is shown as `token_id:ID`.
    """
    likeliest: dict[str, float] = {}
    for token, value in top:
        shown = name(token)[0]
        likeliest[f"token_id:{token}" if shown in likeliest else shown] = value
    members = ",".join([f"{text_as_json(shown)}:{number_as_json(value)}" for shown, value in likeliest.items()])
    return CompletionEntry(text_as_json(text), number_as_json(logprob), f"{{{members}}}", str(offset))


class TextLogprobs(Protocol):
    """Collects the log probabilities of one sequence as JSON."""

    def add(self, text: str, content: bytes, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append a token.

        `text` and `content` are the characters and bytes that it adds, `logprob` is its log probability, and `top` has
        (token id, log probability) of the likeliest tokens.
        """

    def take(self) -> str:
        """Return the JSON of the tokens since the last call."""


class CompletionLogprobs:
    """The format of /v1/completions: one list for each property of the tokens."""

    def __init__(self, tokens: TokenBytes, offset: int) -> None:
        """`offset`: number of characters before the first token."""
        self._tokens = tokens
        self._offset = offset
        self._entries: list[CompletionEntry] = []

    def add(self, text: str, content: bytes, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append a token."""
        self._entries.append(completion_entry(self._tokens.name, text, logprob, top, self._offset))
        self._offset += len(text)

    def add_prompt(self, entries: Sequence[CompletionEntry]) -> None:
        """Append the tokens of the prompt; call this before the first generated token."""
        self._entries += entries

    def take(self) -> str:
        """Return the JSON of the tokens since the last call."""
        columns = zip(*self._entries, strict=True) if self._entries else ((), (), (), ())
        texts, values, top, offsets = (f"[{','.join(column)}]" for column in columns)
        self._entries.clear()
        return f'{{"tokens":{texts},"token_logprobs":{values},"top_logprobs":{top},"text_offset":{offsets}}}'


class ChatLogprobs:
    """The format of /v1/chat/completions: one object for each token."""

    def __init__(self, tokens: TokenBytes, offset: int) -> None:
        """`offset` is not used: this format has no offsets."""
        self._tokens = tokens
        self._entries: list[str] = []

    def add(self, text: str, content: bytes, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Append a token."""
        name = self._tokens.name
        likeliest = ",".join([f"{_entry(*name(token), value)}}}" for token, value in top])
        self._entries.append(f'{_entry(text, content, logprob)},"top_logprobs":[{likeliest}]}}')

    def take(self) -> str:
        """Return the JSON of the tokens since the last call."""
        entries = ",".join(self._entries)
        self._entries.clear()
        return f'{{"content":[{entries}],"refusal":null}}'


def _entry(text: str, content: bytes, logprob: float) -> str:
    """Return the members that describe one token, as JSON without the closing brace."""
    return f'{{"token":{text_as_json(text)},"logprob":{number_as_json(logprob)},"bytes":[{",".join(map(str, content))}]'


def number_as_json(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else LOWEST
