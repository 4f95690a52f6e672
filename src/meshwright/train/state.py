"""What a run must carry over a stop: weights, moments, and a few integers.

Learning rate and data order are functions of the step, and nothing is drawn at random, so there is no other state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.boxed import Boxed
from meshwright.checkpoint.hf import import_hf
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.verify import newest_checkpoint
from meshwright.models.decoder import Decoder
from meshwright.optim.adamw import AdamW
from meshwright.optim.fused import MOMENTS
from meshwright.optim.host import MASTER
from meshwright.parallel.apply import Engine, holding, holdings
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import UNDIVIDED, Division
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters

log = logging.getLogger("meshwright")

ReadRows = Callable[[ParameterSpec, int, int], torch.Tensor]
"""Rows [first, last) of dimension 0 of a parameter."""


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


def run_state(step: int, global_batch: int, tokens: int) -> dict[str, Any]:
    """The integers beside the tensors: optimizer step, sequences and tokens consumed."""
    return {"step": step, "samples": step * global_batch, "tokens": tokens}


def load_initial(model: Decoder, spec: ModelSpec, init: str, division: Division = UNDIVIDED) -> None:
    """Start from `hf:DIR` or `checkpoint:DIR`; each rank reads only the rows it holds.

    Raises BadInput when the folder's weights are not this model's.
    """
    kind, _, folder = init.partition(":")
    if kind == "hf":
        _fill(model, division, _hf_rows(Path(folder), spec))
    elif kind == "checkpoint":
        with CheckpointReader(newest_checkpoint(Path(folder), contents=False)) as reader:
            names = reader.names("model.")
            _check_shapes(init, spec, {name.removeprefix("model."): reader.tensors[name].shape for name in names})
            _fill(model, division, lambda row, first, last: reader.read_rows(f"model.{row.name}", first, last))


@torch.no_grad()
def _fill(model: Decoder, division: Division, read_rows: ReadRows) -> None:
    for held in holdings(model, division).values():
        for box in held.boxes:
            values = read_rows(held.row, box.offsets[0], box.offsets[0] + box.sizes[0])
            for dim in range(1, values.dim()):
                values = values.narrow(dim, box.offsets[dim], box.sizes[dim])
            held.local.detach()[box.first_row :][: box.sizes[0]].copy_(values)


def _hf_rows(folder: Path, spec: ModelSpec) -> ReadRows:
    found, reader = import_hf(folder)
    for note in reader.notes:
        log.warning("%s: %s", folder, note)
    _check_shapes(f"hf:{folder}", spec, {row.name: row.shape for row in parameters(found)})
    return reader.read_rows


def _check_shapes(init: str, spec: ModelSpec, theirs: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadInput for the first weight that only one side has, or that has another shape."""
    ours = {row.name: row.shape for row in parameters(spec)}
    wrong = next((name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)), None)
    if wrong is not None:
        there, here = theirs.get(wrong, "missing"), ours.get(wrong, "missing")
        raise BadInput(f"model.init {init}: {wrong} is {there} there and {here} in this run's model")
