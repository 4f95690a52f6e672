"""Documents laid end to end and cut into windows of one fixed length, so that nothing recompiles.

Window w of a text source is tokens [w*S, w*S + S] of its stream: S inputs, and the same shifted by one as targets. Where
documents begin is read from the index on every rank and never sent. The tail that does not fill a window is dropped. Chats are packed whole
(`data.conversations`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshwright.data.indexed import IndexedFile
from meshwright.data.token_weights import WeightFile

IGNORED = -1
"""Target of a position that is not trained on."""


class DocumentPart(NamedTuple):
    """Tokens [start, stop) of one document, which is number `document` of shard `shard`; `offset` is where in the
    stream they begin.
    """

    shard: int
    document: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class PackedWindow:
    """Packed documents of a window, all `(seq,)` int64; `documents` counts from 0 within the window.

    Tokens from number `real` on only fill the window; None: there are none. `weights` `(seq,)`, bool or float32, are those of the targets
    in the loss; None: all 1.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    real: int | None = None
    weights: np.ndarray | None = None


class WindowTokens(NamedTuple):
    """Tokens `(seq + 1,)` int64 of a window, where documents begin in it, 0 first, and their weights in the loss.

    `weights` `(seq + 1,)`, bool or float32; None: all 1. Tokens from number `real` on only fill the window; None: there are none.
    """

    tokens: np.ndarray
    begins: np.ndarray
    weights: np.ndarray | None
    real: int | None = None


