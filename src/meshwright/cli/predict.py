"""`meshwright predict`: predicted and measured figures of published runs."""

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


def predict(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS.csv", help="Runs, one a row; columns in docs/design/cost-model.md.")
    ],
    as_json: Json = False,
) -> None:
    """Predict step time and memory of every run in a table, each under the plan that its row fixes.

    Rows that cannot be expressed are listed with the reason; defaults that were taken are listed as assumed.

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
    from meshwright.calibration.published_records import measured_seconds, number_or_none

    return {
        "row": index,
        "source": record.get("source", ""),
        "measured_step_seconds": measured_seconds(record),
        "predicted_step_seconds": prediction.seconds,
        "low_seconds": prediction.low,
        "high_seconds": prediction.high,
        "measured_memory_gb": number_or_none(record, "mem_gb"),
        "predicted_memory_gb": prediction.memory_gib,
        "memory_by_kind_gb": prediction.fullest_rank_memory,
        "exposed_seconds": prediction.exposed,
        "fits": prediction.fits,
        "assumed": list(prediction.assumed),
        "reason": prediction.reason,
    }


def _summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    by_source: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        measured, predicted = answer["measured_step_seconds"], answer["predicted_step_seconds"]
        if measured and predicted:
            by_source[answer["source"]].append(abs(predicted / measured - 1))
    return {
        "rows": len(answers),
        "predicted": sum(answer["predicted_step_seconds"] is not None for answer in answers),
        "sources": [
            {
                "source": source,
                "rows": len(errors),
                "median_error": _quantile(errors, 0.5),
                "p90_error": _quantile(errors, 0.9),
            }
            for source, errors in by_source.items()
        ],
    }


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _print_table(answers: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    print(f"{'rows':>6} {'median':>7} {'p90':>7}  source (error of predicted step time)")
    for entry in sorted(summary["sources"], key=lambda entry: -entry["rows"]):
        print(f"{entry['rows']:6} {entry['median_error']:7.1%} {entry['p90_error']:7.1%}  {entry['source']}")
    print(f"{summary['predicted']} of {summary['rows']} rows predicted")
    reasons: dict[str, list[int]] = defaultdict(list)
    for answer in answers:
        if answer["reason"]:
            reasons[answer["reason"]].append(answer["row"])
    for reason, indices in reasons.items():
        shown = ", ".join(map(str, indices[:5])) + (" …" if len(indices) > 5 else "")
        print(f"  {len(indices)} not predicted: {reason} (rows {shown})")
