"""Windows of good and bad answers to prompts. No answer is cut, and both answers of a pair are in one window, hence on one rank.

Windows have equal lengths, and answers are packed by best fit, so ranks and micro-batches have equal work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.data.conversations import ConversationWindows
from meshwright.data.packing import TokenStream, WindowTokens
from meshwright.spec.errors import Damaged


class WindowAnswers(NamedTuple):
    """The answers in a window, in order: their numbers in the stream, int64; and signs, float32: 1 for a good answer, -1 for a bad one."""

    numbers: np.ndarray
    signs: np.ndarray


class TooLong(Exception):
    """Some answers are longer than a window.

    `count`: how many answers (or pairs). `first`: number of the first such answer. `tokens`: its tokens, including the other answer of its
    pair.
    """

    def __init__(self, count: int, first: int, tokens: int) -> None:
        super().__init__(count, first, tokens)
        self.count = count
        self.first = first
        self.tokens = tokens


class PreferenceWindows(ConversationWindows):
    """Answers of a stream in windows of `seq_len` inputs. `together` is 2 to keep both answers of a pair together, 1 for single answers.

    With `whole`, the last token of each answer is an input too, because its score is read there. Otherwise, the last token is only a
    target. Raises TooLong if an answer does not fit, unless such answers are left out (`leaves_out`).
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
        """The number of answers in the window that has the most."""
        return int(np.diff(self._bounds).max(initial=0))

    def answers(self, window: int) -> WindowAnswers:
        """The answers of a window. Raises Damaged if a pair does not consist of a good and a bad answer, in this order."""
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
        """The numbers, in the stream, of the answers in these windows."""
        places = [self._by_window[self._bounds[window] : self._bounds[window + 1]] for window in windows.tolist()]
        return self._numbers[np.concatenate(places)] if places else np.zeros(0, dtype=np.int64)

    def mismatched(self, window: int) -> WindowTokens:
        """The window with answers exchanged: each prompt gets the answer to the next one, and the last prompt that to the first.

        The number of tokens stays the same. In a window with one answer, no token is trained on.
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
    """`values` `(n,)`, extended with `filler` to `(count,)`."""
    return np.concatenate([values, np.full(count - len(values), filler, dtype=values.dtype)])
