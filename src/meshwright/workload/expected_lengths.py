"""Lengths of samples that a run expects: a histogram, and global batches drawn from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.config.recorded_lengths import LengthRange, read_lengths

DRAWN = 4096
"""Samples drawn at a time."""


@dataclass(frozen=True)
class LengthHistogram:
    """Shares of samples by ranges of lengths, `(ranges,)` each. Within a range the logarithm of the length is uniform."""

    first: np.ndarray
    """Least tokens of a sample in each range."""
    last: np.ndarray
    """Most tokens."""
    shares: np.ndarray
    """Shares of all samples, 1 together."""

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int, float]]) -> LengthHistogram:
        """The histogram of (first, last, samples) ranges.

        Three samples of at most 128 tokens and one longer one:

        >>> LengthHistogram.of([(1, 128, 3), (129, 512, 1)]).shares
        array([0.75, 0.25])
        """
        first, last, samples = zip(*ranges, strict=True)
        shares = np.array(samples, dtype=np.float64)
        return cls(np.array(first, np.int64), np.array(last, np.int64), shares / shares.sum())

    @property
    def longest(self) -> int:
        """Most tokens of a sample."""
        return int(self.last.max())

    def draw(self, tokens: int, longest: int, random: np.random.Generator) -> np.ndarray:
        """Lengths of samples of at least `tokens` tokens together, int64; samples are cut after `longest` tokens."""
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
    """The histogram in the file of `data.lengths`; raises BadInput."""
    return LengthHistogram.of(read_lengths(Path(path), "data.lengths"))


def mixed_histogram(sources: Sequence[tuple[float, Sequence[LengthRange]]]) -> LengthHistogram:
    """The histogram of a mixture: (weight in samples drawn, ranges) of each source."""
    total = sum(weight for weight, _ in sources)
    return LengthHistogram.of(
        (entry.first, entry.last, weight / total * entry.documents / sum(other.documents for other in ranges))
        for weight, ranges in sources
        for entry in ranges
    )
