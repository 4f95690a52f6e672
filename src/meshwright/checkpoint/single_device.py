"""Loads a model onto one device, for inference and evaluation: no process group, no shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.checkpoint.hf import import_hf
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.verify import newest_checkpoint
from meshwright.config.load import load_resolved
from meshwright.models.decoder import Decoder
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The model in `folder`: a run (its newest good checkpoint), one checkpoint, or a Hugging Face folder.

    Raises BadInput when it is none of these, and Damaged when a checkpoint does not match its manifest.
    """
    if (folder / "config.json").exists():
        spec, weights = import_hf(folder)
        return _build(spec, weights.read, device, dtype)
    checkpoint = newest_checkpoint(folder)
    trained = load_resolved(checkpoint / "config.yaml").model
    with CheckpointReader(checkpoint) as reader:
        return _build(trained, lambda parameter: reader.read(f"model.{parameter.name}"), device, dtype)


def _build(
    spec: ModelSpec, read: Callable[[ParameterSpec], torch.Tensor], device: torch.device, dtype: torch.dtype
) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(dtype).to_empty(device=device)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters(spec):
            weights[parameter.name].copy_(read(parameter))
    return model


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """The device and dtype to use: a GPU in bf16, else the CPU in fp32."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0), torch.bfloat16
    return torch.device("cpu"), torch.float32
