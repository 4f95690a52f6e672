"""Windows of whole answers to prompts, good and bad ones: a pair is in one window, so in one micro-batch of one rank, and no answer is cut.

Windows have equal lengths and are packed by best fit, so ranks and micro-batches have equal work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.data.conversations import ConversationWindows
from meshwright.data.packing import TokenStream, WindowTokens
from meshwright.spec.errors import Damaged


class WindowAnswers(NamedTuple):
    """The answers of a window in order: their numbers in the stream, int64, and 1 for a good one, -1 for a bad one, float32."""

    numbers: np.ndarray
    signs: np.ndarray


class TooLong(Exception):
    """Answers that do not fit in a window: how many there are, the number of the first, and its tokens and those of its partner."""

    def __init__(self, count: int, first: int, tokens: int) -> None:
        super().__init__(count, first, tokens)
        self.count = count
        self.first = first
        self.tokens = tokens


class PreferenceWindows(ConversationWindows):
    """The answers of a stream in windows of `seq_len` inputs: `together` 2 keeps the answers of a pair together, 1 each answer by itself.

    `whole`: the last token of each answer is an input too, where its score is read; it need not be where the answer is only predicted.
    Raises TooLong for the first that does not fit, unless these are left out.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        filler: int,
        together: int,
        *,
        leaves_out: bool,
        whole: bool = False,
    ) -> None:
        starts, lengths = stream.document_ranges()
        if len(starts) % together:
            raise Damaged(f"{stream.files[0].bin_path.parent}: expected pairs of answers, found {len(starts)} answers")
        room = seq_len + (not whole)
        long = np.repeat(lengths.reshape(-1, together).sum(1) > room, together)
        if long.any() and not leaves_out:
            first = int(np.flatnonzero(long)[0])
            raise TooLong(int(long.sum()) // together, first, int(lengths[first : first + together].sum()))
        self._numbers = np.flatnonzero(~long)
        self.together = together
        self._pack(stream, seq_len, filler, starts[~long], lengths[~long], together, room)
        self.counts = replace(self.counts, what="answers")
        self.left_out = int(long.sum()) // together

    @property
    def most_answers(self) -> int:
        """Answers of the window that has most."""
        return int(np.diff(self._bounds).max(initial=0))

    def answers(self, window: int) -> WindowAnswers:
        """The answers of a window. Raises Damaged where a pair is no good answer and a bad one."""
        places = self._by_window[self._bounds[window] : self._bounds[window + 1]]
        starts, lengths = self._conversations(window)
        ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
        bad = np.array([self._stream.read_weights(start, start + length).min() < 0 for start, length in ranges], bool)
        if self.together == 2 and (bad[::2].any() or not bad[1::2].all()):
            raise Damaged(
                f"{self._stream.files[0].bin_path.parent}: expected good and bad answers in turn; prepare again"
            )
        return WindowAnswers(self._numbers[places], np.where(bad, -1, 1).astype(np.float32))

    def answers_of(self, windows: np.ndarray) -> np.ndarray:
        """The numbers of the answers of these windows in the stream."""
        places = [self._by_window[self._bounds[window] : self._bounds[window + 1]] for window in windows.tolist()]
        return self._numbers[np.concatenate(places)] if places else np.zeros(0, dtype=np.int64)

    def mismatched(self, window: int) -> WindowTokens:
        """The window with the answers moved on by one prompt, so that each prompt has the answer to the next one, the last the first's.

        It has as many tokens as the window. A window of one answer has none that is trained on.
        """
        starts, lengths = self._conversations(window)
        prompts = []
        answers = []
        weights = []
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            tokens = self._stream.read(start, start + length)
            trained = self._stream.read_weights(start, start + length) != 0
            begin = int(np.flatnonzero(trained)[0])
            prompts.append(tokens[:begin])
            answers.append(tokens[begin:])
            weights.append(trained[begin:])
        room = self._seq_len + 1
        alone = len(prompts) == 1
        whole = np.full(room, self._filler, dtype=np.int64)
        mask = np.zeros(room, dtype=bool)
        begins = []
        at = 0
        for number, prompt in enumerate(prompts):
            other = (number + 1) % len(prompts)
            stop = at + len(prompt) + len(answers[other])
            whole[at:stop] = np.concatenate([prompt, answers[other]])
            mask[at + len(prompt) : stop] = weights[other] & (not alone)
            mask[at] = False
            begins.append(at)
            at = stop
        begins += [at] if at < room else []
        return WindowTokens(whole, np.array(begins, dtype=np.int64), mask, at)


def padded(values: np.ndarray, count: int, filler: float) -> np.ndarray:
    """The values `(n,)` as `(count,)`, the rest `filler`."""
    return np.concatenate([values, np.full(count - len(values), filler, dtype=values.dtype)])
