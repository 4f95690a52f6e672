"""A model's sharded parameters as the plain tensors an optimizer works on.

FSDP2 keeps each parameter as a DTensor. Optimizers and clipping work element by element, so they take this rank's part directly and pay
nothing for dispatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(
    model: nn.Module, copied: Mapping[str, Sequence[range]] = MappingProxyType({})
) -> list[torch.Tensor]:
    """This rank's part of every gradient that is there, but for the rows that `copied` lists by parameter."""
    counted: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        part, start = local(parameter.grad), 0
        for rows in copied.get(name, ()):
            counted.append(part[start : rows.start])
            start = rows.stop
        counted.append(part[start:])
    return counted
