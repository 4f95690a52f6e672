"""Counts which tokens end the answers of prepared chats. Answers are the ranges of tokens with a non-zero weight in the loss."""

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
"""White-space tokens that may follow the end token of an answer, at most."""


@dataclass(frozen=True)
class AnswerEnds:
    """How the answers in prepared chats end."""

    counts: dict[Token, int]
    """Answers that each special token ends, the most frequent token first."""
    unended: int
    """Answers that end without a special token."""
    trained: dict[Path, int]
    """Number of tokens with a non-zero weight, by the directory of their shards."""
    first: str = ""
    """Source file and id of the first chat with an answer that ends without a special token; empty if there is none."""

    @property
    def answers(self) -> int:
        return sum(self.counts.values()) + self.unended


def count_answer_ends(shards: Iterable[tuple[Path, Shard]], tokenizer: Tokenizer) -> AnswerEnds:
    """Count the last token of each answer in `shards`, which are shards of chats, each with its directory.

    If white space with a non-zero weight follows a special token, the special token still counts as the end.
    """
    reader = _Reader(tokenizer)
    for directory, shard in shards:
        reader.read(directory / shard.name, shard)
    ended = {Token(id, tokenizer.id_to_token(id) or ""): count for id, count in reader.ended.most_common()}
    return AnswerEnds(ended, reader.unended, dict(reader.trained), reader.first)


class _Reader:
    """Counts the ends of answers, one shard after another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ended: Counter[int] = Counter()
        self.trained: Counter[Path] = Counter()
        self.unended = 0
        self.first = ""
        self._tokenizer = tokenizer
        self._special = np.array(sorted(tokenizer.get_added_tokens_decoder()), dtype=np.int64)
        self._spaces: dict[int, bool] = {}

    def read(self, stem: Path, shard: Shard) -> None:
        """Count the answers of one shard, given by its path without suffix."""
        assert shard.weights is not None, "a shard of chats has weights"
        file = IndexedFile(stem)
        weights = WeightFile(stem, file.tokens, shard.weights)
        bounds = file.document_bounds()
        for start in range(0, file.tokens, TOKENS_AT_ONCE):
            self._read_range(file, weights, bounds, start, min(start + TOKENS_AT_ONCE, file.tokens))

    def _read_range(self, file: IndexedFile, weights: WeightFile, bounds: np.ndarray, start: int, stop: int) -> None:
        """Count the answers whose last token is in [start, stop)."""
        # The window includes tokens before the range, to find an end token before white space, and one token after the range, to see
        # whether an answer continues there.
        low = max(0, start - MOST_SPACES)
        high = min(stop + 1, file.tokens)
        tokens = file.read(low, high).astype(np.int64)
        trained = weights.read(low, high) != 0
        self.trained[file.stem.parent] += int(np.count_nonzero(trained[start - low : stop - low]))
        goes_on = np.append(trained[1:], False)
        inside = bounds[np.searchsorted(bounds, low, side="right") : np.searchsorted(bounds, high, side="left")]
        goes_on[inside - low - 1] = False  # the next token belongs to another chat
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
        """For each answer, the position of the special token before its final white space; if there is none, its position in `last`."""
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
        """Whether a token decodes to white space only."""
        if id not in self._spaces:
            self._spaces[id] = not self._tokenizer.decode([id], skip_special_tokens=False).strip()
        return self._spaces[id]


def _document(stem: Path, bounds: np.ndarray, token: int) -> str:
    """Source file and id of the document that contains token number `token` of a shard, as "file [id]"."""
    number = int(np.searchsorted(bounds, token, side="right")) - 1
    with documents_path(stem).open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines):
            if line_number == number:
                file, identity, *_ = json.loads(line)
                return f"{file} [{identity}]"
    return str(stem)
