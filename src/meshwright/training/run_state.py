"""What a run must carry over a stop: weights, moments, and a few integers.

Learning rate and data order are functions of the step, and nothing is drawn at random, so there is no other state.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from meshwright.checkpoint.boxed import Boxed
from meshwright.checkpoint.initial import Initial, initial_weights
from meshwright.models.decoder import Decoder
from meshwright.optim.adamw import AdamW
from meshwright.optim.fused import MOMENTS
from meshwright.optim.host import MASTER
from meshwright.parallel.apply import Engine, holding, holdings
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import UNDIVIDED, Division
from meshwright.spec.model import ModelSpec, parameters

log = logging.getLogger("meshwright")


def run_tensors(engine: Engine, optimizer: AdamW) -> dict[str, torch.Tensor | Boxed]:
    """Weights and moments by checkpoint name, wherever they are; waits for the last update of what is in host memory."""
    spec, division = engine.model.spec, engine.division
    rows = {row.name: row for row in parameters(spec)}
    held = holdings(engine.model, division)

    def given(name: str, mine: torch.Tensor) -> torch.Tensor | Boxed:
        if division.tensor.of == 1 and not (rows[name].expert and division.expert.of > 1):
            return mine
        part = holding(spec, rows[name], mine, division)
        return Boxed(part.local, part.boxes, torch.Size(part.row.shape))

    weights = {f"model.{name}": given(name, parameter.detach()) for name, parameter in engine.model.named_parameters()}
    moments = {
        f"optimizer.{moment}.{name}": given(name, state) for (moment, name), state in optimizer.moments().items()
    }
    prefix = {kind: f"optimizer.{kind}" for kind in MOMENTS} | {MASTER: "model"}
    away = {
        f"{prefix[kind]}.{name}": Boxed(part, held[name].boxes, torch.Size(rows[name].shape))
        for (kind, name), part in optimizer.on_host().items()
    }
    return weights | moments | away


def run_state(step: int, train: TrainSpec, tokens: int, data: dict[str, Any]) -> dict[str, Any]:
    """The plain values beside the tensors: optimizer step, sequences and tokens consumed, the steps that the schedule was made for, and the
    record of the corpus."""
    samples = step * train.global_batch
    return {"step": step, "samples": samples, "tokens": tokens, "train_steps": train.steps, "data": data}


def load_initial(model: Decoder, spec: ModelSpec, init: str, division: Division = UNDIVIDED) -> None:
    """Start from what `init` names (`checkpoint.initial`), if anything; each rank reads only the rows it holds."""
    with initial_weights(spec, init) as found:
        if found is None:
            return
        for note in found.notes:
            log.warning("%s", note)
        _fill(model, division, found)


@torch.no_grad()
def _fill(model: Decoder, division: Division, weights: Initial) -> None:
    for held in holdings(model, division).values():
        for box in held.boxes:
            values = weights.read_rows(held.row, box.offsets[0], box.offsets[0] + box.sizes[0])
            for dim in range(1, values.dim()):
                values = values.narrow(dim, box.offsets[dim], box.sizes[dim])
            held.local.detach()[box.first_row :][: box.sizes[0]].copy_(values)
