"""A table of rank × step that fits on a screen.

It shows times relative to the median rank, and joins ranks and steps if there are too many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Range = tuple[int, int]
"""First and last number, both included."""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A heat map with a line for each range of ranks, and a column for each range of steps."""

    ranks: tuple[Range, ...]
    """Ranks of each line."""
    steps: tuple[Range, ...]
    """Steps of each column."""
    ratio: np.ndarray
    """Time of the line's slowest rank relative to the median rank, shape (lines, columns). NaN where no time is known.

    The time of a rank is the mean over the column's steps.
    """


def heat_map(steps: np.ndarray, seconds: np.ndarray, lines: int, columns: int) -> HeatMap:
    """Return a heat map with at most `lines` × `columns` cells.

    `seconds` has shape (ranks, steps); `steps` has the numbers of the steps in ascending order. Columns begin at
    multiples of their width, so that a picture that is updated moves by whole columns.
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
    """Return by how much each rank is slower than the median rank: 0.1 for 10%. It is the median over the steps.

    `seconds` has shape (ranks, steps), with NaN where a time is not known. Ranks without any time are left out.
    """
    ratio = seconds / _medians(seconds)
    ranks = np.flatnonzero(np.isfinite(ratio).any(axis=1))
    return dict(zip(ranks.tolist(), (np.nanmedian(ratio[ranks], axis=1) - 1).tolist(), strict=True))


def _row_size(ranks: int, lines: int) -> int:
    """Return the number of ranks of a line: the smallest 2ⁿ or 3 · 2ⁿ that needs at most `lines` lines.

    With such sizes, lines usually end where hosts end.
    """
    least = -(-ranks // lines)
    return min(size << max(0, (-(-least // size) - 1).bit_length()) for size in (1, 3))


def _medians(means: np.ndarray) -> np.ndarray:
    """Return the median of each column's known values: shape (columns,).

    Of two middle values it is the lower one. NaN if there are none.
    """
    ordered = np.sort(means, axis=0)  # NaN last
    counts = np.isfinite(means).sum(axis=0)
    return ordered[np.maximum(counts - 1, 0) // 2, np.arange(means.shape[1])]
