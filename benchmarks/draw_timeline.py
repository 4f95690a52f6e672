"""Draws a trace of `meshwright train --timeline A:B` or `meshwright simulate` as an SVG with one line of blocks per lane.

    python benchmarks/draw_timeline.py runs/NAME/timelines/steps-6-6.json.gz --out timeline.svg --ranks 0,2 --title "…"

Units of one stage and micro-batch are drawn as one block. Without --ranks all measured ranks are drawn.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, LEFT_MARGIN, LANE_HEIGHT, GAP = 1200, 190, 22, 12
"""Sizes in pixels."""
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "backward_input": "#f58518",
    "backward_weight": "#54a24b",
    "unshard": "#b279a2",
    "reduce_grad": "#9d755d",
    "send": "#e45756",
    "recv": "#72b7b2",
    "norm_barrier": "#bab0ac",
    "optim": "#bab0ac",
}


class Block(NamedTuple):
    """A block in a lane: the action, its start and end in microseconds."""

    action_type: str
    label: str
    start: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, default=Path("timeline.svg"))
    parser.add_argument("--ranks", default="", help="ranks to draw, by comma")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    ranks = {int(rank) for rank in options.ranks.split(",") if rank}
    with gzip.open(options.trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    lanes = {name: blocks for name, blocks in lanes_of(events) if not ranks or rank_of(name) in ranks}
    options.out.write_text(timeline_svg(lanes, options.title), encoding="utf-8")
    print(f"{options.out}: {len(lanes)} lanes")


def rank_of(lane: str) -> int | None:
    match = re.match(r"measured: rank (\d+)", lane)
    return int(match[1]) if match else None


def lanes_of(events: list[dict[str, Any]]) -> Iterator[tuple[str, list[Block]]]:
    """(process and thread name, blocks) of every lane, in the order the trace sorts them."""
    names: dict[Any, str] = {}
    order: dict[Any, int] = {}
    spans = defaultdict(list)
    for event in events:
        key = (event["pid"], event["tid"])
        match event["ph"], event["name"]:
            case "M", "process_name":
                names[event["pid"]] = event["args"]["name"]
            case "M", "thread_name":
                names[key] = event["args"]["name"]
            case "M", "thread_sort_index":
                order[key] = event["args"]["sort_index"]
            case "X", name:
                spans[key].append((event["ts"], event["ts"] + event["dur"], name))
    for key in sorted(spans, key=lambda key: (key[0], order.get(key, 0))):
        if names[key] != "step":  # marks only
            yield f"{names[key[0]]} · {names[key]}", join_spans(sorted(spans[key]))


def join_spans(spans: list[tuple[float, float, str]]) -> list[Block]:
    """Blocks of consecutive spans with the same action type, stage and micro-batch."""
    blocks: list[Block] = []
    for start, end, name in spans:
        action_type, _, target = name.partition(" ")
        label = target.partition("/")[0]
        if blocks and (blocks[-1].action_type, blocks[-1].label) == (action_type, label):
            blocks[-1] = blocks[-1]._replace(end=end)
        else:
            blocks.append(Block(action_type, label, start, end))
    return blocks


def timeline_svg(lanes: dict[str, list[Block]], title: str) -> str:
    first = min(block.start for blocks in lanes.values() for block in blocks)
    last = max(block.end for blocks in lanes.values() for block in blocks)
    scale = (WIDTH - LEFT_MARGIN - 10) / (last - first)
    height = 46 + len(lanes) * (LANE_HEIGHT + GAP) + 26
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="8" y="22" font-size="15">{escape(title)}</text>',
    ]
    for number, (lane, blocks) in enumerate(lanes.items()):
        top = 40 + number * (LANE_HEIGHT + GAP)
        process, _, name = lane.partition(" · ")
        process = process.removeprefix("measured: ").partition(" (")[0]
        body.append(f'<text x="8" y="{top + 15}">{escape(process)} · {escape(name)}</text>')
        for block in blocks:
            left, width = LEFT_MARGIN + (block.start - first) * scale, max(0.6, (block.end - block.start) * scale)
            colour = COLOURS.get(block.action_type, "#888")
            body.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{LANE_HEIGHT}" fill="{colour}" '
                'stroke="white" stroke-width="0.4"/>'
            )
            if width > 26 and "." in block.label:
                text = block.label.partition(".")[2]
                body.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 15}" fill="white" text-anchor="middle">{escape(text)}</text>'
                )
    body.append(legend(height - 16, (last - first) / 1e6))
    return "\n".join([*body, "</svg>", ""])


def legend(baseline: float, seconds: float) -> str:
    elements, left = [], LEFT_MARGIN
    for action_type in ("forward", "backward_input", "backward_weight", "unshard", "reduce_grad", "send", "recv"):
        elements.append(
            f'<rect x="{left}" y="{baseline - 10}" width="12" height="12" fill="{COLOURS[action_type]}"/>'
            f'<text x="{left + 16}" y="{baseline}">{action_type}</text>'
        )
        left += 122
    return "".join(elements) + f'<text x="{WIDTH - 10}" y="{baseline}" text-anchor="end">{seconds:.2f} s</text>'


if __name__ == "__main__":
    main()
