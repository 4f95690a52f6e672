"""Compares several runs: the keys that differ, a table of figures, and charts with one curve for each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from meshwright.observe import number_text
from meshwright.observe.chart_page import chart_document, charts_head
from meshwright.observe.curves import indices_of_extremes, trend
from meshwright.observe.report_benchmarks import metric_texts
from meshwright.observe.report_charts import (
    MOST_POINTS,
    MOST_VALIDATIONS,
    PER_SOURCE,
    PREFERENCE_CHARTS,
    Sheet,
    at_steps,
    axis_between,
    evenly_spaced,
    has_numbers,
    positions_of,
    preference_sources,
    recent_mean,
    select_from_table,
    selected,
    steady_median,
)
from meshwright.observe.runfolder import RunFolder, column, number
from meshwright.observe.svg import Chart, Format, Series, Table, draw
from meshwright.spec.fields import from_plain
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan_name import plan_name
from meshwright.spec.run import ModelSection

MOST_CURVES = 8
"""Most runs whose curves are drawn: the number of colours that a reader can tell apart."""
NOISY = (
    ("loss", "Training loss", "nat per token, smoothed", "loss"),
    ("tokens_per_second", "Throughput", "tokens per second, all ranks, smoothed", "short"),
    ("grad_norm", "Gradient norm", "before clipping, smoothed", "short"),
)
"""(key of a step line, title, unit, format) of the charts whose curves are smoothed."""
LONG_VALUE = 60
"""Most characters of a key's value that are shown."""


@dataclass(frozen=True)
class ComparedRun:
    """A run with its name in the comparison, its state, and its figures by the keys of `_FIGURES`; None if unknown."""

    name: str
    folder: RunFolder
    state: str
    figures: Mapping[str, float | None]

    @classmethod
    def of(cls, name: str, folder: RunFolder, state: str) -> ComparedRun:
        """Return the run, with its figures computed from its steps and validations."""
        return cls(name, folder, state, _figures(folder))


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its last path component, or as many components for all as make the names differ.

    Example: runs/a/base and runs/b/base are named a/base and b/base.
    """
    parts = [folder.resolve().parts for folder in folders]
    count = 1
    while len({part[-count:] for part in parts}) < len(set(parts)):
        count += 1
    return ["/".join(part[-count:]) for part in parts]


def differing_keys(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (key, [value in each run]) for the configuration keys whose values differ between runs, in their order."""
    flat = [dict(_flat(run.folder.config, "")) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values if key != "name")
    rows = [(key, [_text(values.get(key)) for values in flat]) for key in keys]
    return [(key, texts) for key, texts in rows if len(set(texts)) > 1]


def table_rows(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (label, [text for each run]) for the state, each figure that at least one run has, benchmarks and plans."""
    plans = [run.folder.plan for run in runs]
    rows: list[tuple[str, list[str]]] = [("state", [run.state for run in runs])]
    for key, label, text in _FIGURES:
        values = [run.figures.get(key) for run in runs]
        if has_numbers(values):
            rows.append((label, ["–" if value is None else text(value) for value in values]))
    results = [dict(_benchmarks(run.folder)) for run in runs]
    labels = dict.fromkeys(label for result in results for label in result)
    rows += [(label, [result.get(label, "–") for result in results]) for label in labels]
    if any(plans):
        rows.append(("plan", ["–" if plan is None else plan_name(plan) for plan in plans]))
    return rows


def comparison_page(title: str, runs: Sequence[ComparedRun], *, above: Sequence[str] = (), note: str = "") -> str:
    """Return the HTML of the page.

    `above` are HTML parts before the table. `note` is the line below the title. Curves are drawn for the first
    `MOST_CURVES` runs.
    """
    drawn = runs[:MOST_CURVES]
    charts = comparison_sheet(drawn)
    if len(runs) > len(drawn):
        note = f"{len(runs)} runs · curves of the first {len(drawn)}"
    names = [run.name for run in runs]
    header = f"""<header><p class="product">meshwright <span>comparison of runs</span></p><h1>{escape(title)}</h1>
<p class="facts-line">{escape(note or f"{len(runs)} runs")}</p></header>"""
    parts = [
        header,
        *above,
        beside("Figures", names, table_rows(runs)),
        beside("Keys that differ", names, differing_keys(runs)) or _alike(),
    ]
    if charts.charts:
        first, *others = (draw(chart, charts.tables, charts.axes[0]) for chart in charts.charts)
        parts += [
            charts_head(charts, "Curves"),
            f'<div class="grid"><div class="wide">{first}</div>{"".join(others)}</div>',
        ]
    return chart_document(title, parts, charts)


def beside(title: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table with one column for each run, headed by its name and the colour of its curve; empty without rows."""
    if not rows:
        return ""
    heads = "".join(f"<th>{_dot(index)}{escape(name)}</th>" for index, name in enumerate(names))
    lines = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"
        for label, texts in rows
    )
    return f"""<section class="card runs"><h2>{escape(title)}</h2><div class="scroll"><table class="runs">
<thead><tr><th></th>{heads}</tr></thead><tbody>{lines}</tbody></table></div></section>"""


