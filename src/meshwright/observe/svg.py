"""Line, point and stacked charts as inline SVG, each with the numbers a reader's pointer asks for.

The drawing is stretched to the width it is given: x runs from 0 to 1000 whatever the page, y is in CSS pixels, and
strokes keep their width. Axis labels are HTML at percent positions, so text never scales. The page's script
(template/report.js) moves the same points when another x axis is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal

from meshwright.observe import figures
from meshwright.observe.curves import Values, tick_labels, ticks, value_range

WIDTH = 1000
Format = Literal["loss", "short", "percent", "seconds", "scientific"]
_FORMATS = {
    "loss": "{:.4f}".format,
    "short": figures.short,
    "percent": figures.percent,
    "seconds": figures.duration,
    "scientific": figures.scientific,
}


@dataclass(frozen=True)
class Axis:
    """A choice of x: what it is called, where it ends, and its ticks."""

    key: str
    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """Where `value` stands, 0 to 1; outside of the axis it stands at its end."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


Table = dict[str, list[float]]
"""x values of some points, by axis key. A stacked chart's table holds the edges of its columns: one more than its
points."""


@dataclass(frozen=True)
class Series:
    """One curve: `values` beside the x values of `table`. `colour` is a CSS class; `shown` is its text while nothing
    is pointed at.
    """

    label: str
    colour: str
    table: str
    values: Values
    kind: Literal["line", "points", "marks", "column"] = "line"
    shown: str | None = None


@dataclass(frozen=True)
class Chart:
    """A titled plot with one y axis. Columns are stacked in series order; `reference` is a labelled level."""

    key: str
    title: str
    unit: str
    format: Format
    series: tuple[Series, ...]
    from_zero: bool = True
    height: int = 200
    reference: tuple[str, float] | None = None

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Where the y axis begins and ends."""
        levels = [self.reference[1]] if self.reference else []
        return value_range([*self._reach(), *levels], from_zero=self.from_zero)

    def y(self, value: float) -> float:
        """Pixels from the top; beyond the axis it stands at the edge."""
        low, high = self.limits
        return round(self.height * min(1.0, max(0.0, (high - value) / (high - low))), 1)

    def above(self) -> list[float]:
        """Values that lie above the axis."""
        return [value for value in self._reach() if value is not None and value > self.limits[1]]

    def _reach(self) -> list[float | None]:
        columns = [one.values for one in self.series if one.kind == "column"]
        stacked = [sum(value or 0.0 for value in row) for row in zip(*columns, strict=True)]
        lines = [value for one in self.series if one.kind in ("line", "points") for value in one.values]
        return [*stacked, *lines]


def draw(chart: Chart, tables: dict[str, Table], axis: Axis) -> str:
    """The chart as an HTML figure."""
    levels = ticks(*chart.limits, chart.height // 45)
    grid = "".join(f"M0,{chart.y(level)}H{WIDTH}" for level in levels)
    labels = "".join(
        f'<li style="top:{chart.y(level)}px">{text}</li>'
        for level, text in zip(levels, _level_labels(chart, levels), strict=True)
    )
    marks = "".join(f'<li style="left:{100 * axis.place(at):.2f}%">{escape(text)}</li>' for at, text in axis.ticks)
    return f"""<figure class="card chart" data-chart="{chart.key}">
<figcaption><h3>{escape(chart.title)}</h3><span class="unit">{escape(_unit(chart))}</span>{_legend(chart)}</figcaption>
<div class="frame"><ol class="y" aria-hidden="true">{labels}</ol><div class="plot">
<svg viewBox="0 0 {WIDTH} {chart.height}" height="{chart.height}" preserveAspectRatio="none" role="img"
 aria-label="{escape(chart.title)}">
