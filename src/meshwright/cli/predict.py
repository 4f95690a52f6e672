"""`meshwright predict`: compares predicted and measured figures of published runs."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import Json
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from meshwright.calibration.record_predictions import Prediction

REQUIRED = ("gpu", "gpus", "tp", "pp")
"""Columns that the table must have."""


def predict(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS.csv", help="Runs, one a row; columns in docs/design/cost-model.md.")
    ],
    as_json: Json = False,
) -> None:
    """Predict step time and memory of every run in a table, each under the plan that its row fixes.

    Rows that cannot be expressed are listed with the reason; defaults that were taken are listed as assumed. A row may state its software,
    experts, exchange, balance and attention kernel instead (docs/design/cost-model.md, "Tables of runs").

    With --json: `rows`; `summary` with the errors by source and by class, and the share of rows inside their bands.

    Example:

        meshwright predict runs.csv --json
    """
    from meshwright.calibration.record_predictions import predict_records

    records = _read(runs)
    predictions = zip(records, predict_records(records), strict=True)
    answers = [_answer(index, record, prediction) for index, (record, prediction) in enumerate(predictions)]
    summary = _summary(answers)
    if as_json:
        print(json.dumps({"rows": answers, "summary": summary}))
    else:
        _print_table(answers, summary)


def _read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the table as strings by column. Raises BadInput if the file is no CSV file or lacks a required column."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey="more")
            records = [
                {key: value or "" for key, value in record.items() if isinstance(value, str | None)}
                for record in reader
            ]
            columns = reader.fieldnames or ()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; expected a CSV file of runs") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is not a CSV file in UTF-8: {error}") from error
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise BadInput(
            f"{path} has no column {missing[0]!r}; expected at least {', '.join(REQUIRED)} (docs/design/cost-model.md)"
        )
    return records


def _answer(index: int, record: dict[str, str], prediction: Prediction) -> dict[str, Any]:
    """Return the predicted and the measured figures of one row. `index` counts rows from 0."""
    from meshwright.calibration.published_records import measured_seconds, number_or_none

    return {
        "row": index,
        "source": record.get("source", ""),
        "measured_step_seconds": measured_seconds(record),
        "predicted_step_seconds": prediction.seconds,
        "low_seconds": prediction.low,
        "high_seconds": prediction.high,
        "measured_memory_gib": number_or_none(record, "mem_gb"),
        "predicted_memory_gib": prediction.memory_gib,
        "memory_by_kind_gib": prediction.fullest_rank_memory,
        "class": prediction.run_class,
        "exposed_seconds": prediction.exposed,
        "fits": prediction.fits,
        "assumed": list(prediction.assumed),
        "reason": prediction.reason,
    }


def _summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over all rows that have a measured and a predicted step time."""
    compared = [answer for answer in answers if answer["measured_step_seconds"] and answer["predicted_step_seconds"]]
    sources, classes = (_errors_by(compared, key) for key in ("source", "class"))
    medians = [entry["median_error"] for entry in sources]
    memory = [
        abs(answer["predicted_memory_gib"] / answer["measured_memory_gib"] - 1)
        for answer in answers
        if answer["measured_memory_gib"] and answer["predicted_memory_gib"]
    ]
    return {
        "rows": len(answers),
        "predicted": sum(answer["predicted_step_seconds"] is not None for answer in answers),
        "compared": len(compared),
        "median_error": _quantile([_error(answer) for answer in compared], 0.5) if compared else None,
        "median_of_sources": _quantile(medians, 0.5) if medians else None,
        "worst_source": max(sources, key=lambda entry: entry["median_error"], default=None),
        "worst_row": max(compared, key=_error)["row"] if compared else None,
        "median_memory_error": _quantile(memory, 0.5) if memory else None,
        "inside_band": _inside(compared) if compared else None,
        "sources": sources,
        "classes": classes,
    }


def _errors_by(compared: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return errors, and the fraction of rows inside their intervals, for each value of the column `key`."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for answer in compared:
        groups[answer[key]].append(answer)
    return [
        {
            key: name,
            "rows": len(members),
            "median_error": _quantile([_error(member) for member in members], 0.5),
            "p90_error": _quantile([_error(member) for member in members], 0.9),
            "worst_error": max(map(_error, members)),
            "inside_band": _inside(members),
        }
        for name, members in groups.items()
    ]


def _error(answer: dict[str, Any]) -> float:
    """Return the relative error of the predicted step time."""
    return float(abs(answer["predicted_step_seconds"] / answer["measured_step_seconds"] - 1))


def _inside(answers: list[dict[str, Any]]) -> float:
    """Return the fraction of rows whose measured time is inside the predicted interval."""
    inside = [answer["low_seconds"] <= answer["measured_step_seconds"] <= answer["high_seconds"] for answer in answers]
    return sum(inside) / len(inside)


def _quantile(values: list[float], share: float) -> float:
    """Return the quantile `share` (0 to 1) of some values, interpolated linearly."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _print_table(answers: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print errors by source and by class, the summary, and why rows were not predicted."""
    print(f"{'rows':>6} {'median':>7} {'p90':>7} {'worst':>7} {'in band':>7}  error of predicted step time, by source")
    for entry in sorted(summary["sources"], key=lambda entry: -entry["rows"]):
        print(f"{_figures(entry)}  {entry['source']}")
    if len(summary["classes"]) > 1:
        print("by class (80% of the runs should be inside their bands)")
        for entry in sorted(summary["classes"], key=lambda entry: -entry["rows"]):
            print(f"{_figures(entry)}  {entry['class']}")
    if summary["compared"]:
        worst = summary["worst_source"]
        print(
            f"median {summary['median_error']:.1%}, median of the sources' medians {summary['median_of_sources']:.1%}, worst source "
            f"{worst['median_error']:.1%} ({worst['source']}), worst row {summary['worst_row']}, "
            f"{summary['inside_band']:.0%} inside their bands"
        )
    if summary["median_memory_error"] is not None:
        print(f"memory: median error {summary['median_memory_error']:.1%}")
    print(f"{summary['predicted']} of {summary['rows']} rows predicted")
    reasons: dict[str, list[int]] = defaultdict(list)
    for answer in answers:
        if answer["reason"]:
            reasons[answer["reason"]].append(answer["row"])
    for reason, indices in reasons.items():
        shown = ", ".join(map(str, indices[:5])) + (" …" if len(indices) > 5 else "")
        print(f"  {len(indices)} not predicted: {reason} (rows {shown})")


def _figures(entry: dict[str, Any]) -> str:
    shares = (entry["median_error"], entry["p90_error"], entry["worst_error"], entry["inside_band"])
    return " ".join([f"{entry['rows']:6}", *(f"{share:7.1%}" for share in shares)])