def _dot(index: int) -> str:
    """Return a dot in the colour of a run's curve; empty if the run has no curve."""
    return f'<span class="k{index} dot"></span>' if index < MOST_CURVES else ""


def ranking_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with one row for each run, with the colour of its curve. The caller sorts the rows, the best first."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = "".join(
        f"<tr><th>{_dot(index)}{escape(row[0])}</th>{''.join(f'<td>{escape(text)}</td>' for text in row[1:])}</tr>"
        for index, row in enumerate(rows)
    )
    return f"""<section class="card runs"><h2>Ranking</h2><div class="scroll"><table class="runs">
<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></section>"""


def comparison_sheet(runs: Sequence[ComparedRun]) -> Sheet:
    """Return the charts with one curve for each run. Their x axis can be steps, tokens, training time or training FLOPs."""
    positions = {index: _positions(run.folder) for index, run in enumerate(runs) if run.folder.steps}
    if not positions:
        return Sheet((), {}, ())
    tables: dict[str, Table] = {}
    indices: dict[int, list[int]] = {}
    for index, table in positions.items():
        steps = runs[index].folder.steps
        indices[index] = indices_of_extremes(len(steps), [column(steps, key) for key, *_ in NOISY], MOST_POINTS)
        tables[f"steps{index}"] = select_from_table(table, indices[index])
        tables[f"validation{index}"] = at_steps(table, _validations(runs[index]))
    charts = [
        *(_step_chart(runs, indices, *chart) for chart in NOISY),
        _step_chart(runs, indices, "lr", "Learning rate", "", "scientific", smooth=False),
    ]
    # The charts of the validation loss come after the chart of the training loss.
    charts[1:1] = _validation_charts(runs)
    charts += [
        _step_chart(runs, indices, key, title, f"{unit}, smoothed", form)
        for key, title, unit, form in PREFERENCE_CHARTS
    ]
    charts += [
        _step_chart(runs, indices, f"{name}_tokens", f"Tokens of {name} answers", "mean, smoothed", "short")
        for name in ("chosen", "rejected")
    ]
    charts += _accuracy_charts(runs)
    labels = {"step": "Steps", "tokens": "Tokens", "time": "Time", "flops": "FLOPs"}
    axes = [
        axis_between(
            key,
            label,
            min(table[key][0] for table in positions.values()),
            max(table[key][-1] for table in positions.values()),
        )
        for key, label in labels.items()
        if key == "step" or all(table[key][-1] > 0 for table in positions.values())
    ]
    return Sheet(tuple(chart for chart in charts if chart), tables, tuple(axes))


def _step_chart(
    runs: Sequence[ComparedRun],
    indices: Mapping[int, Sequence[int]],
    key: str,
    title: str,
    unit: str,
    form: Format,
    *,
    smooth: bool = True,
) -> Chart | None:
    """Return a chart of one figure of the steps, with one curve for each run; None if no run has the figure.

    `indices` are the steps that are drawn, by the number of the run.
    """
    series = [
        Series(
            runs[index].name, f"k{index}", f"steps{index}", trend(values, rows) if smooth else selected(values, rows)
        )
        for index, rows in indices.items()
        if has_numbers(values := column(runs[index].folder.steps, key))
    ]
    height = 300 if key == "loss" else 200
    return Chart(key, title, unit, form, tuple(series), from_zero=key != "loss", height=height) if series else None


def _validation_charts(runs: Sequence[ComparedRun]) -> list[Chart | None]:
    """Return the chart of the validation loss, and one chart for each source of a mixture."""
    by_source = [
        record["by_source"]
        for run in runs
        for record in run.folder.validations
        if isinstance(record.get("by_source"), Mapping)
    ]
    sources = dict.fromkeys(str(name) for losses in by_source for name in losses)
    return [
        _validation_chart(runs, "validation", "Validation loss", lambda records: column(records, "loss")),
        *(
            _validation_chart(
                runs,
                f"validation-{number}",
                f"Validation loss, {name}",
                lambda records, name=name: column(records, "by_source", name),
            )
            for number, name in enumerate(sources)
        ),
    ]


def _accuracy_charts(runs: Sequence[ComparedRun]) -> list[Chart | None]:
    """Return a chart of the held-out accuracy for each source, if there are several sources."""
    sources = dict.fromkeys(name for run in runs for name in preference_sources(run.folder.validations))
    return [
        _validation_chart(
            runs,
            f"accuracy-{number}",
            f"Held-out accuracy, {name}",
            lambda records, name=name: column(records, PER_SOURCE, name, "accuracy"),
            ("share of pairs in the right order", "percent"),
        )
        for number, name in enumerate(sources)
    ]


