"""Windows of whole conversations: best-fit packing, so that no conversation is cut where a sequence ends.

A window has room for `seq_len` + 1 tokens, inputs and one more target. Conversations are taken from the longest to the
shortest; each goes into the window with the least space that is enough, or into a new one (best fit decreasing). Space
that is left is filled with a token that is not trained on. Of a conversation that is longer than a window only the
beginning is read, or nothing if no token of it is trained on. Which conversations share a window follows from their
lengths alone, so every rank and every start packs alike, and each epoch reads every conversation once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.data.indexed import IndexedFile
from meshwright.data.packing import DocumentPart, TokenStream, WindowTokens
from meshwright.policies.sample_order import permute

FEWEST_TOKENS = 2
"""Tokens of the shortest conversation that is read: one to read and one to predict."""


@dataclass(frozen=True)
class PackingCounts:
    """The conversations of a source in its windows, how many of them are truncated, and how many are left out.

    `left_out` are longer than a window, and no token of their beginning is trained on; `lost_tokens` are those that are not read. `fill` is
    the share of the windows' tokens that are of conversations.
    """

    conversations: int
    sequences: int
    truncated: int
    left_out: int
    lost_tokens: int
    fill: float
    what: str = "conversations"
    """What is packed: conversations, or answers to prompts."""

    def __str__(self) -> str:
        packed = f"{self.conversations:,} {self.what} fill {self.sequences:,} sequences"
        if not self.lost_tokens:
            return packed
        left_out = (
            f", {self.left_out:,} more are left out, as their beginning has nothing to train on"
            if self.left_out
            else ""
        )
        return (
            f"{packed}; {self.truncated:,} are longer and truncated{left_out}: {self.lost_tokens:,} tokens are not read"
        )


class ConversationWindows:
    """The conversations of a stream in windows of `seq_len` inputs; `filler` is the id of the token after the last one."""

    def __init__(self, stream: TokenStream, seq_len: int, filler: int) -> None:
        starts, whole = stream.document_ranges()
        room = seq_len + 1
        long = np.flatnonzero(whole > room)
        untrained = [
            number for number in long if not stream.read_weights(starts[number] + 1, starts[number] + room).any()
        ]
        used = whole >= FEWEST_TOKENS
        used[untrained] = False
        self._pack(stream, seq_len, filler, starts[used], np.minimum(whole[used], room))
        truncated = len(long) - len(untrained)
        lost = int(whole[whole >= FEWEST_TOKENS].sum() - self._lengths.sum())
        self.counts = replace(self.counts, truncated=truncated, left_out=len(untrained), lost_tokens=lost)

    def _pack(
        self,
        stream: TokenStream,
        seq_len: int,
        filler: int,
        starts: np.ndarray,
        lengths: np.ndarray,
        together: int = 1,
        room: int | None = None,
    ) -> None:
        """Pack documents of these `starts` and `lengths`, of which so many consecutive ones are `together` in a window.

        `room` is that of a window for them, by default all its `seq_len` + 1 tokens.
        """
        room = seq_len + 1 if room is None else room
        self._stream = stream
        self._seq_len = seq_len
        self._filler = filler
        self._document_starts = starts
        self._lengths = lengths
        window = best_fit(lengths.reshape(-1, together).sum(1), room)
        count = int(window.max(initial=-1)) + 1
        # Long conversations fill the first windows; in another order the first ones are a sample of all.
        window = np.repeat(permute(window, count, "windows") if count else window, together)
        self._by_window = np.argsort(window, kind="stable")
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(window, minlength=count))]).astype(np.int64)
        fill = int(lengths.sum()) / max(count * room, 1)
        self.counts = PackingCounts(len(lengths), count, 0, 0, 0, fill)

    @property
    def count(self) -> int:
        """Number of windows."""
        return self.counts.sequences

    @property
    def inputs(self) -> int:
        """Inputs of all windows together, those that fill them included."""
        return self.count * self._seq_len

    def read(self, window: int, with_documents: bool) -> WindowTokens:
        """The tokens of a window, those after the last conversation included, which count as one more document."""
        starts, lengths = self._conversations(window)
        stops = np.cumsum(lengths)
        room = self._seq_len + 1
        tokens = np.full(room, self._filler, dtype=np.int64)
        weights = np.zeros(room, dtype=np.float32 if self._stream.weighted else bool)
        for start, length, stop in zip(starts.tolist(), lengths.tolist(), stops.tolist(), strict=True):
            tokens[stop - length : stop] = self._stream.read(start, start + length)
            weights[stop - length : stop] = self._stream.read_weights(start, start + length)
            weights[stop - length] = 0  # its first token follows another conversation
        begins = np.concatenate([[0], stops if stops[-1] < room else stops[:-1]]).astype(np.int64)
        return WindowTokens(tokens, begins if with_documents else begins[:1], weights, int(stops[-1]))

    def parts(self, window: int) -> list[DocumentPart]:
        """The conversations of a window's inputs, each with the part that lies inside."""
        parts = []
        room = self._seq_len
        starts, lengths = self._conversations(window)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            parts += self._stream.parts(start, start + min(length, room))
            room -= length
        return parts

    def weights(self, window: int) -> np.ndarray:
        """The weights of a window's inputs in the loss, bool or float32, without the filling tokens."""
        starts, lengths = self._conversations(window)
        weights = [
            self._stream.read_weights(start, start + length)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return np.concatenate(weights)[: self._seq_len]

    def files_of(self, windows: np.ndarray) -> set[int]:
        """The numbers of the files that hold a part of these windows."""
        if not len(windows):
            return set()
        starts = np.concatenate([self._conversations(int(window))[0] for window in windows])
        return self._stream.files_at(starts)

    def locate(self, window: int, at: int) -> tuple[IndexedFile, int]:
        """The file that holds token `at` of a window, and the token's number there."""
        starts, lengths = self._conversations(window)
        number = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        return self._stream.locate(int(starts[number]) + at - int(lengths[:number].sum()))

    def _conversations(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts of a window's conversations in the stream, and the numbers of their tokens that are read."""
        numbers = self._by_window[self._bounds[window] : self._bounds[window + 1]]
        return self._document_starts[numbers], self._lengths[numbers]


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The bin of each length, of bins with this room: best fit decreasing. Lengths are 1 to `room`."""
    bins = np.empty(len(lengths), dtype=np.int64)
    bins_by_space: dict[int, list[int]] = {}
    spaces = 0  # bit s is set if a bin has space s, so that one shift finds the least space that is enough
    count = 0
    order = np.argsort(-lengths, kind="stable")
    for number, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            same_space = bins_by_space[space]
            chosen = same_space.pop()
            if not same_space:
                spaces ^= 1 << space
        else:
            space = room
            chosen = count
            count = count + 1
        bins[number] = chosen
        if left := space - length:
            bins_by_space.setdefault(left, []).append(chosen)
            spaces |= 1 << left
    return bins
