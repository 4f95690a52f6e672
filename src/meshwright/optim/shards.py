"""This rank's parts of sharded parameters, as plain tensors.

Under FSDP2 each parameter is a DTensor. Optimizers and clipping work element by element, so they use this rank's part directly and avoid
the overhead of DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`. It shares the memory of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(
    model: nn.Module, duplicate_rows: Mapping[str, Sequence[range]] = MappingProxyType({})
) -> list[torch.Tensor]:
    """Return this rank's part of every gradient, except `duplicate_rows`: rows of parameters that another rank counts."""
    parts: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        part = local(parameter.grad)
        start = 0
        for rows in duplicate_rows.get(name, ()):
            parts.append(part[start : rows.start])
            start = rows.stop
        parts.append(part[start:])
    return parts
