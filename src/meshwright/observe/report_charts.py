"""The charts of a report, made from the lines of metrics.jsonl.

Long curves are reduced to as many points as a page can show.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.events.span import PHASES
from meshwright.observe import number_text
from meshwright.observe.curves import (
    Values,
    bucket_means,
    indices_of_extremes,
    median,
    tick_labels,
    ticks,
    time_labels,
    time_ticks,
    trend,
)
from meshwright.observe.runfolder import Record, RunFolder, column, number
from meshwright.observe.svg import Axis, Chart, Format, Series, Table
from meshwright.spec.cluster import ClusterSpec

PREFERENCE_CHARTS: tuple[tuple[str, str, str, Format], ...] = (
    ("accuracy", "Accuracy", "share of pairs in the right order, with kto of answers on the right side", "percent"),
    ("margin", "Margin", "reward of chosen answers less that of rejected ones", "short"),
    ("reference_distance", "Distance to the reference", "mean difference of log-probabilities, nat per token", "short"),
    (
        "reference_kl",
        "Divergence from the reference",
        "estimated with answers to other prompts, nat per answer",
        "short",
    ),
)
"""(key of the figure, title, unit, format) of each chart of a preference run."""
ANSWER_CHARTS: tuple[tuple[str, str, str], ...] = (
    ("reward", "Rewards of answers", "trend of the means"),
    ("tokens", "Tokens of answers", "trend of the means"),
)
"""(figure, title, unit) of charts with two curves, for chosen and for rejected answers."""
PER_SOURCE = "preferences_by_source"
"""Key whose value has the figures of each source."""
MOST_POINTS = 1500
"""Most points of a curve. More cannot be told apart on a page."""
MOST_COLUMNS = 160
"""Most columns of a stacked chart."""
MOST_VALIDATIONS = 500
"""Most validation points."""
RECENT_VALUES = 10
"""Number of values of which `recent_mean` is the mean."""
SOURCE_COLOURS = ("c-second", "c-optim", "c-checkpoint", "c-backward")
"""Colours for the validation losses of a mixture's first sources. Other sources are only in metrics.jsonl."""


@dataclass(frozen=True)
class Sheet:
    """The charts of a page.

    `tables` has the x values that charts share, by name; `axes` are the x axes that the reader can choose.
    """

    charts: tuple[Chart, ...]
    tables: dict[str, Table]
    axes: tuple[Axis, ...]


def sheet(run: RunFolder) -> Sheet:
    """Return every chart for which the run has figures; an empty sheet if no step was recorded."""
    if not run.steps:
        return Sheet((), {}, ())
    positions = positions_of(run.steps)
    indices = indices_of_extremes(
        len(run.steps), [column(run.steps, key) for key in ("loss", "grad_norm", "tokens_per_second")], MOST_POINTS
    )
    validations = evenly_spaced(run.validations, MOST_VALIDATIONS)
    tables = {
        "steps": select_from_table(positions, indices),
        "validation": at_steps(positions, validations),
        "events": at_steps(positions, run.events),
        "windows": _window_edges(positions, min(MOST_COLUMNS, len(run.steps))),
    }
    charts = [
        *_rewards(run, indices),
        *_preferences(run, indices, validations),
        _loss(run, indices, validations),
        *_throughput(run, indices),
        _phases(run),
        _curve(run, indices, "lr", "Learning rate", "", "scientific"),
        _curve(run, indices, "grad_norm", "Gradient norm", "before clipping", "short", noisy=True),
    ]
    return Sheet(tuple(chart for chart in charts if chart), tables, _axes(positions))


def _rewards(run: RunFolder, indices: Sequence[int]) -> Iterator[Chart | None]:
    """Yield the charts of an RL run; none for other runs."""
    if run.steps[-1].get("reward") is None:
        return
    yield _curve(run, indices, "reward", "Reward", "mean of the step's answers", "short", noisy=True)
    yield _curve(run, indices, "answer_tokens", "Tokens of an answer", "mean", "short", noisy=True)
    yield _curve(run, indices, "entropy", "Entropy", "mean of −log p of the sampled tokens, nat", "short", noisy=True)
    unit = "divergence of their probabilities, nat per token"
    divergence = _curve(run, indices, "engine_kl", "Engine beside trainer", unit, "scientific")
    if divergence is not None and None in column(run.steps, "engine_kl"):
        # Of several updates per rollout, only the first has it.
        points = replace(divergence.series[0], shape="points")
        divergence = replace(divergence, series=(points,))
    yield divergence
    yield _curve(run, indices, "clipped", "Clipped", "share of trained tokens", "percent", noisy=True)


