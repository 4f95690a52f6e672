"""Sums the gradients of an embedding with one copy on the first and one on the last stage of a pipeline.

The last stage has it for a tied head or for modules that predict further tokens.

The sum runs once a step, before the gradient norm. Both copies then get the same update and stay equal; the norm
includes the first copy only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class TiedGradientSum:
    """Sums the gradients of the two copies of a sharded weight over `group`, which has one rank of each stage.

    `in_norm` is true on the rank whose copy the gradient norm includes.
    """

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup, in_norm: bool) -> None:
        self._weight = weight
        self._group = group
        self.in_norm = in_norm

    def sum(self) -> None:
        """All-reduce the gradient's shards in place. Collective over the group."""
        assert isinstance(self._weight.grad, DTensor), "a unit's gradients are shards"
        dist.all_reduce(self._weight.grad.to_local(), group=self._group)
