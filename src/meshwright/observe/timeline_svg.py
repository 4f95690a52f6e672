"""Draws timelines of a step as inline SVG. Each pipeline rank has a lane for compute, and below it a lane for transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from meshwright.observe.curves import time_labels, time_ticks
from meshwright.observe.number_text import duration
from meshwright.schedules.action import COMPUTE
from meshwright.simulator.timeline import Timeline

WIDTH = 1000
"""Width of a drawing in units of its view box."""
LANE_HEIGHT = 20
"""Pixels of the height of the lane for compute."""
TRANSFER_HEIGHT = 7
"""Pixels of the height of the lane for transfers."""
GAP = 9
"""Pixels between two ranks."""
PITCH = LANE_HEIGHT + TRANSFER_HEIGHT + GAP
"""Pixels from the top of one rank to the top of the next."""
RANKS_DRAWN = 16
"""Most ranks in a drawing."""
SEAM = 1.0
"""Neighbouring blocks of one colour are joined if the gap between them is below a quarter of this, in units of the width."""
COLOURS = {
    "forward": "k0",
    "forward_only": "k0",
    "backward": "k4",
    "backward_input": "k4",
    "backward_weight": "k1",
    "norm_barrier": "k6",
    "optim": "k6",
    "unshard": "k3",
    "reduce_grad": "k5",
    "send": "k7",
    "recv": "k7",
}
"""The report's colour class of each kind of action."""
NAMES = {
    "k0": "forward",
    "k4": "backward (of inputs, where it is split)",
    "k1": "backward of weights",
    "k6": "norm, optimizer",
    "k3": "gathers",
    "k5": "gradient sums",
    "k7": "messages",
}
"""Texts of the legend by colour class."""


class TimelineBlock(NamedTuple):
    """A period of one pipeline rank, in seconds.

    `computes` selects the lane; `colour` is one of the report's colour classes.
    """

    rank: int
    computes: bool
    colour: str
    start: float
    end: float


def timeline_blocks(timeline: Timeline) -> list[TimelineBlock]:
    """Return a block for each action of a timeline that takes time."""
    return [
        TimelineBlock(
            rank,
            action.op in COMPUTE or action.op in ("norm_barrier", "optim"),
            COLOURS[action.op],
            float(start),
            float(end),
        )
        for rank, _, action, start, end in timeline.records
        if action.op in COLOURS and end > start
    ]


def draw_timeline(timeline: Timeline, title: str, note: str = "") -> str:
    """Return the timeline as an HTML figure in the report's style. Of many ranks, only the first and the last are drawn."""
    end = max(record[4] for record in timeline.records)
    frame = _frame(timeline_blocks(timeline), timeline.schedule.ranks, end, title, "rank")
    used = {COLOURS[record[2].op] for record in timeline.records if record[2].op in COLOURS}
    return f"""<figure class="card chart wide"><figcaption><h3>{escape(title)}</h3><span class="unit">{escape(duration(end))}</span>
{_legend(used, NAMES)}</figcaption>{frame}
<p class="aside">{escape(_omitted(timeline.schedule.ranks) + note)}</p></figure>"""


def draw_panels(
    title: str, panels: Sequence[tuple[str, Sequence[TimelineBlock]]], ranks: int, note: str, names: dict[str, str]
) -> str:
    """Return several timelines as an HTML figure, one below the other, with one time scale and axis.

    `panels` are (label, blocks) of `ranks` stages each. `names` are the texts of the legend by colour.
    """
    end = max(block.end for _, blocks in panels for block in blocks)
    frames = "".join(
        f'<p class="panel">{escape(label)}</p>{_frame(blocks, ranks, end, f"{title}, {label}", "stage")}'
        for label, blocks in panels
    )
    marks = time_ticks(end)
    axis = "".join(
        f'<li style="left:{100 * mark / end:.2f}%">{escape(text)}</li>'
        for mark, text in zip(marks, time_labels(marks), strict=True)
    )
    used = {block.colour for _, blocks in panels for block in blocks}
    return f"""<figure class="card chart panels" id="timeline"><figcaption><h2>{escape(title)}</h2>{_legend(used, names)}</figcaption>
{frames}<div class="frame axis"><ol class="x">{axis}</ol></div>
<p class="aside">{escape(_omitted(ranks) + note)}</p></figure>"""


def _omitted(ranks: int) -> str:
    return f"{ranks - RANKS_DRAWN} ranks between them look alike. " if ranks > RANKS_DRAWN else ""


def _legend(used: set[str], names: dict[str, str]) -> str:
    keys = "".join(f'<li class="{colour} column">{names[colour]}</li>' for colour in names if colour in used)
    return f'<ul class="legend">{keys}</ul>'


def _frame(blocks: Sequence[TimelineBlock], ranks: int, end: float, title: str, unit: str) -> str:
    """Return the drawing of all shown ranks with their labels. Its width is `end` seconds."""
    shown = (
        range(ranks) if ranks <= RANKS_DRAWN else [*range(RANKS_DRAWN // 2), *range(ranks - RANKS_DRAWN // 2, ranks)]
    )
    by_rank: dict[int, list[TimelineBlock]] = defaultdict(list)
    for block in blocks:
        by_rank[block.rank].append(block)
    height = len(shown) * PITCH
    body = "".join(_rank(by_rank[rank], top * PITCH, WIDTH / end) for top, rank in enumerate(shown))
    labels = "".join(
        f'<li style="top:{top * PITCH + LANE_HEIGHT / 2}px">{unit} {rank}</li>' for top, rank in enumerate(shown)
    )
    return f"""<div class="frame"><ol class="y">{labels}</ol><div class="plot">
<svg viewBox="0 0 {WIDTH} {height}" height="{height}" preserveAspectRatio="none" role="img"
 aria-label="{escape(title)}">{body}</svg></div></div>"""


def _rank(blocks: Iterable[TimelineBlock], top: float, scale: float) -> str:
    """Return the blocks of one rank, with one path for each colour and lane. `scale` is units of width per second."""
    spans_by_path: dict[tuple[bool, str], list[tuple[float, float]]] = defaultdict(list)
    for block in blocks:
        spans_by_path[block.computes, block.colour].append((block.start * scale, block.end * scale))
    base = f'<path style="fill:var(--grid);stroke:none" d="M0,{top}H{WIDTH}V{top + LANE_HEIGHT}H0Z"/>'
    paths = []
    for (computes, colour), spans in spans_by_path.items():
        lane_top, height = (top, LANE_HEIGHT) if computes else (top + LANE_HEIGHT + 1, TRANSFER_HEIGHT)
        paths.append(f'<path class="column {colour}" d="{_outlines(spans, lane_top, height)}"/>')
    return base + "".join(paths)


def _outlines(spans: Iterable[tuple[float, float]], top: float, height: float) -> str:
    """Return an SVG path around the spans. Consecutive units of one pass are joined; a small gap separates passes."""
    joined: list[list[float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] < SEAM / 4:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return "".join(
        f"M{start:.1f},{top:g}H{max(end, start + 0.3):.1f}V{top + height:g}H{start:.1f}Z" for start, end in joined
    )
