"""Token sequences of words that an answer must not contain (`bad_words`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Return the token sequences of each word, without duplicates.

    A tokenizer may encode a word differently at the beginning of a text, after a space and at the beginning of a line.
    All three encodings are included. Some tokenizers put a space before every text: there, only the encoding at the
    beginning of a line has no space.

    A sequence that ends with another sequence of the list is left out: if the shorter one cannot occur, neither can the
    longer one.
    """
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ") or word
        forms = [_ids(tokenizer, bare), _ids(tokenizer, f" {bare}"), _after_line(tokenizer, bare)]
        for form in forms:
            if form and form not in found:
                found.append(form)
    return [form for form in found if not any(form != other and form[-len(other) :] == other for other in found)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _after_line(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text after a line break; none if the tokenizer merges the line break with the text."""
    line = _ids(tokenizer, "\n")
    both = _ids(tokenizer, f"\n{text}")
    return both[len(line) :] if both[: len(line)] == line else []