def _preferences(run: RunFolder, indices: Sequence[int], validations: Sequence[Record]) -> Iterator[Chart | None]:
    """Yield the charts of a preference run, which also show held-out answers; none for other runs."""
    if run.steps[-1].get("margin") is None:
        return
    for key, title, unit, form in PREFERENCE_CHARTS:
        chart = _curve(run, indices, key, title, unit, form, noisy=True)
        if chart is not None:
            chart = replace(chart, series=(*chart.series, *_held_out(validations, key)))
        yield chart
    for key, title, unit in ANSWER_CHARTS:
        series = [
            Series(name, colour, "steps", trend(values, indices))
            for name, colour in (("chosen", "c-loss"), ("rejected", "c-backward"))
            if has_numbers(values := column(run.steps, f"{name}_{key}"))
        ]
        yield Chart(f"answer_{key}", title, unit, "short", tuple(series), from_zero=False) if series else None


def _held_out(validations: Sequence[Record], key: str) -> Iterator[Series]:
    """Yield the points of a figure of held-out answers: for all answers, and for each source if there are several."""
    sources = zip(preference_sources(validations), SOURCE_COLOURS, strict=False)
    drawn = [("held out", "c-validation", column(validations, key))]
    drawn += [(f"held out, {name}", colour, column(validations, PER_SOURCE, name, key)) for name, colour in sources]
    return (
        Series(label, colour, "validation", values, "points") for label, colour, values in drawn if has_numbers(values)
    )


def preference_sources(validations: Sequence[Record]) -> list[str]:
    """Return the names of the sources of held-out answers; none if there is only one source."""
    found = [record[PER_SOURCE] for record in validations if isinstance(record.get(PER_SOURCE), Mapping)]
    return list(dict.fromkeys(str(name) for figures in found for name in figures))


def loss_unit(run: RunFolder) -> str:
    """Return the unit of the training loss: what it is a mean of."""
    return "nat per token" if not run.steps or run.steps[-1].get("margin") is None else "per pair, with kto per answer"


