"""Incremental detokenisation: the text of a growing list of tokens, character by complete character."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from meshwright.data.token_bytes import TokenBytes

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Character for bytes that are no complete character."""
CONTEXT = 5
"""Fewest earlier tokens that are decoded together with the new ones, if a token's text depends on the tokens before it."""
MOST_CONTEXT = 20
"""Most such tokens. As long as they stay the same, their text need not be decoded again."""
LONGEST_CHARACTER = 4
"""Most bytes of a character."""
MOST_INCOMPLETE = 8
"""After so many tokens an incomplete character is returned as it is."""


class TextStream(Protocol):
    """The text of new tokens as they come; a character that takes several tokens is returned with the last of them.

    The work for a token does not depend on how many came before.
    """

    incomplete: bool
    """Whether the newest tokens are the beginning of a character."""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def add_one(self, token: int) -> tuple[str, bytes]:
        """The text that a token completes, and the bytes that it adds."""

    def finish(self) -> str:
        """The text of the last tokens, complete or not."""


def text_stream(prompt: Sequence[int], tokens: TokenBytes, *, special: bool = False) -> TextStream:
    """The stream of a text that follows a prompt. `special`: the text has special tokens."""
    return (_DecodedStream if tokens.form is None else _ByteStream)(prompt, tokens, special=special)


def continuation(prompt: Sequence[int], new: Sequence[int], tokens: TokenBytes) -> str:
    """The text of all new tokens after a prompt."""
    stream = text_stream(prompt, tokens)
    return stream.add(new) + stream.finish()


class _ByteStream:
    """The stream where every token has bytes of its own: a decoder of UTF-8."""

    def __init__(self, prompt: Sequence[int], tokens: TokenBytes, *, special: bool) -> None:
        self._tokens = tokens
        self._bytes = tokens.all if special else tokens.plain
        self._texts = self._bytes.texts
        before = b"".join([self._bytes[token] for token in prompt[-LONGEST_CHARACTER:]])
        self._held = before[utf_8_decode(before, "replace", False)[1] :]
        """Bytes of an incomplete character; the prompt may end within one."""
        self.incomplete = False
        form = tokens.form
        self._at_start = form is not None and form.changes_first and not any(map(self._bytes.__getitem__, prompt))
        """Whether no text came before, so that the next token's may lack a space."""

    def add(self, tokens: Sequence[int]) -> str:
        if not self._held and not self._at_start and len(tokens) == 1:
            text = self._texts[tokens[0]]
            if text is not None:
                return text
        if self._at_start:
            return "".join([self.add_one(token)[0] for token in tokens])
        return self._decode(b"".join([self._bytes[token] for token in tokens]))

    def add_one(self, token: int) -> tuple[str, bytes]:
        content = self._bytes[token]
        if self._at_start and content:
            self._at_start = False
            content = self._tokens.at_start(token)
        return self._decode(content), content

    def _decode(self, content: bytes) -> str:
        content = self._held + content
        text, used = utf_8_decode(content, "replace", False)
        self._held = content[used:]
        self.incomplete = used < len(content)
        return text

    def finish(self) -> str:
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        self.incomplete = False
        return text


class _DecodedStream:
    """The stream where a token's text depends on those before it: the tokenizer decodes the last few of them again."""

    def __init__(self, prompt: Sequence[int], tokens: TokenBytes, *, special: bool) -> None:
        self._decode = partial(tokens.tokenizer.decode, skip_special_tokens=not special)
        self.incomplete = False
        self._window = list(prompt[-CONTEXT:])
        """The last tokens, which are decoded together."""
        self._returned = len(self._window)
        """Tokens of them whose text has been returned."""
        self._before = self._decode(self._window)
        """The text of these."""

    def add(self, tokens: Sequence[int]) -> str:
        return "".join([self.add_one(token)[0] for token in tokens])

    def add_one(self, token: int) -> tuple[str, bytes]:
        self._window.append(token)
        text = self._advance(final=len(self._window) - self._returned > MOST_INCOMPLETE)
        return text, text.encode("utf-8")

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._returned == len(self._window):
            return ""
        text = self._decode(self._window)
        self.incomplete = text.endswith(INCOMPLETE) and not final
        if self.incomplete:
            return ""
        new = text[len(self._before) :]
        if len(self._window) > MOST_CONTEXT:
            del self._window[:-CONTEXT]
            text = self._decode(self._window)
        self._returned = len(self._window)
        self._before = text
        return new
