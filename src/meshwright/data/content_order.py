"""An order of documents that depends only on their tokens, not on names or order of input files, nor on shards."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import xxhash

from meshwright.data.indexed import IndexedFile
from meshwright.data.packing import TokenStream

PIECE_TOKENS = 1 << 20
"""Tokens that are read at a time to compute digests of documents."""


class ContentOrder(TokenStream):
    """The documents of several files, sorted by a digest of their tokens.

    Two corpora with the same documents therefore give the same stream, and any part of the stream is a random sample of documents. The
    first access reads all tokens once.
    """

    @cached_property
    def _documents(self) -> tuple[np.ndarray, np.ndarray]:
        """For each document of the stream: its start among the tokens of all files, one after another, and its end in the stream, int64."""
        starts, lengths = super().document_ranges()
        order = np.argsort(np.concatenate([_digests(file) for file in self.files]), kind="stable")
        return starts[order], np.cumsum(lengths[order])

    def document_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """The start of each document in the stream, and its number of tokens, `(documents,)` int64 each."""
        _, ends = self._documents
        lengths = np.diff(ends, prepend=0)
        return ends - lengths, lengths

    def files_of(self, windows: np.ndarray, seq_len: int) -> set[int]:
        """The numbers of the files that contain tokens of these windows, including the target after the last input."""
        ranges = [self._ranges(window * seq_len, (window + 1) * seq_len + 1) for window in windows.tolist()]
        return {shard for of_window in ranges for shard, _, _ in of_window}

    def files_at(self, offsets: np.ndarray) -> set[int]:
        """The numbers of the files that contain the tokens at these positions of the stream."""
        return {shard for offset in offsets.tolist() for shard, _, _ in self._ranges(offset, offset + 1)}

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The files' ranges that make up [start, stop) of the stream, as (shard, first, last + 1), in order."""
        starts, ends = self._documents
        ranges = []
        first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
        for origin, end, length in zip(
            starts[first : last + 1].tolist(),
            ends[first : last + 1].tolist(),
            np.diff(ends[first : last + 1], prepend=ends[first - 1] if first else 0).tolist(),
            strict=True,
        ):
            begin = origin - (end - length)  # add this to a position in the stream to get the position in the files
            ranges += super()._ranges(max(start, end - length) + begin, min(stop, end) + begin)
        return ranges


def _digests(file: IndexedFile) -> np.ndarray:
    """A digest of the tokens of each document in a file, `(documents,)` uint64."""
    bounds = file.document_bounds()
    digests = np.empty(file.documents, dtype=np.uint64)
    first = 0
    while first < file.documents:
        last = int(np.searchsorted(bounds, bounds[first] + PIECE_TOKENS, side="right")) - 1
        last = min(max(last, first + 1), file.documents)
        content = file.read(int(bounds[first]), int(bounds[last])).tobytes()
        edges = ((bounds[first : last + 1] - bounds[first]) * file.dtype.itemsize).tolist()
        for number in range(last - first):
            digests[first + number] = xxhash.xxh3_64_intdigest(content[edges[number] : edges[number + 1]])
        first = last
    return digests
