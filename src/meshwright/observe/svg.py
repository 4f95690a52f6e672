"""Draws line, point and stacked charts as inline SVG, and lists their numbers for the page's script.

A drawing is stretched to the width of the page: x runs from 0 to 1000, y is in CSS pixels, and lines keep their width.
Axis labels are HTML at positions in percent, so text is never stretched. When the reader selects another x axis, the
page's script (template/report.js) moves the points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal

from meshwright.observe import number_text
from meshwright.observe.curves import Values, tick_labels, ticks, value_range

WIDTH = 1000
"""Width of a drawing in units of its view box."""
Format = Literal["loss", "short", "percent", "seconds", "scientific"]
"""How the numbers of a chart are written."""
_FORMATS = {
    "loss": "{:.4f}".format,
    "short": number_text.short,
    "percent": number_text.percent,
    "seconds": number_text.duration,
    "scientific": number_text.scientific,
}


@dataclass(frozen=True)
class Axis:
    """An x axis. `key` selects the x values in a `Table`; `ticks` are (value, label)."""

    key: str
    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def position(self, value: float) -> float:
        """Return the relative position of `value`, from 0 to 1. A value outside of the limits is put at the nearer limit."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


Table = dict[str, list[float]]
"""x values of points, by the key of the axis.

The table of a stacked chart has the edges of the columns, so it has one value more than there are columns.
"""


@dataclass(frozen=True)
class Series:
    """A curve: `values` at the x values of the table named `table`.

    `colour` is a CSS class. `shown` is the value in the legend while no point is selected; by default it is the last
    value.

    Points of the shape `marks` are dots at the x positions of events. Their y values mean nothing, so the legend and
    the limits of the y axis ignore them.

    Two series with equal values stay visible, also without the script, if the earlier one has `rings` (hollow points)
    under points, or if the later one has `dashes` over a line.
    """

    label: str
    colour: str
    table: str
    values: Values
    shape: Literal["line", "dashes", "points", "rings", "marks", "column"] = "line"
    shown: str | None = None


@dataclass(frozen=True)
class Chart:
    """A plot with a title and one y axis.

    Columns are stacked in the order of the series. `reference` is (label, level) of a horizontal line. `from_zero`: the
    y axis includes 0. `height` is in pixels.
    """

    key: str
    title: str
    unit: str
    format: Format
    series: tuple[Series, ...]
    from_zero: bool = True
    height: int = 200
    reference: tuple[str, float] | None = None
    outliers: bool = False
    """Whether the y axis also covers values that are far above the others."""

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Limits (low, high) of the y axis."""
        levels = [self.reference[1]] if self.reference else []
        return value_range([*self._drawn_values(), *levels], from_zero=self.from_zero, outliers=self.outliers)

    def y(self, value: float) -> float:
        """Return the pixels from the top for a value. A value outside of the limits is put at the edge."""
        low, high = self.limits
        return round(self.height * min(1.0, max(0.0, (high - value) / (high - low))), 1)

    def values_above(self) -> list[float]:
        """Return the values above the upper limit of the y axis, which are drawn at the edge."""
        return [value for value in self._drawn_values() if value is not None and value > self.limits[1]]

    def _drawn_values(self) -> list[float | None]:
        columns = [series.values for series in self.series if series.shape == "column"]
        stacked = [sum(value or 0.0 for value in values) for values in zip(*columns, strict=True)]
        lines = [value for series in self.series if series.shape not in ("column", "marks") for value in series.values]
        return [*stacked, *lines]


def draw(chart: Chart, tables: dict[str, Table], axis: Axis) -> str:
    """Return the chart as an HTML figure, drawn over `axis`. `tables` has the x values of its series."""
    levels = ticks(*chart.limits, chart.height // 45)
    grid = "".join(f"M0,{chart.y(level)}H{WIDTH}" for level in levels)
    labels = "".join(
        f'<li style="top:{chart.y(level)}px">{text}</li>'
        for level, text in zip(levels, _level_labels(chart, levels), strict=True)
    )
    tick_items = "".join(
        f'<li style="left:{100 * axis.position(value):.2f}%">{escape(text)}</li>' for value, text in axis.ticks
    )
    return f"""<figure class="card chart" data-chart="{chart.key}">
<figcaption><h3>{escape(chart.title)}</h3><span class="unit">{escape(_unit(chart))}</span>{_legend(chart)}</figcaption>
<div class="frame"><ol class="y" aria-hidden="true">{labels}</ol><div class="plot">
<svg viewBox="0 0 {WIDTH} {chart.height}" height="{chart.height}" preserveAspectRatio="none" role="img"
 aria-label="{escape(chart.title)}">
