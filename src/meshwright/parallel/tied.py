"""Sums the gradients of an embedding that has two copies, on the first and on the last stage of a pipeline.

The last stage has a copy because its head is tied, or because it has modules that predict further tokens.

The sum runs once per step, before the gradient norm. Both copies then get the same update and stay equal. The norm includes only the copy
on the first stage.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class TiedGradientSum:
    """Sums the gradients of the two copies of a sharded weight over `group`, which has one rank of each of the two stages.

    `in_norm` is True on the rank whose copy the gradient norm includes.
    """

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup, in_norm: bool) -> None:
        self._weight = weight
        self._group = group
        self.in_norm = in_norm

    def sum(self) -> None:
        """All-reduce the gradient's shards in place. Collective over the group."""
        assert isinstance(self._weight.grad, DTensor), "a unit's gradients are shards"
        dist.all_reduce(self._weight.grad.to_local(), group=self._group)
