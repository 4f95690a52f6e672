"""Windows of whole conversations, packed by best fit, so that no conversation is cut at the end of a sequence.

A window has room for `seq_len` + 1 tokens: the inputs and one more target. Conversations are placed from the longest to the shortest. Each
goes into the window with the least space that is still enough, or into a new window (best fit decreasing). Space that is left is filled
with a padding token, which is not trained on.

If a conversation is longer than a window, only its beginning is used, or nothing if no token of the beginning is trained on. Which
conversations share a window depends only on their lengths, so every rank and every start packs in the same way. Each epoch reads every
conversation once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.data.indexed import IndexedFile
from meshwright.data.packing import DocumentPart, TokenStream, WindowTokens
from meshwright.policies.sample_order import permute

FEWEST_TOKENS = 2
"""A shorter conversation is not used: training needs one token to read and one to predict."""


@dataclass(frozen=True)
class PackingCounts:
    """How the conversations of a source were packed.

    `left_out` counts conversations that are longer than a window and have no trained token in their beginning. `lost_tokens` counts all
    tokens that are not used. `fill` is the share of the windows' tokens that belong to conversations.
    """

    conversations: int
    sequences: int
    truncated: int
    left_out: int
    lost_tokens: int
    fill: float
    what: str = "conversations"
    """What was packed, for messages: conversations, or answers to prompts."""

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
    """The conversations of a stream in windows of `seq_len` inputs. `filler` is the padding token."""

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
        """Pack documents with these `starts` and `lengths`. Each `together` consecutive documents stay in one window.

        `room` is the number of tokens for them in a window, by default `seq_len` + 1.
        """
        room = seq_len + 1 if room is None else room
        self._stream = stream
        self._seq_len = seq_len
        self._filler = filler
        self._document_starts = starts
        self._lengths = lengths
        window = best_fit(lengths.reshape(-1, together).sum(1), room)
        count = int(window.max(initial=-1)) + 1
        # Best fit puts long conversations into the first windows. Shuffle the windows, so that the first ones are a sample of all.
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
        """Number of inputs in all windows, including padding."""
        return self.count * self._seq_len

    def read(self, window: int, with_documents: bool) -> WindowTokens:
        """The tokens of a window. Padding after the last conversation counts as one more document."""
        starts, lengths = self._conversations(window)
        stops = np.cumsum(lengths)
        room = self._seq_len + 1
        tokens = np.full(room, self._filler, dtype=np.int64)
        weights = np.zeros(room, dtype=np.float32 if self._stream.weighted else bool)
        for start, length, stop in zip(starts.tolist(), lengths.tolist(), stops.tolist(), strict=True):
            tokens[stop - length : stop] = self._stream.read(start, start + length)
            weights[stop - length : stop] = self._stream.read_weights(start, start + length)
            weights[stop - length] = 0  # this token would be predicted from the conversation before
        begins = np.concatenate([[0], stops if stops[-1] < room else stops[:-1]]).astype(np.int64)
        return WindowTokens(tokens, begins if with_documents else begins[:1], weights, int(stops[-1]))

    def parts(self, window: int) -> list[DocumentPart]:
        """The conversations in a window's inputs, each with the range of it that is in the window."""
        parts = []
        room = self._seq_len
        starts, lengths = self._conversations(window)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            parts += self._stream.parts(start, start + min(length, room))
            room -= length
        return parts

    def weights(self, window: int) -> np.ndarray:
        """The weights of a window's inputs in the loss, bool or float32, without padding."""
        starts, lengths = self._conversations(window)
        weights = [
            self._stream.read_weights(start, start + length)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return np.concatenate(weights)[: self._seq_len]

    def files_of(self, windows: np.ndarray) -> set[int]:
        """The numbers of the files that contain tokens of these windows."""
        if not len(windows):
            return set()
        starts = np.concatenate([self._conversations(int(window))[0] for window in windows])
        return self._stream.files_at(starts)

    def locate(self, window: int, at: int) -> tuple[IndexedFile, int]:
        """The file that contains token `at` of a window, and the token's number in that file."""
        starts, lengths = self._conversations(window)
        number = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        return self._stream.locate(int(starts[number]) + at - int(lengths[:number].sum()))

    def _conversations(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """For each conversation of a window: its start in the stream, and how many of its tokens are used."""
        numbers = self._by_window[self._bounds[window] : self._bounds[window + 1]]
        return self._document_starts[numbers], self._lengths[numbers]


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """For each length, the number of the bin into which best fit decreasing puts it. Bins have space `room`; lengths are 1 to `room`."""
    bins = np.empty(len(lengths), dtype=np.int64)
    bins_by_space: dict[int, list[int]] = {}
    spaces = 0  # bit s is set if a bin has s free tokens, so one shift finds the least space that is enough
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
