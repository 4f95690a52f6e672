"""A model's sharded parameters as the plain tensors an optimizer works on.

FSDP2 keeps each parameter as a DTensor. Optimizers and clipping work element by element, so they take this rank's part directly and pay
nothing for dispatch; a tensor that leaves (for a checkpoint) is wrapped back with its parameter's layout.
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


def like(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """`part` laid out as `whole` is: a DTensor when `whole` is one. Shares memory, communicates nothing."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


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