def _validation_chart(
    runs: Sequence[ComparedRun],
    key: str,
    title: str,
    values_of: Callable[[Sequence[Any]], list[float | None]],
    unit_and_form: tuple[str, Format] = ("nat per token", "loss"),
) -> Chart | None:
    """Return a chart of one figure of the validations, with one curve for each run; None if no run has the figure."""
    series = [
        Series(run.name, f"k{index}", f"validation{index}", values, "line" if len(values) > 1 else "points")
        for index, run in enumerate(runs)
        if has_numbers(values := values_of(_validations(run)))
    ]
    return Chart(key, title, *unit_and_form, tuple(series), from_zero=False) if series else None


def _validations(run: ComparedRun) -> Sequence[Mapping[str, Any]]:
    return evenly_spaced(run.folder.validations, MOST_VALIDATIONS)


def _positions(run: RunFolder) -> Table:
    """Return the position of each step of a run on every x axis. FLOPs are 0 if the model is unknown."""
    positions = positions_of(run.steps)
    flops = _flops_per_token(run) or 0.0
    return {**positions, "flops": [flops * tokens for tokens in positions["tokens"]]}


def _flops_per_token(run: RunFolder) -> float | None:
    """Return the training FLOPs for each token, with causal attention; None if the model is unknown."""
    seq_len = run.setting("train", "seq_len")
    try:
        spec = from_plain(ModelSection, run.config["model"])
        return flops_per_token(spec, seq_len, causal=True) if spec.vocab_size and isinstance(seq_len, int) else None
    except (TypeError, ValueError, KeyError, AttributeError):  # not a resolved model section
        return None


def _figures(run: RunFolder) -> dict[str, float | None]:
    """Return the figures of a run by the keys of `_FIGURES`."""
    validations = [record for record in run.validations if number(record.get("loss")) is not None]
    tokens = max((value for value in column(run.steps, "tokens") if value is not None), default=None)
    flops = _flops_per_token(run)
    seconds = [value for value in column(run.steps, "step_seconds") if value is not None]
    return {
        "step": float(run.steps[-1]["step"]) if run.steps else None,
        "loss": recent_mean(column(run.steps, "loss")),
        "validation_loss": number(validations[-1]["loss"]) if validations else None,
        "validation_step": float(validations[-1]["step"]) if validations else None,
        **{
            f"held_out_{key}": number(validations[-1].get(key)) if validations else None
            for key in ("accuracy", "margin", "calibration_error")
        },
        "best_validation_loss": min((float(record["loss"]) for record in validations), default=None),
        "tokens": tokens,
        "flops": flops * tokens if flops and tokens else None,
        "seconds": sum(seconds) if seconds else None,
        "tokens_per_second": steady_median(column(run.steps, "tokens_per_second")),
        "mfu": steady_median(column(run.steps, "mfu")),
        "memory_peak_bytes": max((v for v in column(run.steps, "memory_peak_bytes") if v is not None), default=None),
        "parameters": None if run.parameters is None else float(run.parameters),
    }


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step", "steps", "{:,.0f}".format),
    ("loss", "training loss, mean of the last 10", "{:.4f}".format),
    ("validation_loss", "validation loss, last", "{:.4f}".format),
    ("validation_step", "its step", "{:,.0f}".format),
    ("best_validation_loss", "validation loss, lowest", "{:.4f}".format),
    ("held_out_accuracy", "held-out accuracy, last", number_text.percent),
    ("held_out_margin", "held-out margin, last", "{:.4g}".format),
    ("held_out_calibration_error", "held-out calibration error, last", "{:.3f}".format),
    ("tokens", "tokens", number_text.short),
    ("flops", "training FLOPs, causal", number_text.scientific),
    ("seconds", "time in steps", number_text.duration),
    ("tokens_per_second", "tokens/s, median", number_text.short),
    ("mfu", "MFU, median", number_text.percent),
    ("memory_peak_bytes", "memory, peak of rank 0", number_text.size),
    ("parameters", "parameters", number_text.short),
)
"""(key, label, function that formats the number) of the figures in the table."""


def _benchmarks(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield ("task, metric", value as text) for the newest result of each benchmark."""
    for result in run.benchmarks:
        for metric, text in metric_texts(result):
            yield f"{result.get('task')}, {metric}", text


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, each with its dotted key."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _text(value: Any) -> str:
    """Return a value as a run file shows it, shortened if it is long."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    text = "–" if value is None else text
    return text if len(text) <= LONG_VALUE else f"{text[:LONG_VALUE]}…"


def _alike() -> str:
    return '<section class="card runs"><h2>Keys that differ</h2><p class="finding">None: all keys but the name are equal.</p></section>'
