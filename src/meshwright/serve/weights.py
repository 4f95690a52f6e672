"""Replaces the weights of an engine's model by newer ones of the same model, in place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch

from meshwright.checkpoint.models.hf import CPU
from meshwright.checkpoint.models.stored_model import StoredModel, open_model
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

UNUSED_FIELDS = ("init_std",)
"""Dimensions that do not change what a model computes."""


def open_newer(
    folder: Path, *, predictions: int = 0, device: torch.device = CPU
) -> AbstractContextManager[StoredModel]:
    """The model in `folder`: a run (its newest checkpoint), one checkpoint, or a Hugging Face folder; the others as of `open_model`.

    An older checkpoint does not stand in for a damaged one.
    """
    return open_model(folder, contents=False, predictions=predictions, device=device)


def check_same_model(spec: ModelSpec, stored: ModelSpec, folder: Path) -> None:
    """Raise BadInput, which names the first dimension that differs, unless both describe the same model."""
    for name in ModelSpec.__dataclass_fields__:
        ours = getattr(spec, name)
        theirs = getattr(stored, name)
        if ours != theirs and name not in UNUSED_FIELDS:
            raise BadInput(f"{folder} has the weights of another model: model.{name} is {theirs}, expected {ours}")
