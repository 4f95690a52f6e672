"""The chart of attainment over rate, of predicted and measured requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.observe.curves import ticks
from meshwright.observe.svg import Axis, Chart, Series, draw

COLOURS = ("c-loss", "c-validation")


class AttainmentCurve(NamedTuple):
    """The share of requests that meet both limits, by rate."""

    label: str
    points: Sequence[tuple[float, float]]
    """(requests per second and device, attainment), ascending."""


def attainment_chart(curves: Sequence[AttainmentCurve], goal: float) -> str:
    """The chart of several curves with the attainment asked for; empty without points."""
    rates = [rate for curve in curves for rate, _ in curve.points]
    if not rates:
        return ""
    high = 1.05 * max(rates)
    axis = Axis("rate", "requests/s a GPU", 0.0, high, tuple((value, f"{value:g}") for value in ticks(0.0, high, 5)))
    tables = {curve.label: {"rate": [rate for rate, _ in curve.points]} for curve in curves}
    series = [
        Series(curve.label, colour, curve.label, [share for _, share in curve.points], "points")
        for curve, colour in zip(curves, COLOURS, strict=False)
    ]
    chart = Chart(
        "attainment",
        "Attainment",
        "of requests, by requests/s a GPU",
        "percent",
        tuple(series),
        reference=("asked for", goal),
    )
    return draw(chart, tables, axis)
