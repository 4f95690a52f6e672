"""Reads a sweep file and lists its runs, or reports every mistake."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.mistakes import schema_mistakes
from meshwright.config.reading import in_reading_order
from meshwright.config.yaml_positions import read_yaml
from meshwright.spec.errors import BadConfig, BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.sweep import SweepSpec

LONGEST_NAME = 100
"""Maximum number of characters of a run's name. A longer name is cut and gets a digest of the run's values."""


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep."""

    name: str
    values: dict[str, Any]
    """The values of the keys in which runs of the sweep differ, by dotted key."""

    def overrides(self, spec: SweepSpec) -> list[str]:
        """Return the arguments `KEY=VALUE` for `meshwright train`. Those that all runs share come first."""
        return [f"{key}={json.dumps(value)}" for key, value in {**spec.set, **self.values}.items()]


def load_sweep(path: Path) -> SweepSpec:
    """Load the sweep in a file. Raises BadConfig with every mistake, and BadInput if the sweep has no runs."""
    document = read_yaml(path)
    if isinstance(document.data, dict):
        document.data.setdefault("name", path.stem)
    values, mistakes, _ = schema_mistakes(SweepSpec, document)
    mistakes += document.mistakes
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, str(path)))
    spec: SweepSpec = from_plain(SweepSpec, values)
    if not spec.grid and not spec.list:
        raise BadInput(f"{path}: expected `grid`, `list` or both, e.g. grid: {{train.learning_rate: [1e-3, 3e-4]}}")
    if empty := [key for key, choices in spec.grid.items() if not choices]:
        raise BadInput(f"{path}: grid.{empty[0]}: expected at least one value")
    for key in (*spec.set, *spec.grid, *(key for entry in spec.list for key in entry)):
        if key == "name" or (key in spec.set and any(key in values for values in (spec.grid, *spec.list))):
            why = "the sweep names its runs" if key == "name" else "it is in `set` and in `grid` or `list`"
            raise BadInput(f"{path}: {key}: {why}; leave it out of one")
    return spec


def swept_runs(spec: SweepSpec) -> list[SweptRun]:
    """Return the runs of a sweep.

    Each entry of `list` is combined with all combinations of `grid`, in which the last key changes fastest.

    The name of a run follows from its values alone, so it stays the same if values are added to the sweep. Raises
    BadInput if two runs are equal.
    """
    grids = [dict(zip(spec.grid, choices, strict=True)) for choices in itertools.product(*spec.grid.values())]
    combined = [{**entry, **grid} for entry in spec.list or ({},) for grid in grids]
    keys = list(dict.fromkeys(key for values in combined for key in values))
    names = [_name(values, keys) for values in combined]
    for name, values in zip(names, combined, strict=True):
        if names.count(name) > 1:
            raise BadInput(f"the sweep has two runs with the values {json.dumps(values)}; leave one out")
    return [SweptRun(name, values) for name, values in zip(names, combined, strict=True)]


def _name(values: dict[str, Any], keys: list[str]) -> str:
    """Return the name of a run, such as `learning_rate-0.001_seed-1`. A key is written in full if another key has the same last name."""
    parts = []
    for key, value in values.items():
        last = key.rpartition(".")[2]
        short = last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key
        parts.append(f"{short}-{_plain(value)}")
    name = "_".join(parts)
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def _plain(value: Any) -> str:
    """Return a value as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", str(value)).strip("-.") or "none"


def describe(runs: list[SweptRun]) -> Iterator[str]:
    """Yield one line for each run: its name, and its values in the notation of a run file."""
    for run in runs:
        yield f"{run.name}: {' '.join(f'{key}={json.dumps(value)}' for key, value in run.values.items())}"