<path class="grid" d="{grid}"/>{_reference_line(chart)}{_curves(chart, tables, axis)}<path class="cursor" d=""/></svg>
{_reference_label(chart)}</div><ol class="x" aria-hidden="true">{marks}</ol></div>
</figure>"""


def numbers(chart: Chart) -> dict[str, Any]:
    """What the page's script needs to move the points and to read them out."""
    low, high = chart.limits
    return {
        "low": low,
        "high": high,
        "height": chart.height,
        "format": chart.format,
        "series": [{"table": s.table, "kind": s.kind, "values": [_rounded(v) for v in s.values]} for s in chart.series],
    }


def _unit(chart: Chart) -> str:
    """The unit, and a word about points that the axis leaves out."""
    above = chart.above()
    hidden = f"{len(above):,} above the axis, up to {_FORMATS[chart.format](max(above))}" if above else ""
    return " · ".join(part for part in (chart.unit, hidden) if part)


def _curves(chart: Chart, tables: dict[str, Table], axis: Axis) -> str:
    paths = []
    base: list[float] = []
    for index, one in enumerate(chart.series):
        places = [round(WIDTH * axis.place(x), 1) for x in tables[one.table][axis.key]]
        if one.kind == "column":
            base = base or [0.0] * len(one.values)
            tops = [low + (value or 0.0) for low, value in zip(base, one.values, strict=True)]
            path, base = _columns(places, [chart.y(v) for v in base], [chart.y(v) for v in tops]), tops
        else:
            path = _line(places, [None if v is None else chart.y(v) for v in one.values], joined=one.kind == "line")
        paths.append(f'<path class="{one.kind} {one.colour}" data-series="{index}" d="{path}"/>')
    return "".join(paths)


def _line(xs: Sequence[float], ys: Values, *, joined: bool) -> str:
    """A polyline with gaps where y is None; a point alone is a dot (a line of no length with round ends)."""
    parts: list[str] = []
    pen_down = False
    for x, y in zip(xs, ys, strict=True):
        if y is not None:
            parts.append(f"L{x:g},{y:g}" if pen_down else f"M{x:g},{y:g}h0")
        pen_down = joined and y is not None
    return "".join(parts)


def _columns(edges: Sequence[float], bases: Sequence[float], tops: Sequence[float]) -> str:
    """A closed outline of adjoining columns: along their tops, and back along their bases."""
    if not tops:
        return ""
    there = "".join(f"V{top:g}H{edge:g}" for top, edge in zip(tops, edges[1:], strict=True))
    back = "".join(f"V{base:g}H{edge:g}" for base, edge in zip(reversed(bases), reversed(edges[:-1]), strict=True))
    return f"M{edges[0]:g},{bases[0]:g}{there}{back}Z"


def _legend(chart: Chart) -> str:
    rows = []
    for index, one in enumerate(chart.series):
        last = (
            None if one.kind == "marks" else next((value for value in reversed(one.values) if value is not None), None)
        )
        text = one.shown if one.shown is not None else "" if last is None else _FORMATS[chart.format](last)
        value = "" if one.kind == "marks" else f' <b data-value="{index}">{escape(text)}</b>'
        rows.append(f'<li class="{one.colour} {one.kind}">{escape(one.label)}{value}</li>')
    return f'<ul class="legend">{"".join(rows)}</ul>'


def _level_labels(chart: Chart, levels: Sequence[float]) -> list[str]:
    if chart.format == "percent":
        return [f"{text}%" for text in tick_labels([100 * level for level in levels])]
    if chart.format == "seconds":
        scale, unit = (1000, "ms") if chart.limits[1] < 1 else (1, "s")
        return [
            f"{text} {unit}" if level else "0"
            for level, text in zip(levels, tick_labels([scale * v for v in levels]), strict=True)
        ]
    return tick_labels(levels)


def _reference_line(chart: Chart) -> str:
    return f'<path class="reference" d="M0,{chart.y(chart.reference[1])}H{WIDTH}"/>' if chart.reference else ""


def _reference_label(chart: Chart) -> str:
    if not chart.reference:
        return ""
    label, level = chart.reference
    return f'<span class="reference" style="top:{chart.y(level)}px">{escape(label)} {level:.2f}</span>'


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
