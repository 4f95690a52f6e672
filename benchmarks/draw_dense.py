"""Draws a chart of `dense.py`'s JSON lines: microseconds per token and GPU by kernel class, for each row with a roofline.

    python benchmarks/draw_dense.py benchmarks/results/one-gpu.jsonl --out docs/images/one-gpu.svg --title "One H200"

Each row has three bars: the roofline time, our step, and torchtitan's; tokens per second are printed at their ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from dense_table import OURS, PEER, Line, newest, side_of

WIDTH, LEFT_MARGIN, RIGHT_MARGIN, BAR_HEIGHT, BAR_GAP, GROUP_GAP = 1100, 210, 130, 18, 4, 18
"""Sizes in pixels."""
COLOURS = {
    "gemm": "#4c78a8",
    "attention": "#72b7b2",
    "elementwise": "#54a24b",
    "quantise": "#b279a2",
    "loss": "#9d755d",
    "optimizer": "#eeca3b",
    "copies": "#bab0ac",
    "communication": "#e45756",
    "idle": "#dddddd",
}


@dataclass(frozen=True)
class Bar:
    """A bar: its label, microseconds per token by kernel class, and the text at its end."""

    label: str
    parts: dict[str, float]
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dense.svg"))
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.lines.read_text(encoding="utf-8").splitlines()]
    groups = dict(bars_of(lines))
    if not groups:
        sys.exit(f"{options.lines}: no row has a roofline")
    options.out.write_text(chart_svg(groups, options.title), encoding="utf-8")
    print(f"{options.out}: {len(groups)} rows")


def bars_of(lines: Sequence[Line]) -> Iterator[tuple[str, list[Bar]]]:
    """(name, bars) of every row with a roofline, in the order of the lines."""
    for name in dict.fromkeys(line["row"] for line in lines if line["kind"] == "roofline"):
        bars: list[Bar] = []
        for side in (OURS, PEER):
            roofline_line, side_figures = newest(lines, "roofline", name, side), side_of(lines, name, side)
            if roofline_line is None or side_figures is None:
                continue
            tokens = side_figures["rate"] * roofline_line["seconds"]
            if not bars:
                roofline_parts = {line["kind"]: 1e6 * line["needed"] / tokens for line in roofline_line["lines"]}
                bars.append(Bar("needed", roofline_parts, f"{1e6 / sum(roofline_parts.values()):,.0f} tok/s"))
            measured = {line["kind"]: 1e6 * max(0.0, line["took"]) / tokens for line in roofline_line["lines"]}
            bars.append(Bar(side, measured, f"{side_figures['rate']:,.0f} tok/s"))
        yield name, bars


def chart_svg(groups: dict[str, list[Bar]], title: str) -> str:
    longest = max(sum(bar.parts.values()) for bars in groups.values() for bar in bars)
    scale = (WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / longest
    body, top = [], 62
    for name, bars in groups.items():
        body.append(f'<text x="8" y="{top + 13}" font-weight="bold">{escape(name)}</text>')
        for bar in bars:
            body.append(_bar(bar, top, scale))
            top += BAR_HEIGHT + BAR_GAP
        top += GROUP_GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" font-family="sans-serif" font-size="11">'
    title = (
        f'<rect width="{WIDTH}" height="{top}" fill="white"/><text x="8" y="22" font-size="15">{escape(title)}</text>'
    )
    return "\n".join([head, title, _legend(groups), *body, "</svg>", ""])


def _bar(bar: Bar, top: int, scale: float) -> str:
    left, elements = (
        float(LEFT_MARGIN),
        [f'<text x="{LEFT_MARGIN - 8}" y="{top + 13}" text-anchor="end">{escape(bar.label)}</text>'],
    )
    for kernel_class in COLOURS:
        width = bar.parts.get(kernel_class, 0.0) * scale
        if width > 0.05:
            tooltip = f"{kernel_class} {bar.parts[kernel_class]:.2f} µs"
            elements.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{COLOURS[kernel_class]}">'
                f"<title>{tooltip}</title></rect>"
            )
        left += width
    return "".join([*elements, f'<text x="{left + 6:.1f}" y="{top + 13}">{escape(bar.text)}</text>'])


def _legend(groups: dict[str, list[Bar]]) -> str:
    used_classes = [
        kernel_class
        for kernel_class in COLOURS
        if any(bar.parts.get(kernel_class) for bars in groups.values() for bar in bars)
    ]
    elements = (
        f'<rect x="{LEFT_MARGIN + 96 * index}" y="36" width="11" height="11" fill="{COLOURS[kernel_class]}"/>'
        f'<text x="{LEFT_MARGIN + 15 + 96 * index}" y="46">{kernel_class}</text>'
        for index, kernel_class in enumerate(used_classes)
    )
    return "".join(elements) + '<text x="8" y="46">µs a token and GPU</text>'


if __name__ == "__main__":
    main()
