"""Log probabilities of a prompt's tokens, in a compact form for messages between processes. This module imports no torch."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_FLOAT = "f"
"""Type code of `array` for fp32."""
_INTEGER = "I"
"""Type code of `array` for unsigned integers of 4 bytes."""


class PromptToken(NamedTuple):
    """The log probability of one prompt token, given the tokens before it."""

    chosen: float
    rank: int
    """Rank of the token among all tokens of the vocabulary; 1 for the likeliest."""
    top: Sequence[tuple[int, float]]
    """(token id, log probability) of the likeliest tokens, the likeliest first."""


class PromptLogprobs(NamedTuple):
    """Log probabilities of consecutive tokens of a prompt, fp32. The first token of a prompt has none.

    They are arrays, because a prompt may have 100,000 tokens: creating an object for each would take as long as an
    engine step.
    """

    chosen: array[float]
    """`(tokens,)`: log probability of each prompt token."""
    ranks: array[int]
    """`(tokens,)`: rank of each prompt token; 1 if it is the likeliest."""
    top_tokens: array[int]
    """`(tokens, most)`: ids of the likeliest tokens at each position, the likeliest first."""
    top: array[float]
    """`(tokens, most)`: log probabilities of `top_tokens`."""

    @classmethod
    def of_bytes(cls, chosen: bytes, ranks: bytes, top_tokens: bytes, top: bytes) -> PromptLogprobs:
        """Return the log probabilities whose arrays have these bytes: numbers of 4 bytes in this machine's byte order."""
        return cls(array(_FLOAT, chosen), array(_INTEGER, ranks), array(_INTEGER, top_tokens), array(_FLOAT, top))

    @classmethod
    def empty(cls) -> PromptLogprobs:
        """Return log probabilities of no tokens."""
        return cls.of_bytes(b"", b"", b"", b"")

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.chosen)

    @property
    def finite(self) -> bool:
        """Whether no log probability is NaN. NaN marks a token whose logits were not finite."""
        return not any(map(math.isnan, self.chosen))

    def extend(self, following: PromptLogprobs) -> None:
        """Append the log probabilities of the next tokens."""
        for mine, others in zip(self, following, strict=True):
            mine.frombytes(others.tobytes())

    def each(self) -> Iterator[PromptToken]:
        """Yield the log probabilities of one token after the other."""
        top_count = len(self.top) // max(self.tokens, 1)
        for index, (chosen, rank) in enumerate(zip(self.chosen, self.ranks, strict=True)):
            likeliest = slice(index * top_count, (index + 1) * top_count)
            yield PromptToken(chosen, rank, list(zip(self.top_tokens[likeliest], self.top[likeliest], strict=True)))

    def packed(self) -> list[str]:
        """Return the four arrays as base64 texts, for a JSON message."""
        return [base64.b64encode(values.tobytes()).decode("ascii") for values in self]

    @classmethod
    def unpack(cls, texts: Sequence[str]) -> PromptLogprobs:
        """Return what `packed` has packed."""
        return cls.of_bytes(*map(base64.b64decode, texts))
