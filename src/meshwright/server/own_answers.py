"""The server's own answers in later prompts: they keep the tokens that the model has drawn.

A conversation comes back as text. Encoded again, an answer may get other tokens than the model has drawn, and then no cached block behind
the first difference fits. If a prompt begins with an earlier one, and its next bytes are those of the answer to it, it gets that answer's
tokens. What is kept of a prompt is its digest.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_128

from meshwright.data.token_bytes import TokenBytes

BLOCK = 256
"""Tokens between two looks for an earlier prompt."""
MOST_TOKENS = 1 << 20
"""Tokens of all answers that are kept; the oldest go first."""
MOST_OF_BLOCK = 32
"""Answers to prompts whose whole blocks are the same."""


class _Answer(NamedTuple):
    """An answer, and the prompt that it belongs to."""

    prompt_tokens: int
    digest: bytes
    """Digest of the whole prompt."""
    tokens: array[int]


class OwnAnswers:
    """The newest answers, by the whole blocks of their prompts."""

    def __init__(self, tokens: TokenBytes) -> None:
        """Without a form of `tokens` the bytes of a token depend on those around it, and nothing is kept."""
        self._tokens = tokens
        self._answers: OrderedDict[bytes, list[_Answer]] = OrderedDict()
        self._size = 0
        self.results: Counter[str] = Counter()
        """How often a prompt began with an earlier one, by what came behind it: `same`, the answer's tokens anyway; `taken`, its text in
        other tokens; `other_text`, another text."""

    def keep(self, prompt: Sequence[int], answer: Sequence[int], salt: str) -> None:
        """Keep an answer. Only prompts of equal salt get its tokens."""
        if self._tokens.form is None or not answer:
            return
        ids = array("I", prompt)
        hasher = xxh3_128(salt.encode())
        whole = len(ids) // BLOCK * BLOCK
        hasher.update(ids[:whole].tobytes())
        key = hasher.digest()
        hasher.update(ids[whole:].tobytes())
        found = self._answers.setdefault(key, [])
        if len(found) >= MOST_OF_BLOCK:
            self._size -= len(found.pop(0).tokens)
        found.append(_Answer(len(ids), hasher.digest(), array("I", answer)))
        found.sort(key=lambda kept: kept.prompt_tokens)
        self._answers.move_to_end(key)
        self._size += len(answer)
        while self._size > MOST_TOKENS and len(self._answers) > 1:
            self._size -= sum(len(kept.tokens) for kept in self._answers.popitem(last=False)[1])

    def replaced(self, prompt: Sequence[int], salt: str) -> Sequence[int]:
        """The prompt, with the tokens of the answers that it has."""
        if not self._answers:
            return prompt
        ids = array("I", prompt)
        at = 0
        changed = False
        hasher = xxh3_128(salt.encode())
        while True:
            for kept in self._answers.get(hasher.digest(), ()):
                end = self._end(ids, at, hasher, kept)
                if end is None:
                    continue
                if ids[kept.prompt_tokens : end] == kept.tokens:
                    self.results["same"] += 1
                    continue
                ids = ids[: kept.prompt_tokens] + kept.tokens + ids[end:]
                self.results["taken"] += 1
                changed = True
            if at + BLOCK > len(ids):
                return ids if changed else prompt
            hasher.update(ids[at : at + BLOCK].tobytes())
            at += BLOCK

    def _end(self, ids: array[int], at: int, hasher: Any, kept: _Answer) -> int | None:
        """Where an answer's text ends in a prompt; None if it is not in it. `hasher` has the tokens before `at`."""
        prompt = hasher.copy()
        prompt.update(ids[at : kept.prompt_tokens].tobytes())
        if len(ids) <= kept.prompt_tokens or prompt.digest() != kept.digest:
            return None
        content = self._tokens.all
        special = self._tokens.special
        text = b"".join([content[token] for token in kept.tokens])
        end = kept.prompt_tokens
        length = 0
        while length < len(text) and end < len(ids):
            length += len(content[ids[end]])
            end += 1
        there = ids[kept.prompt_tokens : end]
        # A special token is never taken for the text that spells it, nor the other way.
        same_special = [id for id in there if id in special] == [id for id in kept.tokens if id in special]
        if b"".join([content[token] for token in there]) == text and same_special:
            return end
        self.results["other_text"] += 1
        return None
