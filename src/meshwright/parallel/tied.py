"""Tied embedding of a pipeline: first and last stage hold equal copies and sum their gradients.

The sum runs once a step, before the norm. Both copies then take the same update and stay equal; the norm counts the
first one only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class TiedSum:
    """Adds the gradients of the two copies of a sharded weight; `in_norm` is true for the copy that the norm includes."""

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup, in_norm: bool) -> None:
        self._weight, self._group = weight, group
        self.in_norm = in_norm

    def sum(self) -> None:
        assert isinstance(self._weight.grad, DTensor), "a unit's gradients are shards"
        dist.all_reduce(self._weight.grad.to_local(), group=self._group)
