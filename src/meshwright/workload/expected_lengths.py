"""Lengths of the samples that a run expects: a histogram, and global batches drawn from it at random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.config.recorded_lengths import LengthRange, read_lengths

DRAWN = 4096
"""Number of samples that are drawn at a time."""


@dataclass(frozen=True)
class LengthHistogram:
    """Shares of samples by range of lengths.

    Each array has shape `(ranges,)`. Inside a range, the logarithm of the length is uniform.
    """

    first: np.ndarray
    """Minimum number of tokens of a sample in each range, int64."""
    last: np.ndarray
    """Maximum number of tokens of a sample in each range, int64."""
    shares: np.ndarray
    """Share of all samples in each range, float64; the sum is 1."""

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int, float]]) -> LengthHistogram:
        """Return the histogram of ranges (first length, last length, number of samples).

        Three samples have at most 128 tokens, and one sample is longer:

        >>> LengthHistogram.of([(1, 128, 3), (129, 512, 1)]).shares
        array([0.75, 0.25])
        """
        first, last, samples = zip(*ranges, strict=True)
        shares = np.array(samples, dtype=np.float64)
        return cls(np.array(first, np.int64), np.array(last, np.int64), shares / shares.sum())

    @property
    def longest(self) -> int:
        """Return the greatest number of tokens of a sample."""
        return int(self.last.max())

    def draw(self, tokens: int, longest: int, random: np.random.Generator) -> np.ndarray:
        """Return lengths of random samples, int64 of shape `(samples,)`, which have at least `tokens` tokens together.

        Samples are cut after `longest` tokens. No sample is drawn after the total has reached `tokens`.
        """
        drawn = []
        total = 0
        while total < tokens:
            part = random.choice(len(self.shares), DRAWN, p=self.shares)
            low = np.log(self.first[part])
            high = np.log(self.last[part] + 1)
            lengths = np.minimum(np.exp(random.uniform(low, high)).astype(np.int64), longest)
            drawn.append(np.clip(lengths, 1, self.last[part]))
            total += int(drawn[-1].sum())
        lengths = np.concatenate(drawn)
        return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def recorded_histogram(path: str) -> LengthHistogram:
    """Return the histogram in the file of `data.lengths`. Raises BadInput if the file cannot be read or is invalid."""
    return LengthHistogram.of(read_lengths(Path(path), "data.lengths"))


def mixed_histogram(sources: Sequence[tuple[float, Sequence[LengthRange]]]) -> LengthHistogram:
    """Return the histogram of a mixture of sources.

    Each source has a weight, which is proportional to the number of samples drawn from it, and ranges of lengths with
    numbers of documents. With weights 3 and 1, three quarters of the samples have lengths of the first source.
    """
    total = sum(weight for weight, _ in sources)
    return LengthHistogram.of(
        (entry.first, entry.last, weight / total * entry.documents / sum(other.documents for other in ranges))
        for weight, ranges in sources
        for entry in ranges
    )
