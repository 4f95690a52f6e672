"""Incremental detokenisation: it converts new tokens to text, as soon as their characters are complete."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from meshwright.data.token_bytes import TokenBytes

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The character with which decoders replace bytes that are not a complete character."""
CONTEXT = 5
"""If a token's text depends on earlier tokens, at least this many earlier tokens are decoded together with it."""
MOST_CONTEXT = 20
"""When more tokens than this are decoded together, all but the last `CONTEXT` are removed. Until then no text is computed again."""
LONGEST_CHARACTER = 4
"""Largest number of bytes of a UTF-8 character."""
MOST_INCOMPLETE = 8
"""If a character is still incomplete after more than this many tokens, it is returned as it is."""


class TextStream(Protocol):
    """Converts the new tokens of one sequence to text. If a character consists of several tokens, it is returned with the last of them.

    The work for a token does not depend on the number of earlier tokens.
    """

    incomplete: bool
    """Whether the last tokens are the beginning of a character that is not complete."""

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the characters that they complete."""

    def add_one(self, token: int) -> tuple[str, bytes]:
        """Add a token. Returns the characters that it completes, and the token's bytes."""

    def finish(self) -> str:
        """End the text. Returns the text of an incomplete character at its end, or an empty string."""


def text_stream(prompt: Sequence[int], tokens: TokenBytes, *, special: bool = False) -> TextStream:
    """Make the stream for the new tokens after a prompt. `special` says whether special tokens give text too."""
    return (_DecodedStream if tokens.form is None else _ByteStream)(prompt, tokens, special=special)


def continuation(prompt: Sequence[int], new: Sequence[int], tokens: TokenBytes) -> str:
    """Return the text of all new tokens `new` after a prompt."""
    stream = text_stream(prompt, tokens)
    return stream.add(new) + stream.finish()


class _ByteStream:
    """The stream for tokenizers in which the bytes of a token do not depend on other tokens. It decodes these bytes as UTF-8.

    With `special` the text contains special tokens.
    """

    def __init__(self, prompt: Sequence[int], tokens: TokenBytes, *, special: bool) -> None:
        self._tokens = tokens
        self._bytes = tokens.all if special else tokens.plain
        self._texts = self._bytes.texts
        before = b"".join([self._bytes[token] for token in prompt[-LONGEST_CHARACTER:]])
        self._held = before[utf_8_decode(before, "replace", False)[1] :]
        """Bytes of an incomplete character. The prompt may end with such bytes."""
        self.incomplete = False
        form = tokens.form
        self._at_start = form is not None and form.changes_first and not any(map(self._bytes.__getitem__, prompt))
        """Whether there is no text yet, and the tokenizer changes the first token of a text, for example by removing its space."""

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
    """The stream for tokenizers in which a token's text depends on earlier tokens. It decodes the last tokens again with each token.

    With `special` the text contains special tokens.
    """

    def __init__(self, prompt: Sequence[int], tokens: TokenBytes, *, special: bool) -> None:
        self._decode = partial(tokens.tokenizer.decode, skip_special_tokens=not special)
        self.incomplete = False
        self._window = list(prompt[-CONTEXT:])
        """The last tokens, which are decoded together."""
        self._returned = len(self._window)
        """The text of the first `_returned` tokens of `_window` has been returned."""
        self._before = self._decode(self._window)
        """The text of the first `_returned` tokens of `_window`."""

    def add(self, tokens: Sequence[int]) -> str:
        return "".join([self.add_one(token)[0] for token in tokens])

    def add_one(self, token: int) -> tuple[str, bytes]:
        self._window.append(token)
        text = self._advance(final=len(self._window) - self._returned > MOST_INCOMPLETE)
        return text, text.encode("utf-8")

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        """Return the text of the tokens after the returned ones. An incomplete character waits for more tokens unless `final`."""
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
