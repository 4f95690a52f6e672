"""The length mixes of data/document-lengths.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from meshwright.workload.expected_lengths import LengthHistogram

LENGTHS = Path(__file__).parent / "data" / "document-lengths.csv"
GRID = 20_000
"""Quantiles of which the mean length is computed."""


def length_mix(name: str) -> LengthHistogram:
    """The mix `name` of the file: `public` or `long`."""
    with LENGTHS.open(encoding="utf-8") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        return LengthHistogram.of(
            (int(line["first"]), int(line["last"]), float(line["share"])) for line in lines if line["mix"] == name
        )


def evenly_drawn(mix: LengthHistogram, tokens: int, longest: int, random: np.random.Generator) -> np.ndarray:
    """Lengths `(S,)` in random order of about `tokens` tokens, with each range of the mix in its share (systematic sampling)."""
    mean = float(_quantiles(mix, (np.arange(GRID) + 0.5) / GRID, longest).mean())
    count = round(tokens / mean)
    lengths = _quantiles(mix, (np.arange(count) + random.uniform()) / count, longest)
    random.shuffle(lengths)
    return lengths


def _quantiles(mix: LengthHistogram, shares: np.ndarray, longest: int) -> np.ndarray:
    """Lengths that `shares` `(S,)` of the mix's samples do not exceed, cut after `longest`."""
    ends = np.cumsum(mix.shares)
    part = np.minimum(np.searchsorted(ends, shares, side="right"), len(ends) - 1)
    inside = (shares - ends[part]) / mix.shares[part] + 1
    low, high = np.log(mix.first[part]), np.log(mix.last[part] + 1)
    lengths = np.exp(low + inside * (high - low)).astype(np.int64)
    return np.minimum(np.clip(lengths, 1, mix.last[part]), longest)