<path class="grid" d="{grid}"/>{_reference_line(chart)}{_curves(chart, tables, axis)}<path class="cursor" d=""/></svg>
{_reference_label(chart)}</div><ol class="x" aria-hidden="true">{tick_items}</ol></div>
</figure>"""


def numbers(chart: Chart) -> dict[str, Any]:
    """Return the numbers that the page's script needs to move points and to show their values."""
    low, high = chart.limits
    return {
        "low": low,
        "high": high,
        "height": chart.height,
        "format": chart.format,
        "series": [
            {"table": series.table, "kind": series.shape, "values": [_rounded(value) for value in series.values]}
            for series in chart.series
        ],
    }


def _unit(chart: Chart) -> str:
    """Return the unit, with a note if values are above the upper limit of the y axis."""
    above = chart.values_above()
    largest = _FORMATS[chart.format](max(above)) if above else ""
    hidden = f"{len(above):,} value{'s' * (len(above) > 1)} above the chart, up to {largest}" if above else ""
    return " · ".join(text for text in (chart.unit, hidden) if text)


def _curves(chart: Chart, tables: dict[str, Table], axis: Axis) -> str:
    """Return the SVG paths of all series. Columns are stacked on the columns of the series before."""
    paths = []
    base: list[float] = []
    for index, series in enumerate(chart.series):
        positions = [round(WIDTH * axis.position(value), 1) for value in tables[series.table][axis.key]]
        if series.shape == "column":
            base = base or [0.0] * len(series.values)
            tops = [low + (value or 0.0) for low, value in zip(base, series.values, strict=True)]
            path = _columns(positions, [chart.y(value) for value in base], [chart.y(value) for value in tops])
            base = tops
        else:
            path = _line(
                positions,
                [None if value is None else chart.y(value) for value in series.values],
                joined=series.shape in ("line", "dashes"),
            )
        paths.append(f'<path class="{series.shape} {series.colour}" data-series="{index}" d="{path}"/>')
        if series.shape == "rings":
            paths.append(f'<path class="holes" d="{path}"/>')
    return "".join(paths)


def _line(xs: Sequence[float], ys: Values, *, joined: bool) -> str:
    """Return an SVG path through the points, with gaps where y is None.

    Each separate point is drawn as a line of length 0 with round ends, which is a dot.
    """
    commands: list[str] = []
    pen_down = False
    for x, y in zip(xs, ys, strict=True):
        if y is not None:
            commands.append(f"L{x:g},{y:g}" if pen_down else f"M{x:g},{y:g}h0")
        pen_down = joined and y is not None
    return "".join(commands)


def _columns(edges: Sequence[float], bases: Sequence[float], tops: Sequence[float]) -> str:
    """Return an SVG path around adjoining columns: along their tops, and back along their bases."""
    if not tops:
        return ""
    along_tops = "".join(f"V{top:g}H{edge:g}" for top, edge in zip(tops, edges[1:], strict=True))
    along_bases = "".join(
        f"V{base:g}H{edge:g}" for base, edge in zip(reversed(bases), reversed(edges[:-1]), strict=True)
    )
    return f"M{edges[0]:g},{bases[0]:g}{along_tops}{along_bases}Z"


def _legend(chart: Chart) -> str:
    """Return the legend: each series with its last value, or with its own text."""
    items = []
    for index, series in enumerate(chart.series):
        newest = (
            None
            if series.shape == "marks"
            else next((value for value in reversed(series.values) if value is not None), None)
        )
        text = "" if newest is None else _FORMATS[chart.format](newest)
        text = text if series.shown is None else series.shown
        value = "" if series.shape == "marks" else f' <b data-value="{index}">{escape(text)}</b>'
        items.append(f'<li class="{series.colour} {series.shape}">{escape(series.label)}{value}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _level_labels(chart: Chart, levels: Sequence[float]) -> list[str]:
    """Return the labels of the y axis's levels, in the chart's format."""
    if chart.format == "percent":
        return [f"{text}%" for text in tick_labels([100 * level for level in levels])]
    if chart.format == "seconds":
        scale, unit = (1000, "ms") if chart.limits[1] < 1 else (1, "s")
        return [
            f"{text} {unit}" if level else "0"
            for level, text in zip(levels, tick_labels([scale * level for level in levels]), strict=True)
        ]
    return tick_labels(levels)


def _reference_line(chart: Chart) -> str:
    return f'<path class="reference" d="M0,{chart.y(chart.reference[1])}H{WIDTH}"/>' if chart.reference else ""


def _reference_label(chart: Chart) -> str:
    if not chart.reference:
        return ""
    label, level = chart.reference
    text = f"{level:.0%}" if chart.format == "percent" else f"{level:.2f}"
    return f'<span class="reference" style="top:{chart.y(level)}px">{escape(label)} {text}</span>'


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
