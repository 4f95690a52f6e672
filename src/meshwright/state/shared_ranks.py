"""The ranks that together hold the parameters of one pipeline stage of one model copy, for updates of whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from meshwright.spec.layout import Box
from meshwright.spec.model import ParameterSpec


@dataclass(frozen=True)
class SharedRanks:
    """The process group of these ranks (None: this rank alone), this rank's index in it, and the boxes of each rank by index."""

    group: dist.ProcessGroup | None
    index: int
    boxes: Callable[[ParameterSpec], Sequence[tuple[Box, ...]]]

    @classmethod
    def alone(cls) -> SharedRanks:
        """Return the description of a single rank that has all parameters whole."""
        return cls(None, 0, lambda parameter: [(Box((0,) * len(parameter.shape), parameter.shape),)])
