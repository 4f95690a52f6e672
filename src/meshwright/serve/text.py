"""Incremental detokenisation: the text of a growing list of tokens, character by complete character."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Character to which a tokenizer decodes bytes that are no complete character."""
CONTEXT = 5
"""Fewest tokens before the new ones that are decoded with them: a decoder may treat the first token differently."""
MOST_CONTEXT = 20
"""Most such tokens: as long as they stay the same, their text is known."""


class TextStream:
    """The text of tokens as they come; a character that takes several tokens is returned with the last of them."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        """`special`: the text has special tokens."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=not special)
        self._tokens: list[int] = []
        self._context = 0
        """First token that is decoded again."""
        self._returned = 0
        """Tokens whose text has been returned."""
        self._before = ""
        """The text of the tokens from `_context` to `_returned`."""

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens complete."""
        self._tokens += tokens
        return self._advance(final=False)

    def finish(self) -> str:
        """The text of the last tokens, complete or not."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._returned == len(self._tokens):
            return ""
        text = self._decode(self._tokens[self._context :])
        if text.endswith(INCOMPLETE) and not final:
            return ""
        new = text[len(self._before) :]
        self._returned, self._before = len(self._tokens), text
        if self._returned - self._context > MOST_CONTEXT:
            self._context = self._returned - CONTEXT
            self._before = self._decode(self._tokens[self._context :])
        return new
