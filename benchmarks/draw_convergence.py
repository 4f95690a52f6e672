"""Draws the losses of convergence.py's JSON: a curve for each side, and below it how far each is from transformers in bf16.

    python benchmarks/draw_convergence.py benchmarks/results/FILE.json --out docs/images/convergence.svg

Above: the loss of every tenth step. Below: means of 50 steps, relative to those of transformers in bf16. The legend has held-out losses.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 900, 62, 260
"""Pixels of the picture, left of its panels, and right of them, where the legend is."""
TOP, UPPER_HEIGHT, GAP, LOWER_HEIGHT, BOTTOM = 44, 270, 44, 150, 40
"""Pixels above the panels, of the upper panel, between them, of the lower panel and below it."""
REFERENCE = "transformers bf16"
STYLES = {
    REFERENCE: ("#222222", ""),
    "transformers fp8": ("#4c78a8", ""),
    "meshwright bf16": ("#e45756", "5 3"),
    "meshwright fp8": ("#54a24b", "5 3"),
}
"""Colour and dashes of each side; ours are dashed, so that curves that lie on each other are both seen."""
TICKS = 5
"""Intervals of an axis, about."""
FROM_STEP = 50
"""First step of the upper panel's range of losses; before it they fall by more than all later differences."""


@dataclass(frozen=True)
class Panel:
    """A panel: its top and height in pixels, and the ranges of its axes."""

    top: float
    height: float
    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps

    def y(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return self.top + self.height * (self.high - inside) / (self.high - self.low)

    def curve(self, values: Mapping[int, float], colour: str, dashes: str) -> str:
        points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in values.items())
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4" stroke-dasharray="{dashes}"/>'

    def axes(self, label: str, form: str) -> str:
        """Frame, ticks of both axes, and the label above."""
        right = WIDTH - RIGHT
        parts = [
            f'<rect x="{LEFT}" y="{self.top}" width="{right - LEFT}" height="{self.height}" fill="none" stroke="#999"/>',
            f'<text x="{LEFT}" y="{self.top - 7}">{escape(label)}</text>',
        ]
        for value in ticks(self.low, self.high):
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:{form}}</text>')
        for step in ticks(0, self.steps):
            x = self.x(step)
            parts.append(f'<text x="{x:.1f}" y="{self.top + self.height + 15}" text-anchor="middle">{step:,.0f}</text>')
        return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("convergence.svg"))
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8"))
    options.out.write_text(chart_svg(results), encoding="utf-8")
    print(f"{options.out}: {len(results['sides'])} sides")


def chart_svg(results: Mapping[str, Any]) -> str:
    sides = {name: side for name, side in results["sides"].items() if "error" not in side}
    losses = {name: by_step(side["losses"]) for name, side in sides.items()}
    reference = by_step(sides[REFERENCE]["means"])
    differences = {
        name: {step: mean / reference[step] - 1 for step, mean in by_step(side["means"]).items() if step in reference}
        for name, side in sides.items()
        if name != REFERENCE
    }
    steps = max(step for curve in losses.values() for step in curve)
    shown = [loss for curve in losses.values() for step, loss in curve.items() if step >= min(FROM_STEP, steps)]
    widest = max((abs(value) for curve in differences.values() for value in curve.values()), default=0.0) or 1e-3
    upper = Panel(TOP, UPPER_HEIGHT, steps, 0.95 * min(shown), max(shown))
    lower = Panel(TOP + UPPER_HEIGHT + GAP, LOWER_HEIGHT, steps, -widest, widest)
    body = [
        upper.axes("training loss of every tenth step, nats a token", ".1f"),
        lower.axes(f"mean loss of 50 steps, relative to {REFERENCE}", "+.2%"),
    ]
    for name, (colour, dashes) in styles_of(sides):
        body.append(upper.curve(losses[name], colour, dashes))
        if name in differences:
            body.append(lower.curve(differences[name], colour, dashes))
    height = TOP + UPPER_HEIGHT + GAP + LOWER_HEIGHT + BOTTOM
    configuration = results["configuration"]
    title = (
        f"{configuration['model']}, {configuration['parameters'] / 1e6:.0f}M parameters, "
        f"{configuration['batch']} × {configuration['seq_len']:,} tokens a step, the same tokens and initial weights"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="8" y="18" font-size="14">{escape(title)}</text>'
    x_label = f'<text x="{LEFT}" y="{height - 8}">step</text>'
    return "\n".join([head, ground, *body, legend(sides), x_label, "</svg>", ""])


def styles_of(sides: Mapping[str, Any]) -> list[tuple[str, tuple[str, str]]]:
    """(name, (colour, dashes)) of the sides that were run."""
    return [(name, style) for name, style in STYLES.items() if name in sides]


def by_step(values: Mapping[str, float]) -> dict[int, float]:
    return {int(step): value for step, value in values.items()}


def ticks(low: float, high: float) -> Sequence[float]:
    """Round numbers between `low` and `high`."""
    width = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(width))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def legend(sides: Mapping[str, Any]) -> str:
    x = WIDTH - RIGHT + 14
    parts = [f'<text x="{x}" y="{TOP + 8}">held-out loss, by transformers in bf16</text>']
    for number, (name, (colour, dashes)) in enumerate(styles_of(sides), 1):
        y = TOP + 8 + 20 * number
        parts.append(
            f'<line x1="{x}" x2="{x + 30}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="1.6" '
            f'stroke-dasharray="{dashes}"/><text x="{x + 38}" y="{y}">{name}: {sides[name]["held_out_loss"]:.4f}</text>'
        )
    return "".join(parts)


if __name__ == "__main__":
    main()
