"""This rank's parts of sharded parameters as plain tensors.

Under FSDP2 each parameter is a DTensor. Optimizers and clipping are elementwise, so they use this rank's part directly, which avoids the
cost of DTensor dispatch.
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
    model: nn.Module, duplicate_rows: Mapping[str, Sequence[range]] = MappingProxyType({})
) -> list[torch.Tensor]:
    """This rank's part of every gradient, without `duplicate_rows`: by parameter, the rows that another rank counts."""
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
