"""Draws global batches of samples from the length mixes of data/document-lengths.csv."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LENGTHS = Path(__file__).parent / "data" / "document-lengths.csv"
DRAWN = 4096
"""Samples drawn at a time."""


@dataclass(frozen=True)
class LengthMix:
    """Shares of samples by ranges of lengths. Within a range the logarithm of the length is uniform."""

    first: np.ndarray
    last: np.ndarray
    shares: np.ndarray

    def draw(self, tokens: int, longest: int, random: np.random.Generator) -> np.ndarray:
        """Lengths of samples of at least `tokens` tokens together, int64; samples are cut after `longest` tokens."""
        drawn, total = [], 0
        while total < tokens:
            part = random.choice(len(self.shares), DRAWN, p=self.shares)
            low, high = np.log(self.first[part]), np.log(self.last[part] + 1)
            lengths = np.minimum(np.exp(random.uniform(low, high)).astype(np.int64), longest)
            drawn.append(np.clip(lengths, 1, self.last[part]))
            total += int(drawn[-1].sum())
        lengths = np.concatenate(drawn)
        return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def length_mix(name: str) -> LengthMix:
    """The mix `name` of the file: `public` or `long`."""
    with LENGTHS.open(encoding="utf-8") as file:
        lines = [
            line for line in csv.DictReader(line for line in file if not line.startswith("#")) if line["mix"] == name
        ]
    first, last = (np.array([int(line[key]) for line in lines]) for key in ("first", "last"))
    shares = np.array([float(line["share"]) for line in lines])
    return LengthMix(first, last, shares / shares.sum())