def steady_median(values: Values) -> float | None:
    """Return the median without the first tenth of the values, in which compilation and empty caches slow steps down."""
    numbers = [value for value in values[len(values) // 10 :] if value is not None]
    return median(numbers) if numbers else None


def recent_mean(values: Values) -> float | None:
    """Return the mean of the last ten numbers, which stands for the loss of a run."""
    last = [value for value in values if value is not None][-RECENT_VALUES:]
    return sum(last) / len(last) if last else None


def _loss(run: RunFolder, indices: Sequence[int], validations: Sequence[Record]) -> Chart | None:
    """Return the chart of the loss: each step, its trend, validations and events. None if no step has a loss."""
    losses = column(run.steps, "loss")
    series = [
        Series("each step", "c-loss faint", "steps", selected(losses, indices)),
        Series("trend", "c-loss", "steps", trend(losses, indices)),
    ]
    if validations:
        series.append(Series("validation", "c-validation", "validation", column(validations, "loss"), "points"))
        series += _by_source(validations)
    if run.events:
        series.append(Series("events", "c-event", "events", [0.0] * len(run.events), "marks"))
    entropy = number(run.summary.get("unigram_entropy_nats"))
    reference = ("unigram entropy of the held-out text", entropy) if entropy is not None else None
    chart = Chart(
        "loss", "Loss", loss_unit(run), "loss", tuple(series), from_zero=False, height=300, reference=reference
    )
    return chart if has_numbers(losses) else None


def _by_source(validations: Sequence[Record]) -> list[Series]:
    """Return the validation loss of each source of a mixture as points."""
    by_source = [record["by_source"] for record in validations if isinstance(record.get("by_source"), Mapping)]
    names = dict.fromkeys(str(name) for losses in by_source for name in losses)
    return [
        Series(f"validation, {name}", colour, "validation", column(validations, "by_source", name), "points")
        for name, colour in zip(names, SOURCE_COLOURS, strict=False)
    ]


def _throughput(run: RunFolder, indices: Sequence[int]) -> list[Chart | None]:
    """Return the charts of throughput and of MFU."""
    speed = _curve(run, indices, "tokens_per_second", "Throughput", "tokens per second, all ranks", "short", noisy=True)
    variants = [("mfu", "causal attention", "c-loss thin"), ("mfu_full", "full attention", "c-second thin")]
    series = [
        _steady_line(values, label, colour, indices, number_text.percent)
        for key, label, colour in variants
        if has_numbers(values := column(run.steps, key))
    ]
    mfu = Chart("mfu", "Model FLOPs utilisation", peak_text(run), "percent", tuple(series)) if series else None
    return [speed, mfu]


def peak_text(run: RunFolder) -> str:
    """Return words about the peak FLOP/s that MFU refers to, for the chart's unit."""
    gpu = run.setting("cluster", "gpu")
    precision = run.plan.precision.compute if run.plan else "bf16"
    peak = ClusterSpec(gpu=gpu).peak_flops(precision) if isinstance(gpu, str) else None
    return f"of {peak / 1e12:,.0f} TFLOP/s, {gpu} dense {precision}" if peak else "of the device's dense peak"


def _phases(run: RunFolder) -> Chart | None:
    """Return the chart of seconds by phase: means over windows of steps, stacked."""
    series = []
    for phase in PHASES:
        seconds = column(run.steps, "phases", phase)
        if not has_numbers(seconds):
            continue
        legend_text = number_text.duration(steady_median([value or 0.0 for value in seconds]) or 0.0)
        series.append(
            Series(phase, f"c-{phase}", "windows", bucket_means(seconds, MOST_COLUMNS), "column", legend_text)
        )
    return Chart("phases", "Step time", "by phase", "seconds", tuple(series)) if series else None


def _curve(
    run: RunFolder, indices: Sequence[int], key: str, title: str, unit: str, form: Format, *, noisy: bool = False
) -> Chart | None:
    """Return a chart of one figure of the steps; None if the run lacks it. A `noisy` figure also gets its trend."""
    values = column(run.steps, key)
    if not has_numbers(values):
        return None
    series = [Series("each step", "c-loss faint" if noisy else "c-loss", "steps", selected(values, indices))]
    if noisy:
        series.append(Series("trend", "c-loss", "steps", trend(values, indices)))
    return Chart(key, title, unit, form, tuple(series))


def _steady_line(
    values: Values, label: str, colour: str, indices: Sequence[int], text: Callable[[float], str]
) -> Series:
    """Return a curve whose legend shows the median without the first steps."""
    steady_value = steady_median(values)
    return Series(
        label,
        colour,
        "steps",
        selected(values, indices),
        shown=text(steady_value) if steady_value is not None else None,
    )


def positions_of(steps: Sequence[Record]) -> Table:
    """Return the position of each step on every x axis: its number, all tokens so far, and training seconds at its end."""
    elapsed = 0.0
    seconds = []
    for value in column(steps, "step_seconds"):
        elapsed += value or 0.0
        seconds.append(elapsed)
    tokens = []
    most_tokens = 0.0
    for value in column(steps, "tokens"):
        most_tokens = max(most_tokens, value or 0.0)
        tokens.append(most_tokens)
    return {"step": [float(record["step"]) for record in steps], "tokens": tokens, "time": seconds}


def _axes(positions: Table) -> tuple[Axis, ...]:
    """Return the x axes: steps always, tokens and time only if the run has them."""
    labels = {"step": "Steps", "tokens": "Tokens", "time": "Time"}
    return tuple(
        axis_between(key, label, positions[key][0], positions[key][-1])
        for key, label in labels.items()
        if key == "step" or positions[key][-1] > 0
    )


def axis_between(key: str, label: str, first: float, high: float) -> Axis:
    """Return an x axis for values from `first` to `high`. It begins at 0, unless the first value is far from 0.

    `key` is the axis's name in a `Table`: step, tokens, time or flops. `label` is its name for readers.
    """
    low = 0.0 if first <= 0.2 * high or high <= 1 else first
    if not high > low:
        low = 0.0
        high = max(1.0, high)
    if key == "time":
        positions = [position for position in time_ticks(high) if position >= low]
        return Axis(key, label, low, high, tuple(zip(positions, time_labels(positions), strict=True)))
    positions = [position for position in ticks(low, high, 6) if key != "step" or position == math.floor(position)]
    labels = [f"{value:.1e}".replace("e+", "e") for value in positions] if key == "flops" else tick_labels(positions)
    return Axis(key, label, low, high, tuple(zip(positions, labels, strict=True)))


def at_steps(positions: Table, records: Sequence[Record]) -> Table:
    """Return the positions of records on every axis. A record is at the newest step line with the same or a lower step."""
    indices = [bisect_right(positions["step"], record["step"]) - 1 for record in records]
    table = {key: [values[index] if index >= 0 else 0.0 for index in indices] for key, values in positions.items()}
    return {**table, "step": [float(record["step"]) for record in records]}


def _window_edges(positions: Table, windows: int) -> Table:
    """Return the x values at the edges of `windows` windows of steps. Each window begins where the step before it ended."""
    length = len(positions["step"])
    last_indices = [(window + 1) * length // windows - 1 for window in range(windows)]
    first_edges = {"step": positions["step"][0] - 1, "tokens": 0.0, "time": 0.0}
    return {key: [first_edges[key], *(values[end] for end in last_indices)] for key, values in positions.items()}


def select_from_table(table: Table, indices: Sequence[int]) -> Table:
    """Return the rows of a table that have these indices."""
    return {key: [values[index] for index in indices] for key, values in table.items()}


def selected(values: Values, indices: Sequence[int]) -> list[float | None]:
    """Return the values at these indices."""
    return [values[index] for index in indices]


def evenly_spaced(records: Sequence[Record], limit: int) -> Sequence[Record]:
    """Return at most `limit` records, evenly spaced and including the last one."""
    # Counted from the end, so that the last record is included.
    stride = max(1, math.ceil(len(records) / limit))
    return records[::-1][::stride][::-1]


def has_numbers(values: Values) -> bool:
    """Whether at least one of the values is a number."""
    return any(value is not None for value in values)
