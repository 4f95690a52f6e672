"""A table of rank × step that fits a screen: times relative to the median rank, aggregated where there are too many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Range = tuple[int, int]
"""First and last number, both included."""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """`ratio` is `(lines, columns)`: the time of the line's slowest rank over that of the median rank.

    Times are means over the column's steps; NaN where none is known.
    """

    ranks: tuple[Range, ...]
    steps: tuple[Range, ...]
    ratio: np.ndarray


def heat_map(steps: np.ndarray, seconds: np.ndarray, lines: int, columns: int) -> HeatMap:
    """Aggregate `seconds` `(ranks, steps)` of ascending `steps` to at most `lines` × `columns`.

    Groups of steps begin at multiples of their size, so that the picture moves on by whole columns.
    """
    if not seconds.size or lines < 1 or columns < 1:
        return HeatMap((), (), np.zeros((0, 0)))
    width = -(-int(steps[-1] - steps[0] + 1) // columns)
    firsts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    if len(firsts) > columns:
        steps = steps[firsts[1] :]
        seconds = seconds[:, firsts[1] :]
        firsts = firsts[1:] - firsts[1]
    known = np.isfinite(seconds)
    counts = np.add.reduceat(known, firsts, axis=1, dtype=np.int32)
    sums = np.add.reduceat(np.where(known, seconds, 0), firsts, axis=1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    height = _row_size(len(means), lines)
    bottoms = np.arange(0, len(means), height)
    slowest = np.fmax.reduceat(means, bottoms, axis=0)
    lasts = np.append(firsts[1:], len(steps)) - 1
    return HeatMap(
        tuple((first, min(first + height, len(means)) - 1) for first in bottoms.tolist()),
        tuple(zip(steps[firsts].tolist(), steps[lasts].tolist(), strict=True)),
        slowest / _medians(means),
    )


def excess_of_ranks(seconds: np.ndarray) -> dict[int, float]:
    """By rank, the median over the steps of its time over that of the median rank, less 1; ranks without a time are left out.

    `seconds` is `(ranks, steps)`, NaN where unknown.
    """
    ratio = seconds / _medians(seconds)
    ranks = np.flatnonzero(np.isfinite(ratio).any(axis=1))
    return dict(zip(ranks.tolist(), (np.nanmedian(ratio[ranks], axis=1) - 1).tolist(), strict=True))


def _row_size(ranks: int, lines: int) -> int:
    """The smallest 2ⁿ or 3·2ⁿ ranks of a row that need at most `lines` lines: lines then end where hosts end."""
    least = -(-ranks // lines)
    return min(size << max(0, (-(-least // size) - 1).bit_length()) for size in (1, 3))


def _medians(means: np.ndarray) -> np.ndarray:
    """The median of each column's known values, of two middle values the lower; NaN without any."""
    ordered = np.sort(means, axis=0)  # NaN last
    counts = np.isfinite(means).sum(axis=0)
    return ordered[np.maximum(counts - 1, 0) // 2, np.arange(means.shape[1])]
