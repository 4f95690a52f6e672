"""Log probabilities of a prompt's tokens: their form for other processes. Torch-free."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_FLOAT = "f"
_INTEGER = "I"


class PromptToken(NamedTuple):
    """Log probability of a token of a prompt by the model, given the tokens before it."""

    chosen: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top: Sequence[tuple[int, float]]
    """The likeliest tokens, the likeliest first, each with its log probability."""


class PromptLogprobs(NamedTuple):
    """Log probabilities of consecutive tokens of a prompt, fp32. The first token of a prompt has none.

    Arrays, since a prompt may have 100,000 tokens: objects for each would take the engine as long as a step.
    """

    chosen: array[float]
    """`(tokens,)`."""
    ranks: array[int]
    """`(tokens,)`: 1 for the likeliest token."""
    top_tokens: array[int]
    """`(tokens, most)`: the likeliest tokens, the likeliest first."""
    top: array[float]
    """`(tokens, most)`: their log probabilities."""

    @classmethod
    def of_bytes(cls, chosen: bytes, ranks: bytes, top_tokens: bytes, top: bytes) -> PromptLogprobs:
        """The log probabilities of numbers of 4 bytes in the order of this machine."""
        return cls(array(_FLOAT, chosen), array(_INTEGER, ranks), array(_INTEGER, top_tokens), array(_FLOAT, top))

    @classmethod
    def empty(cls) -> PromptLogprobs:
        """Those of no token."""
        return cls.of_bytes(b"", b"", b"", b"")

    @property
    def tokens(self) -> int:
        """Tokens that have log probabilities."""
        return len(self.chosen)

    @property
    def finite(self) -> bool:
        """Whether all are numbers: NaN stands for tokens whose logits were not finite."""
        return not any(map(math.isnan, self.chosen))

    def extend(self, following: PromptLogprobs) -> None:
        """Append those of the next tokens."""
        for mine, others in zip(self, following, strict=True):
            mine.frombytes(others.tobytes())

    def each(self) -> Iterator[PromptToken]:
        """The log probabilities of each token."""
        most = len(self.top) // max(self.tokens, 1)
        for index, (chosen, rank) in enumerate(zip(self.chosen, self.ranks, strict=True)):
            likeliest = slice(index * most, (index + 1) * most)
            yield PromptToken(chosen, rank, list(zip(self.top_tokens[likeliest], self.top[likeliest], strict=True)))

    def packed(self) -> list[str]:
        """As text, for a message in JSON."""
        return [base64.b64encode(values.tobytes()).decode("ascii") for values in self]

    @classmethod
    def unpack(cls, texts: Sequence[str]) -> PromptLogprobs:
        """The log probabilities of `packed`."""
        return cls.of_bytes(*map(base64.b64decode, texts))
