"""Reads a run's folder for the report. Every file is optional; files that are missing or cannot be read are noted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.observe.goodput import RunGoodput, run_goodput
from meshwright.observe.metrics import scan_metrics
from meshwright.observe.prediction_check import PredictionCheck, read_check
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_checked_plain, from_plain
from meshwright.spec.layout import with_node_crossings
from meshwright.spec.model import parameter_count
from meshwright.spec.plan import Plan
from meshwright.spec.plan_keys import PlanKeys, plan_of
from meshwright.spec.run import ModelSection

Record = Mapping[str, Any]
"""One object of a JSON file or of metrics.jsonl."""
BENCHMARKS = "benchmarks.json"
"""File with the results of `meshwright bench`. Most runs have none."""


@dataclass(frozen=True)
class RunFolder:
    """The content of a run's folder. `notes` lists files that are missing or cannot be read.

    `steps`, `validations`, `events`, `starts` and `answers` are the lines of metrics.jsonl by kind, in the order of
    steps.
    """

    path: Path
    steps: tuple[Record, ...]
    validations: tuple[Record, ...]
    events: tuple[Record, ...]
    starts: tuple[Record, ...]
    answers: tuple[Record, ...]
    """For an RL run: questions of some steps, each with answers and rewards."""
    prediction_check: PredictionCheck | None
    goodput: RunGoodput | None
    config: Record
    config_text: str
    plan: Plan | None
    environment: Record
    summary: Record
    samples: tuple[Record, ...]
    benchmarks: tuple[Record, ...]
    """Results of `meshwright bench`, the oldest first (`observe.report_benchmarks`)."""
    checkpoints: tuple[tuple[str, bool], ...]
    """(name, whether it was committed) of each checkpoint folder."""
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def parameters(self) -> int | None:
        """Number of stored weights of the configured model; None if the configuration is incomplete."""
        try:
            spec = from_plain(ModelSection, self.config["model"])
            return parameter_count(spec) if spec.vocab_size else None
        except (TypeError, ValueError, KeyError, AttributeError):  # not a resolved model section
            return None

    def setting(self, *keys: str) -> Any:
        """Return a value of the resolved configuration, given by its nested keys; None if it is missing."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def read_run(folder: Path) -> RunFolder:
    """Read the content of `folder` for a report."""
    notes: list[str] = []
    records = _metrics(folder / "metrics.jsonl", notes)
    config = _yaml(folder / "config.yaml", notes)
    # Only some commands write samples: a run without them lacks nothing.
    sampled = (folder / "samples.json").exists()
    samples = (_json(folder / "samples.json", notes, list) or []) if sampled else []
    return RunFolder(
        path=folder,
        steps=tuple(record for record in records if record.get("kind", "step") == "step"),
        validations=tuple(record for record in records if record.get("kind") == "validation"),
        events=tuple(record for record in records if record.get("kind") == "event"),
        starts=tuple(record for record in records if record.get("kind") == "start"),
        answers=tuple(record for record in records if record.get("kind") == "answers"),
        prediction_check=_prediction_check(
            [record for record in records if record.get("kind") == "prediction_check"], notes
        ),
        goodput=_goodput(folder, notes),
        config=config if isinstance(config, dict) else {},
        config_text=_text(folder / "config.yaml", []) or "",
        plan=read_plan(folder / "plan.yaml", notes, config),
        environment=_json(folder / "environment.json", notes, dict) or {},
        summary=_json(folder / "summary.json", notes, dict) or {},
        samples=tuple(sample for sample in samples if isinstance(sample, dict)),
        benchmarks=_benchmarks(folder / BENCHMARKS, notes),
        checkpoints=_checkpoints(folder / "checkpoints"),
        notes=tuple(notes),
    )


def number(value: Any) -> float | None:
    """Return `value` as float if it is a finite number that is small enough to draw, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN is left out, since no comparison with it is true.
    return float(value) if is_number and abs(value) < 1e30 else None


def column(records: Sequence[Record], key: str, *inner: str) -> list[float | None]:
    """Return the value of a key, or of nested keys, in every record; None where it is missing or no number."""
    values: list[Any] = [record.get(key) for record in records]
    for name in inner:
        values = [value.get(name) if isinstance(value, Mapping) else None for value in values]
    return [number(value) for value in values]


def _text(path: Path, notes: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name}: {error.strerror}")
        return None


def _metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        records, damaged = scan_metrics(path)
    except OSError as error:
        notes.append(f"{path.name}: {error.strerror}")
        return []
    if damaged:
        notes.append(f"{path.name}: {len(damaged)} damaged lines were left out, the first is line {damaged[0]}")
    return sorted(records, key=lambda record: record["step"])


def _prediction_check(records: Sequence[Record], notes: list[str]) -> PredictionCheck | None:
    """Return the newest check of the prediction against measured figures; None if there is none."""
    if not records:
        return None
    try:
        return read_check(records[-1])
    except ValueError as error:
        notes.append(f"metrics.jsonl: the prediction check after step {records[-1]['step']}: {error}")
        return None


def _goodput(folder: Path, notes: list[str]) -> RunGoodput | None:
    try:
        return run_goodput(folder)
    except OSError as error:
        notes.append(f"wall_time.jsonl: {error.strerror}")
        return None


def _json(path: Path, notes: list[str], expected_type: type) -> Any:
    text = _text(path, notes)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        notes.append(f"{path.name}: not JSON: {error}")
        return None
    if not isinstance(value, expected_type):
        notes.append(
            f"{path.name}: expected a JSON {'object' if expected_type is dict else 'list'}, got {type(value).__name__}"
        )
        return None
    return value


def _benchmarks(path: Path, notes: list[str]) -> tuple[Record, ...]:
    """Return the results in the file that have metrics; none if there is no file."""
    results = (_json(path, notes, list) or []) if path.exists() else []
    return tuple(result for result in results if isinstance(result, dict) and isinstance(result.get("metrics"), dict))


def _yaml(path: Path, notes: list[str]) -> Any:
    text = _text(path, notes)
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        notes.append(f"{path.name}: not YAML: {str(error).splitlines()[0]}")
        return None


def read_plan(path: Path, notes: list[str], config: Any = None) -> Plan | None:
    """Return the plan in a file. If it is missing or cannot be read, add a line to `notes` and return None.

    `config` is the run's configuration. If its cluster section is valid, axes of the plan that cross nodes are marked
    so.
    """
    data = _yaml(path, notes)
    if data is None:
        return None
    try:
        plan = plan_of(from_checked_plain(PlanKeys, data))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        notes.append(f"{path.name}: not a plan: {error}")
        return None
    try:
        return with_node_crossings(plan, from_checked_plain(ClusterSpec, config["cluster"]).ranks_per_node)
    except (TypeError, ValueError, KeyError, AttributeError):
        return plan


def _checkpoints(folder: Path) -> tuple[tuple[str, bool], ...]:
    """Return (name, whether it was committed) of each checkpoint folder, in the order of steps."""
    if not folder.is_dir():
        return ()
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return tuple((path.name, (path / "COMMITTED").is_file()) for path in folders)
