"""The state that a run keeps over a restart: weights, moments, and a few integers.

Learning rate and data order are functions of the step, and nothing is drawn at random. So there is only one other state: the positions in
data that are read without preparation. To compute these again, everything before them would have to be tokenized.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.models.adapters import adapter_values, base_digest, check_base, placed_parts
from meshwright.checkpoint.models.initial import Initial, base_weights, initial_weights
from meshwright.checkpoint.models.stored_model import open_adapter
from meshwright.parallel.apply import PlannedModel
from meshwright.spec.blocks.table import ADAPTER
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import Box
from meshwright.spec.model import SCORE, ModelSpec, ParameterSpec, parameters, without_adapter
from meshwright.state.parts import StateParts

CURSORS = "cursors"
"""Key of the positions in data that are read without preparation, in the plain state."""
log = logging.getLogger("meshwright")


def run_state(
    step: int, train: TrainSpec, tokens: int, next_sample: int, data: dict[str, Any], numerics: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the plain values of a checkpoint.

    `step` and `tokens` are what was done so far, `next_sample` is the first sample of the next step, `train` gives the length of the
    schedule, `data` describes the corpus. `numerics` has what was skipped, the history of numerical policies, and the loads of experts.
    """
    plain = {"step": step, "next_sample": next_sample, "tokens": tokens, "train_steps": train.steps, "data": data}
    return {**plain, **numerics}


def load_initial(weights: Mapping[str, StateParts], spec: ModelSpec, init: str) -> None:
    """Load the initial weights that `init` names, if it names any. Each rank reads only the rows of its shards."""
    with initial_weights(spec, init) as initial:
        if initial is None:
            return
        for note in initial.notes:
            log.warning("%s", note)
        specs = {parameter.name: parameter for parameter in parameters(spec)}
        for name, parts in weights.items():
            if initial.without_score and name == SCORE:
                continue
            for box, elements in parts.pieces():
                _fill(elements, box, specs[name], initial)


def load_base(engine: PlannedModel, spec: ModelSpec, init: str, seed: int) -> str:
    """Load the frozen weights of a run with adapters and return their digest. DoRA's magnitudes start as the norms of the weights' rows."""
    weights = engine.weights
    load_initial({name: parts for name, parts in weights.items() if not _is_adapter(name)}, spec, init)
    with base_weights(spec, init, seed) as base:
        specs = {parameter.name: parameter for parameter in parameters(without_adapter(spec))}
        if init != "scratch":
            for stored in engine.stored_fp8:
                stored.fill(partial(base.read_rows, specs[stored.name]))
        for placed in placed_parts(spec):
            parts = weights.get(placed.parameter("magnitude"))
            if parts is None:
                continue
            for box, elements in parts.pieces():
                first = placed.first_row + box.offsets[0]
                rows = base.read_rows(specs[placed.weight], first, first + box.sizes[0])
                elements.copy_(rows.to(torch.promote_types(rows.dtype, torch.float32)).norm(dim=1))
        return base_digest(spec, base.read_rows)


@torch.no_grad()
def load_adapters(weights: Mapping[str, StateParts], spec: ModelSpec, base: str) -> None:
    """Load the adapters that `spec.adapter.init` names, if it names any. `base` is the digest of the frozen weights, which must match."""
    if spec.adapter is None or spec.adapter.init is None:
        return
    stored = open_adapter(Path(spec.adapter.init), spec)
    if stored.base is not None:
        check_base(stored.base, base, spec.adapter.init, "model.init")
    for name, whole in adapter_values(spec, stored.deltas, spec.adapter.init).items():
        for box, elements in weights[name].pieces() if name in weights else ():
            part = whole
            for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, first, size)
            elements.copy_(part)


def _is_adapter(name: str) -> bool:
    return f".{ADAPTER}." in name


@torch.no_grad()
def _fill(elements: torch.Tensor, box: Box, parameter: ParameterSpec, weights: Initial) -> None:
    values = weights.read_rows(parameter, box.offsets[0], box.offsets[0] + box.sizes[0])
    for dim in range(1, values.dim()):
        values = values.narrow(dim, box.offsets[dim], box.sizes[dim])
    elements.copy_(values)