class TokenStream:
    """The tokens of several shards as one sequence, in the order of the shards."""

    def __init__(self, files: Sequence[IndexedFile], weights: Sequence[WeightFile | None] | None = None) -> None:
        """`weights` belong to `files`; the tokens of a file without have the weight 1."""
        self.files = list(files)
        self._weights = [None] * len(self.files) if weights is None else list(weights)
        self._starts = list(accumulate((file.tokens for file in self.files), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def windows(self, seq_len: int) -> int:
        """Number of windows of `seq_len` inputs and one more target that fit."""
        return max(len(self) - 1, 0) // seq_len

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int64."""
        parts = [self.files[shard].read(first, last) for shard, first, last in self._ranges(start, stop)]
        return np.concatenate(parts).astype(np.int64)

    @property
    def masked(self) -> bool:
        """Whether a file has weights, which tell the tokens that are trained on."""
        return any(weights is not None for weights in self._weights)

    @property
    def weighted(self) -> bool:
        """Whether a token may have another weight than 0 and 1."""
        return any(weights is not None and weights.kind == "weights" for weights in self._weights)

    def read_weights(self, start: int, stop: int) -> np.ndarray:
        """The weights of tokens [start, stop) in the loss, bool or float32."""
        parts = [(self._weights[shard], first, last) for shard, first, last in self._ranges(start, stop)]
        return np.concatenate(
            [
                np.ones(last - first, bool) if weights is None else weights.read(first, last)
                for weights, first, last in parts
            ]
        )

    def begins(self, start: int, stop: int) -> np.ndarray:
        """Starts of documents in [start, stop), relative to `start`; the first, which may have begun earlier, at 0."""
        return np.array([part.offset - start for part in self.parts(start, stop)], dtype=np.int64)

    def parts(self, start: int, stop: int) -> list[DocumentPart]:
        """The documents of tokens [start, stop), each with the part that lies inside, in order."""
        parts = []
        for shard, first, last in self._ranges(start, stop):
            for span in self.files[shard].document_spans(first, last):
                begin = max(span.start, first)
                end = min(span.stop, last)
                parts.append(DocumentPart(shard, span.document, begin - span.start, end - span.start, start))
                start += end - begin
        return parts

    def files_of(self, windows: np.ndarray, seq_len: int) -> set[int]:
        """The numbers of the files that hold a part of these windows, the target behind the last input included."""
        first = np.searchsorted(self._starts, windows * seq_len, side="right") - 1
        last = np.searchsorted(self._starts, (windows + 1) * seq_len, side="right") - 1
        pairs = set(zip(first.tolist(), last.tolist(), strict=True))
        return {number for begin, end in pairs for number in range(begin, end + 1)}

    def files_at(self, offsets: np.ndarray) -> set[int]:
        """The numbers of the files that hold these tokens of the stream."""
        return set((np.searchsorted(self._starts, offsets, side="right") - 1).tolist())

    def document_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Start of each document in the stream, and its number of tokens, `(documents,)` int64 each."""
        bounds = [file.document_bounds() for file in self.files]
        starts = [start + bound[:-1] for start, bound in zip(self._starts, bounds, strict=False)]
        return np.concatenate(starts), np.concatenate([np.diff(bound) for bound in bounds])

    def locate(self, offset: int) -> tuple[IndexedFile, int]:
        """The file that holds a token of the stream, and the token's number there."""
        ((shard, first, _),) = self._ranges(offset, offset + 1)
        return self.files[shard], first

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, first, last+1) for each shard that holds a part of [start, stop)."""
        ranges = []
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[shard + 1])
            if end > start:
                ranges.append((shard, start - self._starts[shard], end - self._starts[shard]))
            start = end
            shard = shard + 1
        return ranges


class StreamWindows:
    """The windows of a stream without masks, one after another."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self.count = stream.windows(seq_len)

    @property
    def inputs(self) -> int:
        """Inputs of all windows together."""
        return self.count * self._seq_len

    def read(self, window: int, with_documents: bool) -> WindowTokens:
        """The tokens of a window; without `with_documents` as one document."""
        start = window * self._seq_len
        stop = (window + 1) * self._seq_len + 1
        begins = self._stream.begins(start, stop) if with_documents else np.zeros(1, dtype=np.int64)
        return WindowTokens(self._stream.read(start, stop), begins, None)

    def parts(self, window: int) -> list[DocumentPart]:
        """The documents of a window's inputs, each with the part that lies inside."""
        return self._stream.parts(window * self._seq_len, (window + 1) * self._seq_len)

    def files_of(self, windows: np.ndarray) -> set[int]:
        """The numbers of the files that hold a part of these windows."""
        return self._stream.files_of(windows, self._seq_len)

    def locate(self, window: int, at: int) -> tuple[IndexedFile, int]:
        """The file that holds token `at` of a window, and the token's number there."""
        return self._stream.locate(window * self._seq_len + at)


def pack(
    tokens: np.ndarray,
    begins: np.ndarray,
    document_mask: bool,
    weights: np.ndarray | None = None,
    real: int | None = None,
) -> PackedWindow:
    """A window of S inputs from `tokens` (S + 1,) int64; `begins` are the places in it where a document begins, 0
    first.

    With `document_mask`, positions restart at each document and a target that lies in the next document is -1; without
    it the window is one text: positions 0 to S - 1, documents all 0. A document that began earlier starts at position 0
    too. A target whose weight, of `weights` (S + 1,), is 0 is -1. `real` is that of `PackedWindow`.
    """
    inputs = tokens[:-1]
    targets = tokens[1:]
    if weights is not None:
        weights = weights[1:]
        targets = np.where(weights != 0, targets, IGNORED)
    everything = np.arange(len(tokens))
    if not document_mask:
        return PackedWindow(inputs, targets, everything[:-1], np.zeros_like(inputs), real, weights)
    lengths = np.diff(begins, append=len(tokens))
    documents = np.repeat(np.arange(len(begins)), lengths)
    positions = everything - np.repeat(begins, lengths)
    masked = np.where(documents[1:] == documents[:-1], targets, IGNORED)
    return PackedWindow(inputs, masked, positions[:-1], documents[:-1], real, weights)


def document_sizes(documents: np.ndarray) -> tuple[int, int]:
    """The number of documents and the tokens of the longest, of document numbers `(…, seq)` whose rows are separate."""
    first = np.ones(documents.shape, dtype=bool)
    first[..., 1:] = documents[..., 1:] != documents[..., :-1]
    begins = np.flatnonzero(first)
    return len(begins), int(np.diff(begins, append=documents.size).max())
