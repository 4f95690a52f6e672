"""Loads a model onto one device, for inference and evaluation, without a process group and without shards."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from meshwright.checkpoint.models.stored_model import check_head, open_model
from meshwright.models.decoder import Decoder


def load_model(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    predictions: int = 0,
    contents: bool = True,
    adapter: Path | None = None,
    scores: bool | None = False,
) -> Decoder:
    """Return the model in `folder`: a run (its newest good checkpoint), one checkpoint, or a Hugging Face folder.

    The model has at most `predictions` of the stored modules that predict further tokens. `contents` and `adapter` are those
    of `open_model`. `scores`: True expects a reward model, False a language model, None accepts both.

    Raises BadInput if the folder has another kind of model, and Damaged if a checkpoint does not match its manifest.
    """
    with open_model(folder, contents=contents, predictions=predictions, adapter=adapter) as stored:
        if scores is not None:
            check_head(stored.spec, folder, scores=scores)
        with torch.device("meta"):
            model = Decoder(stored.spec)
        allocate(model.to(dtype), device)
        stored.copy_to(model)
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of `model`, which are on the meta device, uninitialised memory on `device`.

    `Module.to_empty` does the same, but imports symbolic shapes and SymPy, which adds a second to a server's start.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype to use: a GPU in bf16 if there is one, else the CPU in fp32."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0), torch.bfloat16
    return torch.device("cpu"), torch.float32
