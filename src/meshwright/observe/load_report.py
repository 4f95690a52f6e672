"""The page of a load test: predicted and measured attainment and latencies, and each instance's occupancy over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.observe import number_text
from meshwright.observe.attainment_chart import AttainmentCurve, attainment_chart
from meshwright.observe.page import document, header, listing, table, tile_list
from meshwright.observe.svg import Axis, Chart, Series, draw

COLOURS = ("c-loss", "c-validation", "c-reduce", "c-optim", "c-checkpoint", "c-backward", "c-event", "c-host")
"""Colours of instances; they repeat."""
PREDICTED = ", predicted"
"""End of the names of predicted curves, which are dashed: a measured curve of equal values stays visible below."""
HEADS = ("requests/s", "requests", "failed", "attainment", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")


@dataclass(frozen=True)
class LatencyFigures:
    """Attainment and latencies (seconds) of the requests at one rate, predicted or measured."""

    attainment: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float


@dataclass(frozen=True)
class RateResult:
    """Result of a load test at one rate."""

    rate: float
    """Requests per second."""
    requests: int
    failed: int
    """Requests without a whole answer; they meet no limit."""
    measured: LatencyFigures
    predicted: LatencyFigures | None


@dataclass(frozen=True)
class InstanceTimeline:
    """Gauges of one instance over a load test."""

    name: str
    """Role and number."""
    seconds: Sequence[float]
    running: Sequence[float]
    """Requests in its batch."""
    cache: Sequence[float]
    """Share of its cache that requests hold."""
    role: str = "both"
    predicted_running: Sequence[float] = ()
    """The simulated requests in its batch at the same times; empty without a prediction."""
    predicted_cache: Sequence[float] = ()


@dataclass(frozen=True)
class LoadReport:
    """A load test of a deployment."""

    model: str
    """Preset or family, and number of parameters."""
    weights: str
    """Path of the folder with the weights."""
    deployment: str
    devices: int
    goal: float
    """Attainment asked for."""
    limits: str
    """The limits in words."""
    rates: Sequence[RateResult]
    """Results of the rates, by rate, ascending."""
    starts: Sequence[float]
    """Seconds at which each rate began."""
    timelines: Sequence[InstanceTimeline]
    why: Sequence[str] = ()
    """The planner's reasons."""
    missing: Sequence[float] = ()
    """Rates without a result."""
    why_missing: str = ""
    """Why the test ended before these; without meaning if none is missing."""

    @property
    def missing_line(self) -> str:
        """Name the rates without a result and the reason; empty if all have one."""
        listed = ", ".join(f"{number_text.rate(rate)}/s" for rate in self.missing)
        return f"without a result: {listed} ({self.why_missing})" if listed else ""


def page(report: LoadReport) -> str:
    """The HTML of the page."""
    met = max((r.rate for r in report.rates if r.measured.attainment >= report.goal), default=0.0)
    pairs = [(r.measured.attainment, r.predicted.attainment) for r in report.rates if r.predicted is not None]
    error = max((abs(measured - predicted) for measured, predicted in pairs), default=None)
    tiles = [
        (
            "Measured goodput",
            number_text.rate(met / report.devices),
            "requests/s a device, the highest tested rate that meets the limits",
        ),
        ("Requests", f"{sum(r.requests for r in report.rates):,}", f"{sum(r.failed for r in report.rates):,} failed"),
    ]
    if error is not None:
        tiles.append(("Largest error", f"{100 * error:.1f} points", "predicted attainment against measured"))
    lines = [line for result in report.rates for line in _lines(result)]
    parts = [
        header("bench-serve", report.model, f"{report.deployment} · weights {report.weights}", report.limits),
        tile_list(tiles),
        listing("The test is not complete", [report.missing_line] if report.missing else []),
        f'<div class="grid">{attainment_chart(_curves(report), report.goal)}</div>',
        table("Predicted beside measured", ("", *HEADS), lines),
        f'<div class="grid">{_role_timeline(report, "running", "Requests in the batch, by role")}</div>',
        f'<div class="grid">{_role_timeline(report, "cache", "Cache that requests hold, by role")}</div>',
        f'<div class="grid">{_timeline(report, "running", "Requests in the batch, by instance")}</div>',
        f'<div class="grid">{_timeline(report, "cache", "Cache that requests hold, by instance")}</div>',
        listing("Why this deployment", report.why),
    ]
    return document(f"load test · {report.model}", parts)


def _curves(report: LoadReport) -> list[AttainmentCurve]:
    predicted = [(r.rate / report.devices, r.predicted.attainment) for r in report.rates if r.predicted is not None]
    measured = [(r.rate / report.devices, r.measured.attainment) for r in report.rates]
    return [AttainmentCurve("predicted", predicted, "rings"), AttainmentCurve("measured", measured)][not predicted :]


def _lines(result: RateResult) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        (
            "measured",
            number_text.rate(result.rate),
            f"{result.requests:,}",
            f"{result.failed:,}",
            *_figures(result.measured),
        )
    ]
    if result.predicted is not None:
        lines.append(("predicted", "", "", "", *_figures(result.predicted)))
    return lines


def _figures(figures: LatencyFigures) -> tuple[str, ...]:
    times = (figures.ttft_p50, figures.ttft_p90, figures.tpot_p50, figures.tpot_p90)
    return (f"{figures.attainment:.1%}", *map(number_text.duration, times))


def _role_timeline(report: LoadReport, gauge: str, title: str) -> str:
    """The mean of a gauge over the instances of each role, measured and predicted."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for role in dict.fromkeys(timeline.role for timeline in report.timelines):
        alike = [timeline for timeline in report.timelines if timeline.role == role]
        for suffix, name in ((", measured", gauge), (PREDICTED, f"predicted_{gauge}")):
            values = [getattr(timeline, name) for timeline in alike]
            means = [sum(at_once) / len(alike) for at_once in zip(*values, strict=False)]
            if means:
                curves[f"{role}{suffix}"] = list(alike[0].seconds[: len(means)]), means
    return _chart(report, gauge, f"{gauge}-by-role", title, curves)


def _timeline(report: LoadReport, gauge: str, title: str) -> str:
    """A curve of a gauge for each instance."""
    curves = {t.name: (list(t.seconds), list(getattr(t, gauge))) for t in report.timelines}
    return _chart(report, gauge, gauge, title, curves)


def _chart(
    report: LoadReport, gauge: str, key: str, title: str, curves: Mapping[str, tuple[list[float], list[float]]]
) -> str:
    """Curves over the whole test; ticks are where the rates begin. Empty with less than two times."""
    times = {second for seconds, _ in curves.values() for second in seconds}
    if len(times) < 2:
        return ""
    marks = tuple(
        (start, f"{number_text.rate(r.rate)}/s") for start, r in zip(report.starts, report.rates, strict=True)
    )
    axis = Axis("seconds", "seconds", 0.0, max(times), marks)
    series = tuple(
        Series(
            name,
            COLOURS[index % len(COLOURS)],
            name,
            values,
            "dashes" if name.endswith(PREDICTED) else "line",
            shown="",
        )
        for index, (name, (_, values)) in enumerate(curves.items())
    )
    tables = {name: {"seconds": seconds} for name, (seconds, _) in curves.items()}
    unit = "requests, by rate tested" if gauge == "running" else "of its blocks, by rate tested"
    chart = Chart(key, title, unit, "short" if gauge == "running" else "percent", series, outliers=True)
    return draw(chart, tables, axis)
