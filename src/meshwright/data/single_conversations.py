"""Conversations of chats, one by one, as questions to answer: the text before the last answer is the question."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.data.indexed import IndexedFile
from meshwright.data.packing import DocumentPart, TokenStream


class TokenizedConversation(NamedTuple):
    """Tokens of a conversation, `(tokens,)` int64, up to the end of its last answer. The answer begins at index `answer`."""

    tokens: np.ndarray
    answer: int


class SingleConversations:
    """The conversations of a stream that have a question and an answer, in the order of the stream. Each conversation is a window."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        starts, lengths = stream.document_ranges()
        if not stream.masked:
            starts = starts[:0]
            lengths = lengths[:0]
        pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
        answered = [_last_answer(stream.read_weights(start, start + length)) for start, length in pairs]
        used = np.array([answer is not None for answer in answered], dtype=bool)
        self._starts = starts[used]
        self._answers = np.array([answer for answer in answered if answer is not None], dtype=np.int64).reshape(-1, 2)

    @property
    def count(self) -> int:
        """Number of conversations."""
        return len(self._starts)

    @property
    def inputs(self) -> int:
        """Number of tokens in all conversations."""
        return int(self._answers[:, 1].sum())

    @property
    def longest_question(self) -> int:
        """Maximum number of tokens that any conversation has before its last answer."""
        return int(self._answers[:, 0].max(initial=0))

    def read(self, window: int) -> TokenizedConversation:
        """The conversation."""
        start, (answer, stop) = int(self._starts[window]), self._answers[window].tolist()
        return TokenizedConversation(self._stream.read(start, start + stop), answer)

    def parts(self, window: int) -> list[DocumentPart]:
        """The conversation as the part of a document."""
        start = int(self._starts[window])
        return self._stream.parts(start, start + int(self._answers[window, 1]))

    def files_of(self, windows: np.ndarray) -> set[int]:
        """The numbers of the files that contain these conversations."""
        return self._stream.files_at(self._starts[windows])

    def locate(self, window: int, at: int) -> tuple[IndexedFile, int]:
        """The file that contains token `at` of a conversation, and the token's number in that file."""
        return self._stream.locate(int(self._starts[window]) + at)


def _last_answer(weights: np.ndarray) -> tuple[int, int] | None:
    """The range (first, last + 1) of the last consecutive trained tokens. None if there are none, or if no token is before them."""
    trained = np.flatnonzero(weights)
    if not len(trained):
        return None
    stop = int(trained[-1]) + 1
    before = np.flatnonzero(weights[:stop] == 0)
    return (int(before[-1]) + 1, stop) if len(before) else None
