"""The tokens that end the answers of prepared chats, counted in the weights of their shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from meshwright.data.indexed import IndexedFile
from meshwright.data.manifest import Shard, documents_path
from meshwright.data.text_format import Token
from meshwright.data.token_weights import WeightFile

TOKENS_AT_ONCE = 1 << 22
MOST_SPACES = 8
"""Tokens of white space at most that may follow the end token of an answer."""


@dataclass(frozen=True)
class AnswerEnds:
    """How many answers each special token ends, the most frequent first, and how many end with no special token.

    `trained` are the tokens that are trained on, by the directory of their shards.
    """

    counts: dict[Token, int]
    unended: int
    trained: dict[Path, int]
    first: str = ""
    """File and id of the first chat with an answer that ends with no special token."""

    @property
    def answers(self) -> int:
        return sum(self.counts.values()) + self.unended


def count_answer_ends(shards: Iterable[tuple[Path, Shard]], tokenizer: Tokenizer) -> AnswerEnds:
    """Count the last tokens of the answers, the ranges that are trained on, in shards of chats, each with its directory.

    A special token may be followed by white space that is trained on too.
    """
    reader = _Reader(tokenizer)
    for directory, shard in shards:
        reader.read(directory / shard.name, shard)
    ended = {Token(id, tokenizer.id_to_token(id) or ""): count for id, count in reader.ended.most_common()}
    return AnswerEnds(ended, reader.unended, dict(reader.trained), reader.first)


class _Reader:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ended: Counter[int] = Counter()
        self.trained: Counter[Path] = Counter()
        self.unended = 0
        self.first = ""
        self._tokenizer = tokenizer
        self._special = np.array(sorted(tokenizer.get_added_tokens_decoder()), dtype=np.int64)
        self._spaces: dict[int, bool] = {}

    def read(self, stem: Path, shard: Shard) -> None:
        assert shard.weights is not None, "a shard of chats has weights"
        file = IndexedFile(stem)
        weights = WeightFile(stem, file.tokens, shard.weights)
        bounds = file.document_bounds()
        for start in range(0, file.tokens, TOKENS_AT_ONCE):
            self._read_range(file, weights, bounds, start, min(start + TOKENS_AT_ONCE, file.tokens))

    def _read_range(self, file: IndexedFile, weights: WeightFile, bounds: np.ndarray, start: int, stop: int) -> None:
        """Count the answers whose last token is one of [start, stop)."""
        # The window has tokens before the range, to look behind white space, and one after it, to see whether an answer goes on.
        low = max(0, start - MOST_SPACES)
        high = min(stop + 1, file.tokens)
        tokens = file.read(low, high).astype(np.int64)
        trained = weights.read(low, high) != 0
        self.trained[file.stem.parent] += int(np.count_nonzero(trained[start - low : stop - low]))
        goes_on = np.append(trained[1:], False)
        inside = bounds[np.searchsorted(bounds, low, side="right") : np.searchsorted(bounds, high, side="left")]
        goes_on[inside - low - 1] = False  # the next token is of another chat
        last = np.flatnonzero(trained & ~goes_on)
        last = last[(last >= start - low) & (last < stop - low)]
        at = self._without_spaces(tokens, trained, last)
        ends = np.isin(tokens[at], self._special)
        ids, counts = np.unique(tokens[at][ends], return_counts=True)
        self.ended.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
        if not ends.all():
            self.unended += int((~ends).sum())
            self.first = self.first or _document(file.stem, bounds, low + int(last[~ends][0]))

    def _without_spaces(self, tokens: np.ndarray, trained: np.ndarray, last: np.ndarray) -> np.ndarray:
        """For each answer, which ends at `last`, the position of the special token before its white space; without one, `last`."""
        at = last.copy()
        for _ in range(MOST_SPACES):
            back = (at > 0) & ~np.isin(tokens[at], self._special)
            back &= np.array([self._is_space(id) for id in tokens[at].tolist()], dtype=bool)
            back[back] &= trained[at[back] - 1]
            if not back.any():
                break
            at[back] -= 1
        return np.where(np.isin(tokens[at], self._special), at, last)

    def _is_space(self, id: int) -> bool:
        if id not in self._spaces:
            self._spaces[id] = not self._tokenizer.decode([id], skip_special_tokens=False).strip()
        return self._spaces[id]


def _document(stem: Path, bounds: np.ndarray, token: int) -> str:
    """The file and id of the document that has a token of a shard."""
    number = int(np.searchsorted(bounds, token, side="right")) - 1
    with documents_path(stem).open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines):
            if line_number == number:
                file, identity, *_ = json.loads(line)
                return f"{file} [{identity}]"
    return str(stem)
