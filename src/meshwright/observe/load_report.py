"""The page of a load test: attainment and latencies, predicted and measured, and each instance's load over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.observe import number_text
from meshwright.observe.attainment_chart import AttainmentCurve, attainment_chart
from meshwright.observe.page import document, header, listing, table, tile_list
from meshwright.observe.svg import Axis, Chart, Series, draw

COLOURS = ("c-loss", "c-validation", "c-reduce", "c-optim", "c-checkpoint", "c-backward", "c-event", "c-host")
"""Colours of the instances' curves. With more instances they are used again."""
PREDICTED = ", predicted"
"""End of the names of predicted curves. They are drawn with dashes, so that an equal measured curve stays visible."""
HEADS = ("requests/s", "requests", "failed", "attainment", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")
"""Headings of the table."""


@dataclass(frozen=True)
class LatencyFigures:
    """Figures of the requests at one rate, predicted or measured.

    `attainment` is the share of requests that meet both latency limits, 0 to 1. The others are the median (p50) and the
    90th percentile (p90) of the time to first token (TTFT) and the time per output token (TPOT), in seconds.
    """

    attainment: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float


@dataclass(frozen=True)
class RateResult:
    """Result of a load test at one rate of requests."""

    rate: float
    """Requests per second."""
    requests: int
    failed: int
    """Requests without a complete answer. They count as missing both limits."""
    measured: LatencyFigures
    predicted: LatencyFigures | None


@dataclass(frozen=True)
class InstanceTimeline:
    """Gauges of one instance during a load test, at the times `seconds` since its start."""

    name: str
    """Role and number, for example "decode 0"."""
    seconds: Sequence[float]
    running: Sequence[float]
    """Number of requests in the instance's batch."""
    cache: Sequence[float]
    """Share of the instance's KV cache that requests hold, 0 to 1."""
    role: str = "both"
    predicted_running: Sequence[float] = ()
    """Number of requests in the simulated batch at the same times; empty without a prediction."""
    # The same for `predicted_cache`.
    predicted_cache: Sequence[float] = ()


@dataclass(frozen=True)
class LoadReport:
    """A load test of a deployment on `devices` devices, and its results."""

    model: str
    """Preset or family of the model, and its number of parameters."""
    weights: str
    """Path of the folder with the weights."""
    deployment: str
    devices: int
    goal: float
    """Attainment that was asked for, 0 to 1."""
    limits: str
    """The latency limits in words."""
    rates: Sequence[RateResult]
    """Results by rate, in ascending order."""
    starts: Sequence[float]
    """Seconds from the start of the test at which each rate began."""
    timelines: Sequence[InstanceTimeline]
    why: Sequence[str] = ()
    """The planner's reasons for the deployment."""
    missing: Sequence[float] = ()
    """Rates that have no result."""
    why_missing: str = ""
    """Why the test ended before the missing rates; meaningless if none is missing."""

    @property
    def missing_line(self) -> str:
        """A line with the missing rates and the reason; empty if no rate is missing."""
        listed = ", ".join(f"{number_text.rate(rate)}/s" for rate in self.missing)
        return f"without a result: {listed} ({self.why_missing})" if listed else ""


def page(report: LoadReport) -> str:
    """Return the HTML of the page."""
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
    # Without a prediction, only the measured curve is drawn.
    return [AttainmentCurve("predicted", predicted, "rings"), AttainmentCurve("measured", measured)][not predicted :]


def _lines(result: RateResult) -> list[tuple[str, ...]]:
    """Return the table lines of one rate: measured and, if known, predicted."""
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
    """Return a chart of the mean of a gauge over the instances of each role, measured and predicted."""
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
    """Return a chart with one curve of a gauge for each instance."""
    curves = {t.name: (list(t.seconds), list(getattr(t, gauge))) for t in report.timelines}
    return _chart(report, gauge, gauge, title, curves)


def _chart(
    report: LoadReport, gauge: str, key: str, title: str, curves: Mapping[str, tuple[list[float], list[float]]]
) -> str:
    """Return a chart over the whole test, with ticks where the rates begin. Empty if there are fewer than two times.

    `curves` maps a name to (seconds, values).
    """
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
