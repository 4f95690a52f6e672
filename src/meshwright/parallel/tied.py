"""One weight at both ends of a pipeline: the ranks of the first and the last stage hold equal copies and add their gradients.

The sum runs once a step, before the norm. Both copies then take the same update and stay equal; the norm counts the first one only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


class TiedSum:
    """Adds the two ends' gradient of one weight. `gradient` gives this rank's shard of it; `counts` says whose copy the norm takes."""

    def __init__(self, gradient: Callable[[], torch.Tensor], group: dist.ProcessGroup, counts: bool) -> None:
        self._gradient, self._group = gradient, group
        self.counts = counts

    def sum(self) -> None:
        dist.all_reduce(self._gradient(), group=self._group)
