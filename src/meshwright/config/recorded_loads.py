"""Reads recorded loads of experts: from a CSV with columns `layer`, `step`, `expert_0`, …, or from a run's `metrics.jsonl`.

The load of an expert is the number of tokens that were routed to it.
"""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

if TYPE_CHECKING:
    import numpy as np


def read_loads(path: Path, spec: ModelSpec, option: str = "--replay-routing") -> np.ndarray:
    """Read recorded loads, `(steps, routed layers, experts)` int, ordered by step and layer.

    `path` is a file, which may be compressed (`.gz`), or the folder of a run. If the file has fewer layers than the
    model has MoE layers, its layers are repeated. Raises BadInput that names `option` for a dense model, and if the
    file cannot be read or lacks loads of a step, layer or expert.
    """
    import numpy as np  # Loading a run file needs numpy only if there are recorded loads.

    routed = spec.routed_layers
    if not routed:
        raise BadInput(f"{option}: the model has no experts")
    try:
        file = path / "metrics.jsonl" if path.is_dir() else path
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        by_step = _from_metrics(text) if ".jsonl" in file.suffixes else _from_table(text)
        loads = np.array([by_step[step] for step in sorted(by_step)])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{option} {path}: expected columns layer, step, expert_0, … or a run's metrics.jsonl: {error}"
        ) from None
    if loads.ndim != 3 or not loads.size or loads.dtype.kind != "i":
        raise BadInput(f"{option} {path}: expected loads of all layers in each step")
    if loads.shape[2] != spec.experts:
        raise BadInput(f"{option} {path}: has {loads.shape[2]} experts, the model {spec.experts}")
    if (loads < 0).any() or (loads.sum(2) == 0).any():
        raise BadInput(f"{option} {path}: expected loads of at least 0, and above 0 for some expert of each layer")
    return loads[:, np.arange(routed) % loads.shape[1]]


def _from_metrics(text: str) -> dict[int, list[list[int]]]:
    """Return the loads by step. Lines without loads are skipped, and so is an incomplete last line, which a crash may leave."""
    lines = (json.loads(line) for line in text.splitlines() if '"expert_loads"' in line and line.endswith("}"))
    return {line["step"]: line["expert_loads"] for line in lines if "expert_loads" in line}


def _from_table(text: str) -> dict[int, list[list[int]]]:
    by_step: dict[int, dict[int, list[int]]] = {}
    for line in csv.DictReader(text.splitlines()):
        experts = sum(name.startswith("expert_") for name in line)
        values = [int(line[f"expert_{index}"]) for index in range(experts)]
        by_step.setdefault(int(line["step"]), {})[int(line["layer"])] = values
    return {step: [layers[layer] for layer in sorted(layers)] for step, layers in by_step.items()}
