"""The report's heat map of ranks and steps: compute time relative to the median rank, and a sentence about the slowest rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.observe import number_text

MOST_ROWS = 200
"""Most rows of the picture, for ranks."""
MOST_COLUMNS = 400
"""Most columns of the picture, for steps."""
LEVELS = ((0.9, "h0"), (0.97, "h1"), (1.03, "h2"), (1.1, "h3"), (1.25, "h4"), (1.5, "h5"), (math.inf, "h6"))
"""(upper limit of the ratio to the median rank, colour class) of each level."""
LABELS = {
    "h0": "over 10% shorter",
    "h1": "3% to 10% shorter",
    "h2": "within 3%",
    "h3": "3% to 10% longer",
    "h4": "10% to 25% longer",
    "h5": "25% to 50% longer",
    "h6": "over 50% longer",
}
"""Words for each level in the legend."""
NOTABLE = 0.02
"""A rank is called slow if its median ratio exceeds 1 by at least this."""
HEIGHT = 320
"""Most pixels of the picture's height."""
LEAST_CELL = 4
"""Least pixels of the height of a row."""

Range = tuple[int, int]
"""(first, last) of a range of ranks or steps."""


@dataclass(frozen=True)
class HeatMapFigures:
    """The cells of the picture, computed by `diagnosis.heat_map`.

    `ratio` has one row for each range of `ranks` and one value for each range of `steps`; None if no time is known.
    `excess` says for each rank by how much its time exceeds the median rank's, as the median over steps: 0.1 means 10%
    longer.
    """

    ranks: Sequence[Range]
    steps: Sequence[Range]
    ratio: Sequence[Sequence[float | None]]
    excess: Mapping[int, float]


def heat_map_card(figures: HeatMapFigures | None) -> str:
    """Return the card; empty without figures of at least two ranks."""
    if figures is None or not figures.steps or len(figures.excess) < 2:
        return ""
    rows = len(figures.ranks)
    columns = len(figures.steps)
    cell = max(LEAST_CELL, min(28, HEIGHT // rows))
    height = cell * rows
    paths: dict[str, list[str]] = {}
    for row, ratios in enumerate(figures.ratio):
        for level, first, end in _runs(ratios):
            left, right = (round(1000 * column / columns, 2) for column in (first, end))
            paths.setdefault(level, []).append(f"M{left:g},{row * cell}H{right:g}v{cell}H{left:g}Z")
    drawn = "".join(f'<path class="column {level}" d="{"".join(parts)}"/>' for level, parts in sorted(paths.items()))
    keys = "".join(f'<li class="{level} column">{text}</li>' for level, text in LABELS.items() if level in paths)
    return f"""<section class="card chart ranks-steps" id="heat-map"><figcaption><h2>Compute time of ranks</h2>
<span class="unit">relative to the median rank</span><ul class="legend">{keys}</ul></figcaption>
<p class="finding">{heat_map_sentence(figures.excess)}</p>
<div class="frame"><ol class="y">{_rank_labels(figures.ranks, cell)}</ol><div class="plot">
<svg viewBox="0 0 1000 {height}" height="{height}" preserveAspectRatio="none" role="img" aria-label="compute time of ranks">
<path class="column h-none" d="M0,0H1000V{height}H0Z"/>{drawn}</svg></div><ol class="x">{_step_labels(figures.steps)}</ol></div>
<p class="aside">Rows are ranks, columns are steps {figures.steps[0][0]:,} to {figures.steps[-1][1]:,}. A cell of several ranks shows
 the slowest. A blank cell was not recorded.</p></section>"""


def heat_map_sentence(excess: Mapping[int, float]) -> str:
    """Return a sentence about the rank that computes longest, and by how much."""
    rank = max(excess, key=lambda rank: excess[rank])
    if excess[rank] < NOTABLE:
        return f"No rank computes {number_text.percent(NOTABLE)} longer than the median rank in most steps."
    return f"Rank {rank} computes {number_text.percent(excess[rank])} longer than the median rank in the median step."


def _runs(ratios: Sequence[float | None]) -> list[tuple[str, int, int]]:
    """Return (level, first column, column after the last) of neighbouring cells of one level.

    Cells without a value are skipped.
    """
    runs: list[tuple[str, int, int]] = []
    for column, ratio in enumerate(ratios):
        if ratio is None:
            continue
        level = next(name for limit, name in LEVELS if ratio < limit)
        if runs and runs[-1][0] == level and runs[-1][2] == column:
            runs[-1] = (level, runs[-1][1], column + 1)
        else:
            runs.append((level, column, column + 1))
    return runs


def _rank_labels(ranks: Sequence[Range], cell: int) -> str:
    every = max(1, math.ceil(18 / cell))
    return "".join(
        f'<li style="top:{(row + 0.5) * cell:g}px">{f"rank {first}" if first == last else f"{first}–{last}"}</li>'
        for row, (first, last) in enumerate(ranks)
        if row % every == 0
    )


def _step_labels(steps: Sequence[Range]) -> str:
    every = max(1, math.ceil(len(steps) / 8))
    return "".join(
        f'<li style="left:{100 * (column + 0.5) / len(steps):.2f}%">{first:,}</li>'
        for column, (first, _) in enumerate(steps)
        if column % every == 0
    )
