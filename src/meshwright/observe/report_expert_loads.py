"""The report's picture of expert loads: one cell for each layer and expert, relative to the mean of the layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from meshwright.observe import number_text
from meshwright.observe.expert_load_table import expert_load_table
from meshwright.observe.runfolder import Record

LEVELS = ((0.5, "h0"), (0.9, "h1"), (1.1, "h2"), (1.5, "h3"), (2.0, "h4"), (4.0, "h5"), (math.inf, "h6"))
"""(upper limit of an expert's load over its layer's mean, colour class) of each level."""
LABELS = {
    "h0": "under half",
    "h1": "under 0.9",
    "h2": "0.9 to 1.1",
    "h3": "1.1 to 1.5",
    "h4": "1.5 to 2",
    "h5": "2 to 4",
    "h6": "over 4",
}
"""Words for each level in the legend."""
HEIGHT = 320
"""Most pixels of the picture's height, if the cells allow it."""
LEAST_CELL = 4
"""Least pixels of the height of a cell."""
MOST_CELL = 28
"""Most pixels of the height of a cell."""


def expert_loads_card(steps: Sequence[Record]) -> str:
    """Return the card of the newest recorded loads; empty if no step has any."""
    table = expert_load_table(steps)
    if table is None:
        return ""
    ratios = table.ratio
    cell = max(LEAST_CELL, min(MOST_CELL, HEIGHT // len(ratios)))
    height = cell * len(ratios)
    paths = {}
    for layer, values in enumerate(ratios):
        for expert, value in enumerate(values):
            level = next(name for limit, name in LEVELS if value < limit)
            left, right = (round(1000 * edge / len(values), 2) for edge in (expert, expert + 1))
            paths.setdefault(level, []).append(f"M{left:g},{layer * cell}H{right:g}v{cell}H{left:g}Z")
    drawn = "".join(f'<path class="column {level}" d="{"".join(parts)}"/>' for level, parts in sorted(paths.items()))
    keys = "".join(f'<li class="{level} column">{text}</li>' for level, text in LABELS.items() if level in paths)
    busiest, expert = table.busiest
    every = max(1, math.ceil(18 / cell))
    labels = "".join(
        f'<li style="top:{(layer + 0.5) * cell:g}px">{layer + 1}</li>' for layer in range(0, len(ratios), every)
    )
    finding = (
        f"In MoE layer {busiest + 1} expert {expert} has {number_text.short(ratios[busiest][expert])} × the mean load."
    )
    return f"""<section class="card chart ranks-steps" id="expert-loads"><figcaption><h2>Loads of experts</h2>
<span class="unit">relative to the layer's mean</span><ul class="legend">{keys}</ul></figcaption>
<p class="finding">{escape(finding)}</p>
<div class="frame"><ol class="y">{labels}</ol><div class="plot">
<svg viewBox="0 0 1000 {height}" height="{height}" preserveAspectRatio="none" role="img" aria-label="loads of experts">
{drawn}</svg></div><ol class="x"><li style="left:0%">0</li><li style="left:100%">{len(ratios[0]) - 1}</li></ol></div>
<p class="aside">Rows are the layers with experts, columns are experts. Loads are added over {table.steps} recorded steps up to step
 {table.last_step:,}.</p></section>"""
