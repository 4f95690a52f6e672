"""Draws a chart of `expert_ranks.py`'s JSON: step time over the share λ of copied experts, and over the imbalance of loads.

python benchmarks/draw_expert_ranks.py benchmarks/results/FILE.json --out docs/images/expert-copies.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 900, 300, 60, 40, 50, 70
"""Sizes in pixels; `GAP` is between the two panels."""
ALONE, COPIES, EVERYWHERE = "#e45756", "#4c78a8", "#54a24b"
Point = tuple[float, float, str, str]
"""x, seconds, label and colour."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("expert-copies.svg"))
    options = parser.parse_args()
    runs = [run for run in json.loads(options.results.read_text(encoding="utf-8"))["runs"] if "step_seconds" in run]
    options.out.write_text(chart_svg(runs), encoding="utf-8")


def chart_svg(runs: Sequence[dict[str, Any]]) -> str:
    """The two panels; the first has the runs with the most uneven loads."""
    most = max(run["max_over_mean"] for run in runs)
    by_share = sorted((run for run in runs if run["max_over_mean"] == most), key=lambda run: run["share"])
    sizes = {run["slots"] for run in runs if run["max_over_mean"] != most and run["slots"]}
    by_load = [run for run in runs if run["slots"] == 0 or run["slots"] in sizes]
    most_seconds = max(run["step_seconds"] for run in runs)
    scale = 10 ** math.floor(math.log10(most_seconds))
    highest = next(
        scale * factor for factor in (1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 12) if scale * factor >= 1.05 * most_seconds
    )
    width = (WIDTH - LEFT - GAP) / 2 - 20
    ranks, device = runs[0]["ranks"], runs[0].get("device", "cpu").upper()
    panels = [
        panel(
            LEFT,
            width,
            highest,
            (0.0, 1.0),
            f"λ, share of other ranks' experts present (max/mean {most:.2g})",
            [(run["share"], run["step_seconds"], _label(run), _colour(run)) for run in by_share],
        ),
        panel(
            LEFT + width + GAP,
            width,
            highest,
            (1.0, max(2.0, most)),
            "rows of the busiest rank over the mean, without copies",
            [
                (
                    run["max_over_mean"],
                    run["step_seconds"],
                    _label(run) if run["max_over_mean"] == most else "",
                    _colour(run),
                )
                for run in by_load
            ],
        ),
    ]
    title = f"Seconds of a step on {ranks} {device} ranks, 64 experts, recorded loads"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>'
        f"{''.join(panels)}</svg>\n"
    )


def panel(
    left: float, width: float, highest: float, limits: tuple[float, float], label: str, points: Sequence[Point]
) -> str:
    """Axes, points with their labels, and a line through the points of each colour."""
    bottom = HEIGHT - BOTTOM
    height = bottom - TOP

    def pixel_of(x: float, seconds: float) -> tuple[float, float]:
        """Where a point of the data is drawn."""
        share = (x - limits[0]) / (limits[1] - limits[0])
        return left + share * width, bottom - seconds / highest * height

    parts = [f'<path d="M{left},{TOP}V{bottom}H{left + width:.0f}" fill="none" stroke="#888"/>']
    for step in range(5):
        seconds, x = highest * step / 4, limits[0] + (limits[1] - limits[0]) * step / 4
        parts.append(
            f'<text x="{left - 6}" y="{pixel_of(0, seconds)[1] + 4:.0f}" text-anchor="end">{seconds:.2g}</text>'
        )
        parts.append(f'<text x="{pixel_of(x, 0)[0]:.0f}" y="{bottom + 16}" text-anchor="middle">{x:.3g}</text>')
    parts.append(f'<text x="{left + width / 2:.0f}" y="{bottom + 36}" text-anchor="middle">{escape(label)}</text>')
    for colour in dict.fromkeys(point[3] for point in points):
        line = sorted(pixel_of(x, seconds) for x, seconds, _, own in points if own == colour)
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for x, seconds, text, colour in points:
        column, line = pixel_of(x, seconds)
        anchor = "end" if column > left + 0.8 * width else "start" if column < left + 0.2 * width else "middle"
        parts.append(f'<circle cx="{column:.1f}" cy="{line:.1f}" r="4" fill="{colour}"/>')
        parts.append(
            f'<text x="{column:.1f}" y="{line - 8:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
        )
    return "".join(parts)


def _label(run: dict[str, Any]) -> str:
    return "expert parallelism" if not run["slots"] else f"{run['policy']}, {run['slots']} copies"


def _colour(run: dict[str, Any]) -> str:
    return ALONE if not run["slots"] else EVERYWHERE if run["policy"] == "fixed" else COPIES


if __name__ == "__main__":
    main()
