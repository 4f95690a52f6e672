"""What a run must carry over a stop: weights, moments, and a few integers.

Learning rate and data order are functions of the step, and nothing is drawn at random, so there is no other state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from meshwright.checkpoint.initial import Initial, initial_weights
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import Box
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters
from meshwright.state.parts import StateParts

log = logging.getLogger("meshwright")


def run_state(step: int, train: TrainSpec, tokens: int, data: dict[str, Any]) -> dict[str, Any]:
    """The plain values beside the tensors: optimizer step, sequences and tokens consumed, the steps that the schedule was made for, and the
    record of the corpus."""
    samples = step * train.global_batch
    return {"step": step, "samples": samples, "tokens": tokens, "train_steps": train.steps, "data": data}


def load_initial(weights: Mapping[str, StateParts], spec: ModelSpec, init: str) -> None:
    """Start from what `init` names (`checkpoint.initial`), if anything; each rank reads only the rows it holds into its `weights`."""
    with initial_weights(spec, init) as found:
        if found is None:
            return
        for note in found.notes:
            log.warning("%s", note)
        rows = {row.name: row for row in parameters(spec)}
        for name, held in weights.items():
            for box, elements in held.pieces():
                _fill(elements, box, rows[name], found)


@torch.no_grad()
def _fill(elements: torch.Tensor, box: Box, row: ParameterSpec, weights: Initial) -> None:
    values = weights.read_rows(row, box.offsets[0], box.offsets[0] + box.sizes[0])
    for dim in range(1, values.dim()):
        values = values.narrow(dim, box.offsets[dim], box.sizes[dim])
    elements.copy_(values)
