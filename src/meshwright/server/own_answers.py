"""Gives the server's own answers the tokens that the model generated, when they come back in a later prompt.

A client sends a conversation back as text. Encoding that text may give other tokens than the model had generated, and
then no cached block after the first difference can be used. Example: the model generated "un" + "happy", and the
tokenizer encodes "unhappy" as one token.

So the server keeps its newest answers. If a new prompt begins with an earlier prompt, and the text after it is that
prompt's answer, the answer's tokens replace the encoded ones. Only a digest of the earlier prompt is kept.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from xxhash import xxh3_128

from meshwright.data.token_bytes import TokenBytes

BLOCK = 256
"""Tokens in a block. Earlier prompts are looked up by the digest of their whole blocks."""
MOST_TOKENS = 1 << 20
"""Maximum number of tokens of all kept answers together; the oldest answers are dropped first."""
MOST_OF_BLOCK = 32
"""Maximum number of kept answers to prompts with the same whole blocks."""


class _Answer(NamedTuple):
    """An answer, and the length and digest of its prompt."""

    prompt_tokens: int
    """Number of tokens of the prompt."""
    digest: bytes
    """Digest of the whole prompt."""
    tokens: array[int]
    """Token ids of the answer."""


class OwnAnswers:
    """The newest answers, by the digest of their prompts' whole blocks."""

    def __init__(self, tokens: TokenBytes) -> None:
        """`tokens` gives the bytes of each token.

        If it has no `form`, the bytes of a token depend on its neighbours, and then nothing is kept.
        """
        self._tokens = tokens
        self._answers: OrderedDict[bytes, list[_Answer]] = OrderedDict()
        """Answers by the digest of their prompts' whole blocks. The key that was used last is the last one."""
        self._size = 0
        """Number of tokens of all kept answers."""
        self.results: Counter[str] = Counter()
        """How often a prompt began with an earlier prompt, by what followed it.

        `same`: an answer to the earlier prompt, already encoded as its own tokens; `taken`: an answer in other tokens,
        which were replaced; `other_text`: another text.
        """

    def keep(self, prompt: Sequence[int], answer: Sequence[int], salt: str) -> None:
        """Keep the tokens of `answer` to `prompt`. Only prompts with the same `salt` can get them."""
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
        self._answers.move_to_end(key)
        self._size += len(answer)
        while self._size > MOST_TOKENS and len(self._answers) > 1:
            self._size -= sum(len(kept.tokens) for kept in self._answers.popitem(last=False)[1])

    def replaced(self, prompt: Sequence[int], salt: str) -> Sequence[int]:
        """Return the prompt's token ids.

        Where it contains kept answers, their encoded tokens are replaced by the generated ones.
        """
        if not self._answers:
            return prompt
        ids = array("I", prompt)
        at = 0
        changed = False
        hasher = xxh3_128(salt.encode())
        while True:
            # Earlier prompts that end inside the next block have the digest of all blocks so far as their key. Shorter
            # prompts come first, because an answer to one of them may be part of a longer prompt.
            found = sorted(self._answers.get(hasher.digest(), ()), key=lambda kept: (kept.prompt_tokens, kept.digest))
            for _, group in groupby(found, key=lambda kept: kept.digest):
                answers = list(group)
                if not _begins_with(ids, at, hasher, answers[0]):
                    continue
                start = answers[0].prompt_tokens
                ends = [(end, kept.tokens) for kept in reversed(answers) if (end := self._end(ids, kept)) is not None]
                end, tokens = max(ends, key=lambda entry: entry[0], default=(start, None))
                if tokens is None:
                    self.results["other_text"] += 1
                elif ids[start:end] == tokens:
                    self.results["same"] += 1
                else:
                    ids = ids[:start] + tokens + ids[end:]
                    self.results["taken"] += 1
                    changed = True
            if at + BLOCK > len(ids):
                return ids if changed else prompt
            hasher.update(ids[at : at + BLOCK].tobytes())
            at += BLOCK

    def _end(self, ids: array[int], kept: _Answer) -> int | None:
        """Return the index in `ids`, which begin with the prompt of `kept`, where its text ends.

        None if another text follows the prompt.
        """
        content = self._tokens.all
        special = self._tokens.special
        text = b"".join([content[token] for token in kept.tokens])
        end = kept.prompt_tokens
        length = 0
        while length < len(text) and end < len(ids):
            length += len(content[ids[end]])
            end += 1
        there = ids[kept.prompt_tokens : end]
        # A special token is never treated as the ordinary text that spells it, nor the other way round.
        same_special = [id for id in there if id in special] == [id for id in kept.tokens if id in special]
        return end if b"".join([content[token] for token in there]) == text and same_special else None


def _begins_with(ids: array[int], at: int, hasher: Any, kept: _Answer) -> bool:
    """Return whether `ids` are the prompt of `kept` and more. `hasher` is the digest of the tokens before index `at`."""
    prompt = hasher.copy()
    prompt.update(ids[at : kept.prompt_tokens].tobytes())
    return len(ids) > kept.prompt_tokens and prompt.digest() == kept.digest
