"""Words that a text may not have, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The token ids of each word at the beginning of a text, after a space, and at the beginning of a line.

    Tokenizers that begin each text with a space have the word without one at the beginning of a line only. A sequence that ends with
    another one is left out: it cannot occur if the other does not.
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
    """The token ids of a text behind the end of a line; empty if they are not apart from it."""
    line = _ids(tokenizer, "\n")
    both = _ids(tokenizer, f"\n{text}")
    return both[len(line) :] if both[: len(line)] == line else []
