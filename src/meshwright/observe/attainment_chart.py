"""Charts of how many requests meet their latency limits (attainment), predicted and measured. Their legends show no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from meshwright.observe.curves import ticks
from meshwright.observe.svg import Axis, Chart, Series, draw

COLOURS = ("c-loss", "c-validation")
"""Colours of the first and second curve: CSS variables of the pages' style."""


class AttainmentCurve(NamedTuple):
    """Attainment, the share of requests that meet both latency limits, at several request rates."""

    label: str
    points: Sequence[tuple[float, float]]
    """(requests per second and device, attainment from 0 to 1), with ascending rates."""
    shape: Literal["points", "rings"] = "points"
    """How points are drawn. Rings stay visible around points of a later curve at the same place."""


def attainment_chart(curves: Sequence[AttainmentCurve], goal: float) -> str:
    """Return the chart of at most two curves as HTML, with a line at the attainment `goal`; empty without points."""
    rates = [rate for curve in curves for rate, _ in curve.points]
    if not rates:
        return ""
    high = 1.15 * max(rates)  # leaves room at the right for the label of the goal
    axis = Axis("rate", "requests/s a device", 0.0, high, tuple((value, f"{value:g}") for value in ticks(0.0, high, 5)))
    tables = {curve.label: {"rate": [rate for rate, _ in curve.points]} for curve in curves}
    series = [
        Series(curve.label, colour, curve.label, [share for _, share in curve.points], curve.shape, "")
        for curve, colour in zip(curves, COLOURS, strict=False)
    ]
    chart = Chart(
        "attainment",
        "Attainment",
        "of requests, by requests/s a device",
        "percent",
        tuple(series),
        reference=("asked for", goal),
    )
    return draw(chart, tables, axis)


def limits_chart(points: Sequence[tuple[float, float]], goal: float) -> str:
    """Return the chart of attainment if both latency limits are multiplied by a factor; empty without points.

    `points` are (factor, attainment) at one request rate. `goal` is the attainment asked for.
    """
    if not points:
        return ""
    factors = [factor for factor, _ in points]
    marks = tuple((value, f"× {value:g}") for value in (0.5, 1.0, 1.5, 2.0))
    axis = Axis("factor", "limits", min(factors), 1.15 * max(factors), marks)
    series = Series("predicted", COLOURS[0], "predicted", [share for _, share in points], shown="")
    title = "Attainment at the goodput, if both limits are scaled"
    chart = Chart(
        "limits", title, "of requests, by factor of the limits", "percent", (series,), reference=("asked for", goal)
    )
    return draw(chart, {"predicted": {"factor": factors}}, axis)


def division_chart(points: Sequence[tuple[float, float]]) -> str:
    """Return the chart of goodput by how the devices are divided; empty without points.

    `points` are (share of devices that compute only prompts, goodput in requests/s per device). A share of 0 means that
    every device computes both prompts and new tokens.
    """
    if not points:
        return ""
    axis = Axis("share", "prefill devices", -0.02, 1.0, tuple((v / 4, f"{25 * v}%") for v in range(5)))
    series = Series("simulated", COLOURS[1], "simulated", [goodput for _, goodput in points], "points", "")
    unit = "requests/s a device, by share of devices that compute prompts only; 0%: colocated"
    chart = Chart("division", "Goodput by division of the devices", unit, "short", (series,))
    return draw(chart, {"simulated": {"share": [share for share, _ in points]}}, axis)
