"""The report's picture of one step with samples of different lengths: each rank's samples over time, coloured by length."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from meshwright.observe import number_text
from meshwright.observe.runfolder import Record
from meshwright.policies.sample_balance import Balance, balance_samples, rank_pool
from meshwright.simulator.sample_steps import slot_times
from meshwright.spec.hybrid import exchanged_heads
from meshwright.spec.plan import Plan

LEVELS = ((512, "h0"), (2048, "h1"), (8192, "h2"), (32_768, "h3"), (131_072, "h4"), (524_288, "h5"), (math.inf, "h6"))
"""(most tokens of a sample, colour class) of each level."""
LABELS = {
    "h0": "up to 512",
    "h1": "to 2K",
    "h2": "to 8K",
    "h3": "to 32K",
    "h4": "to 128K",
    "h5": "to 512K",
    "h6": "longer",
}
"""Words for each level in the legend."""
RANKS_DRAWN = 64
"""Most ranks in the picture. If there are more, evenly spaced ranks are drawn."""
HEIGHT = 384
"""Most pixels of the picture's height."""
LEAST_BAR = 5
"""Least pixels of the height of one rank's bar."""
MOST_BAR = 26
"""Most pixels of the height of one rank's bar."""
WIDTH = 1000
"""Width of the picture in units of its view box."""


def balance_card(plan: Plan | None, steps: Sequence[Record], kv_heads: int | None = None) -> str:
    """Return the card about the newest step with recorded sample lengths; empty if there is none.

    `kv_heads` is the number of KV heads of the model.
    """
    recorded = next((record for record in reversed(steps) if record.get("sample_lengths")), None)
    if plan is None or plan.samples is None or recorded is None:
        return ""
    stages = plan.axis_size("pipeline")
    tensor = plan.axis_size("tensor")
    pool = rank_pool(plan.samples, plan.ranks // tensor // stages, stages, exchanged_heads(kv_heads or 1, tensor))
    lengths = np.array(recorded["sample_lengths"], np.int64)
    balance = balance_samples(lengths, pool)
    end = balance.slowest_seconds
    drawn = np.unique(np.linspace(0, pool.ranks - 1, min(pool.ranks, RANKS_DRAWN)).round().astype(int)).tolist()
    bar = max(LEAST_BAR, min(MOST_BAR, HEIGHT // len(drawn)))
    starts = slot_times(balance)[0]
    paths = defaultdict(list)
    for line, rank in enumerate(drawn):
        for level, start, stop in _blocks(balance, lengths, rank, starts[rank].tolist()):
            left, right = (round(WIDTH * seconds / end, 2) for seconds in (start, stop))
            paths[level].append(f"M{left:g},{line * bar}H{right:g}v{bar - 1}H{left:g}Z")
    shapes = "".join(f'<path class="column {level}" d="{"".join(parts)}"/>' for level, parts in sorted(paths.items()))
    keys = "".join(f'<li class="{level} column">{text}</li>' for level, text in LABELS.items() if level in paths)
    every = max(1, math.ceil(18 / bar))
    labels = "".join(
        f'<li style="top:{(line + 0.5) * bar:g}px">{rank}</li>' for line, rank in list(enumerate(drawn))[::every]
    )
    divided = len(np.unique(balance.sample[balance.parts > 1]))
    finding = (
        f"The slowest of {pool.ranks:,} ranks takes {balance.imbalance:.3f} times the mean work; {len(lengths):,} samples"
        f"{f', {divided:,} on several ranks' if divided else ''}."
    )
    height = bar * len(drawn)
    return f"""<section class="card chart ranks-steps" id="sample-balance"><figcaption><h2>Samples of step {recorded["step"]:,}</h2>
<span class="unit">tokens of a sample</span><ul class="legend">{keys}</ul></figcaption>
<p class="finding">{escape(finding)}</p>
<div class="frame"><ol class="y">{labels}</ol><div class="plot">
<svg viewBox="0 0 {WIDTH} {height}" height="{height}" preserveAspectRatio="none" role="img" aria-label="samples by rank and time">
{shapes}</svg></div><ol class="x"><li style="left:0%">0</li><li style="left:100%">{escape(number_text.duration(end))}</li></ol></div>
<p class="aside">Rows are ranks, the axis is time by the plan's times of samples. Gaps between blocks are the fixed time of slots and waits
 for the other ranks of a sample.</p></section>"""


def _blocks(
    balance: Balance, lengths: np.ndarray, rank: int, starts: Sequence[float]
) -> Iterator[tuple[str, float, float]]:
    """Yield (level, start, end) of a rank's blocks, in seconds.

    In each slot the samples are drawn from the longest to the shortest. Neighbouring samples of the same level are one
    block. `starts` has the start of each of the rank's slots.
    """
    mine = balance.rank == rank
    for slot in range(int(balance.slots[rank])):
        here = np.flatnonzero(mine & (balance.slot == slot))
        at = starts[slot]
        block = ""
        begin = at
        for index in here[np.argsort(-lengths[balance.sample[here]], kind="stable")].tolist():
            level = next(name for most, name in LEVELS if lengths[balance.sample[index]] <= most)
            if block and level != block:
                yield block, begin, at
                begin = at
            block = level
            at = at + float(balance.seconds[index])
        if block:
            yield block, begin, at
