"""Documents are put one after another and cut into windows of one fixed length, so that nothing recompiles.

Window w of a text source is tokens [w·S, w·S + S] of its stream. Its first S tokens are the inputs; the targets are the same tokens shifted
by one. With S = 4, window 1 has tokens 4 to 8: inputs 4–7 and targets 5–8. Where documents begin is read from the index files on every rank
and never sent. Tokens at the end that do not fill a window are dropped. Chats are packed differently, as whole conversations
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
"""Target at a position that is not trained on."""


class DocumentPart(NamedTuple):
    """Tokens [start, stop) of one document, given by its number in its shard.

    `offset` is the position of the first of them in the stream.
    """

    shard: int
    document: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class PackedWindow:
    """Packed documents of a window. All arrays are `(seq,)` int64; `documents` numbers the documents from 0 within the window.

    Tokens from index `real` on are padding; None if there is no padding. `weights` `(seq,)`, bool or float32, are the weights of the
    targets in the loss; None if all are 1.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    real: int | None = None
    weights: np.ndarray | None = None


class WindowTokens(NamedTuple):
    """Tokens of a window `(seq + 1,)` int64; the positions where documents begin in it, the first always 0; and weights in the loss.

    `weights` is `(seq + 1,)`, bool or float32; None if all are 1. Tokens from index `real` on are padding; None if there is no padding.
    """

    tokens: np.ndarray
    begins: np.ndarray
    weights: np.ndarray | None
    real: int | None = None


class TokenStream:
    """The tokens of several shards as one sequence, one shard after another."""

    def __init__(self, files: Sequence[IndexedFile], weights: Sequence[WeightFile | None] | None = None) -> None:
        """`weights` has the weight file of each file; None for a file whose tokens all have weight 1."""
        self.files = list(files)
        self._weights = [None] * len(self.files) if weights is None else list(weights)
        self._starts = list(accumulate((file.tokens for file in self.files), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def windows(self, seq_len: int) -> int:
        """Number of windows with `seq_len` inputs and one more target that fit into the stream."""
        return max(len(self) - 1, 0) // seq_len

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int64."""
        parts = [self.files[shard].read(first, last) for shard, first, last in self._ranges(start, stop)]
        return np.concatenate(parts).astype(np.int64)

    @property
    def masked(self) -> bool:
        """Whether any file has weights, which say which tokens are trained on."""
        return any(weights is not None for weights in self._weights)

    @property
    def weighted(self) -> bool:
        """Whether any file can have weights other than 0 and 1."""
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
        """Positions in [start, stop), relative to `start`, where documents begin. The first is 0, even if its document began earlier."""
        return np.array([part.offset - start for part in self.parts(start, stop)], dtype=np.int64)

    def parts(self, start: int, stop: int) -> list[DocumentPart]:
        """The parts of documents in [start, stop), in order."""
        parts = []
        for shard, first, last in self._ranges(start, stop):
            for span in self.files[shard].document_spans(first, last):
                begin = max(span.start, first)
                end = min(span.stop, last)
                parts.append(DocumentPart(shard, span.document, begin - span.start, end - span.start, start))
                start += end - begin
        return parts

    def files_of(self, windows: np.ndarray, seq_len: int) -> set[int]:
        """The numbers of the files that contain tokens of these windows, including the target after the last input."""
        first = np.searchsorted(self._starts, windows * seq_len, side="right") - 1
        last = np.searchsorted(self._starts, (windows + 1) * seq_len, side="right") - 1
        pairs = set(zip(first.tolist(), last.tolist(), strict=True))
        return {number for begin, end in pairs for number in range(begin, end + 1)}

    def files_at(self, offsets: np.ndarray) -> set[int]:
        """The numbers of the files that contain the tokens at these positions of the stream."""
        return set((np.searchsorted(self._starts, offsets, side="right") - 1).tolist())

    def document_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """The start of each document in the stream, and its number of tokens, `(documents,)` int64 each."""
        bounds = [file.document_bounds() for file in self.files]
        starts = [start + bound[:-1] for start, bound in zip(self._starts, bounds, strict=False)]
        return np.concatenate(starts), np.concatenate([np.diff(bound) for bound in bounds])

    def locate(self, offset: int) -> tuple[IndexedFile, int]:
        """The file that contains the token at position `offset` of the stream, and the token's number in that file."""
        ((shard, first, _),) = self._ranges(offset, offset + 1)
        return self.files[shard], first

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, first, last + 1) for each shard that has tokens of [start, stop)."""
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
    """The successive windows of a stream whose tokens are all trained on."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self.count = stream.windows(seq_len)

    @property
    def inputs(self) -> int:
        """Number of inputs in all windows."""
        return self.count * self._seq_len

    def read(self, window: int, with_documents: bool) -> WindowTokens:
        """The tokens of a window. Without `with_documents`, the window counts as one document."""
        start = window * self._seq_len
        stop = (window + 1) * self._seq_len + 1
        begins = self._stream.begins(start, stop) if with_documents else np.zeros(1, dtype=np.int64)
        return WindowTokens(self._stream.read(start, stop), begins, None)

    def parts(self, window: int) -> list[DocumentPart]:
        """The parts of documents in a window's inputs, in order."""
        return self._stream.parts(window * self._seq_len, (window + 1) * self._seq_len)

    def files_of(self, windows: np.ndarray) -> set[int]:
        """The numbers of the files that contain tokens of these windows."""
        return self._stream.files_of(windows, self._seq_len)

    def locate(self, window: int, at: int) -> tuple[IndexedFile, int]:
        """The file that contains token `at` of a window, and the token's number in that file."""
        return self._stream.locate(window * self._seq_len + at)


def pack(
    tokens: np.ndarray,
    begins: np.ndarray,
    document_mask: bool,
    weights: np.ndarray | None = None,
    real: int | None = None,
) -> PackedWindow:
    """Pack S + 1 `tokens` (int64) as a window of S inputs. `begins` are the positions where documents begin, the first always 0.

    With `document_mask`, positions restart at each document, and a target that belongs to the next document becomes -1. A document that
    began before the window also starts at position 0. Without `document_mask` the window is one document with positions 0 to S - 1. If a
    target's weight in `weights` (S + 1,) is 0, the target becomes -1. `real` is passed on to the result.

    Example with `document_mask`: tokens 5 6 7 8 9, begins 0 and 3. Inputs 5 6 7 8, targets 6 7 -1 9, positions 0 1 2 0, documents 0 0 0 1.
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
    """The number of documents, and the tokens of the longest. `documents` `(…, seq)` has the document of each token; rows are separate."""
    first = np.ones(documents.shape, dtype=bool)
    first[..., 1:] = documents[..., 1:] != documents[..., :-1]
    begins = np.flatnonzero(first)
    return len(begins), int(np.diff(begins, append=documents.size).max())
