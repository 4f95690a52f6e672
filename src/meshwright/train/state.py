"""What a run must carry over a stop: weights, moments, and a few integers.

Learning rate and data order are functions of the step, and nothing is drawn at random, so there is no other state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.checkpoint.hf import import_hf
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.optim.adamw import AdamW
from meshwright.parallel.apply import local_rows
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec, parameters


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights by checkpoint name."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def run_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Weights and moments by checkpoint name."""
    return model_tensors(model) | {f"optimizer.{name}": tensor for name, tensor in optimizer.tensors().items()}


def run_state(step: int, global_batch: int, tokens: int) -> dict[str, Any]:
    """The integers beside the tensors: optimizer step, sequences and tokens consumed."""
    return {"step": step, "samples": step * global_batch, "tokens": tokens}


def load_initial(model: nn.Module, spec: ModelSpec, init: str) -> None:
    """Start from `hf:DIR` or `checkpoint:DIR`; each rank reads only the rows it holds.

    Raises BadInput when the folder's weights are not this model's.
    """
    kind, _, folder = init.partition(":")
    if kind == "scratch":
        return
    read_rows = _hf_rows(Path(folder), spec) if kind == "hf" else _checkpoint_rows(Path(folder))
    rows = {row.name: row for row in parameters(spec)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part, first = local_rows(parameter)
            if part.numel():
                part.copy_(read_rows(rows[name], first, first + part.shape[0]))


def _hf_rows(folder: Path, spec: ModelSpec) -> Any:
    found, reader = import_hf(folder)
    ours = {row.name: row.shape for row in parameters(spec)}
    theirs = {row.name: row.shape for row in parameters(found)}
    wrong = next((name for name in ours if ours[name] != theirs.get(name)), None)
    if wrong is not None:
        raise BadInput(
            f"model.init hf:{folder}: {wrong} is {theirs.get(wrong)} there and {ours[wrong]} in this run's model"
        )
    return reader.read_rows


def _checkpoint_rows(folder: Path) -> Any:
    reader = CheckpointReader(folder)
    return lambda row, first, last: reader.read_rows(f"model.{row.name}", first, last)
