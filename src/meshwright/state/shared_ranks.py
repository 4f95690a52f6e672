"""The ranks that together have all parameters of one pipeline stage of one model copy. Updates of whole matrices need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from meshwright.spec.layout import Box
from meshwright.spec.model import ParameterSpec


@dataclass(frozen=True)
class SharedRanks:
    """The ranks among which the parameters of a pipeline stage are divided.

    `group` is their process group (None: this rank alone), and `index` this rank's index in it. `boxes(parameter)` returns
    the boxes of a parameter that each of these ranks has, by index.
    """

    group: dist.ProcessGroup | None
    index: int
    boxes: Callable[[ParameterSpec], Sequence[tuple[Box, ...]]]

    @classmethod
    def alone(cls) -> SharedRanks:
        """Return the description of a single rank that has all parameters as a whole."""
        return cls(None, 0, lambda parameter: [(Box((0,) * len(parameter.shape), parameter.shape),)])
