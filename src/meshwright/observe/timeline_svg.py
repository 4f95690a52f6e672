"""A step's timeline as inline SVG: for each pipeline rank its compute and, below it, its transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from meshwright.observe.number_text import duration
from meshwright.schedules.action import COMPUTE
from meshwright.simulator.timeline import Record, Timeline

WIDTH, LANE_HEIGHT, TRANSFER_HEIGHT, GAP = 1000, 20, 7, 9
"""Width of a drawing in its own units; heights of compute and transfers, and the gap between ranks, in pixels."""
RANKS_DRAWN = 16
"""Most ranks in a drawing."""
SEAM = 1.0
"""Gap, in units of the width, below which neighbouring blocks of one colour are joined."""
COLOURS = {
    "forward": "k0", "forward_only": "k0", "backward": "k4", "backward_input": "k4", "backward_weight": "k1", "overlap": "k2",
    "norm_barrier": "k6", "optim": "k6", "unshard": "k3", "reduce_grad": "k5", "send": "k7", "recv": "k7",
}  # fmt: skip
"""The report's colour class of each operation."""
NAMES = {
    "k0": "forward", "k4": "backward (of inputs, where it is split)", "k1": "backward of weights", "k2": "forward beside backward",
    "k6": "norm, optimizer", "k3": "gathers", "k5": "gradient sums", "k7": "messages",
}  # fmt: skip


def draw_timeline(timeline: Timeline, title: str, note: str = "") -> str:
    """The timeline as an HTML figure in the report's style; of many ranks the first and the last."""
    ranks = timeline.schedule.ranks
    shown = (
        range(ranks) if ranks <= RANKS_DRAWN else [*range(RANKS_DRAWN // 2), *range(ranks - RANKS_DRAWN // 2, ranks)]
    )
    end = max(record[4] for record in timeline.records)
    tops = {rank: top for top, rank in enumerate(shown)}
    height = len(tops) * (LANE_HEIGHT + TRANSFER_HEIGHT + GAP)
    body = "".join(
        _rank(timeline.records, rank, top * (LANE_HEIGHT + TRANSFER_HEIGHT + GAP), WIDTH / end)
        for rank, top in tops.items()
    )
    labels = "".join(
        f'<li style="top:{top * (LANE_HEIGHT + TRANSFER_HEIGHT + GAP) + LANE_HEIGHT / 2}px">rank {rank}</li>'
        for rank, top in tops.items()
    )
    used_colours = dict.fromkeys(COLOURS[record[2].op] for record in timeline.records if record[2].op in COLOURS)
    keys = "".join(f'<li class="{colour} column">{NAMES[colour]}</li>' for colour in NAMES if colour in used_colours)
    omitted = f"{ranks - len(tops)} ranks between them look alike. " if ranks > len(tops) else ""
    return f"""<figure class="card chart wide"><figcaption><h3>{escape(title)}</h3><span class="unit">{escape(duration(end))}</span>
<ul class="legend">{keys}</ul></figcaption><div class="frame"><ol class="y">{labels}</ol><div class="plot">
<svg viewBox="0 0 {WIDTH} {height}" height="{height}" preserveAspectRatio="none" role="img"
 aria-label="{escape(title)}">{body}</svg></div></div>
<p class="aside">{escape(omitted + note)}</p></figure>"""


def _rank(records: Sequence[Record], rank: int, top: float, scale: float) -> str:
    """Blocks of one rank: a path for each colour, compute in the high lane, transfers in the low one below."""
    spans_by_path: dict[tuple[bool, str], list[tuple[float, float]]] = defaultdict(list)
    for record_rank, _, action, start, end in records:
        if record_rank == rank and action.op in COLOURS and end > start:
            computes = action.op in COMPUTE or action.op in ("norm_barrier", "optim")
            spans_by_path[computes, COLOURS[action.op]].append((start * scale, end * scale))
    base = f'<path style="fill:var(--grid);stroke:none" d="M0,{top}H{WIDTH}V{top + LANE_HEIGHT}H0Z"/>'
    paths = []
    for (computes, colour), spans in spans_by_path.items():
        lane_top, height = (top, LANE_HEIGHT) if computes else (top + LANE_HEIGHT + 1, TRANSFER_HEIGHT)
        paths.append(f'<path class="column {colour}" d="{_blocks(spans, lane_top, height)}"/>')
    return base + "".join(paths)


def _blocks(spans: Iterable[tuple[float, float]], top: float, height: float) -> str:
    """Outlines of the spans; consecutive units of one pass are one block, with a small gap to the next pass."""
    joined: list[list[float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] < SEAM / 4:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return "".join(
        f"M{start:.1f},{top:g}H{max(end, start + 0.3):.1f}V{top + height:g}H{start:.1f}Z" for start, end in joined
    )
