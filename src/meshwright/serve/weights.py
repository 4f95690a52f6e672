"""Loads newer weights of the same model into an engine's model, in place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch

from meshwright.checkpoint.models.hf import CPU
from meshwright.checkpoint.models.stored_model import StoredModel, open_model
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

UNUSED_FIELDS = ("init_std",)
"""Fields of `ModelSpec` that do not change what a model computes."""


def open_newer(
    folder: Path, *, predictions: int = 0, device: torch.device = CPU
) -> AbstractContextManager[StoredModel]:
    """Open the model in `folder`: a run (its newest checkpoint), one checkpoint, or a Hugging Face folder.

    `predictions` and `device` are passed to `open_model`. A checkpoint is chosen by the names and sizes of its files.
    If its contents turn out to be damaged, an older checkpoint does not replace it.
    """
    return open_model(folder, contents=False, predictions=predictions, device=device)


def check_same_model(spec: ModelSpec, stored: ModelSpec, folder: Path) -> None:
    """Raise BadInput unless both specs describe the same model. The error names the first field that differs."""
    for name in ModelSpec.__dataclass_fields__:
        ours = getattr(spec, name)
        theirs = getattr(stored, name)
        if ours != theirs and name not in UNUSED_FIELDS:
            raise BadInput(f"{folder} has the weights of another model: model.{name} is {theirs}, expected {ours}")
