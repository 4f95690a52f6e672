"""Exponential moving average of a rank's shards of the weights. It is updated after the optimizer has updated a group of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.optim.fused import UpdateInputs
from meshwright.optim.rule import unless_skipped


class WeightAverage:
    """Averages of `weights`, in the weights' dtype. After each update, average = decay × average + (1 − decay) × weight."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._weights = dict(weights)
        self._decay = decay
        self.tensors = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        """The averages by parameter name; this memory changes with each update."""

    @torch.no_grad()
    def start(self) -> None:
        """Set the averages to the weights."""
        for name, weight in self._weights.items():
            self.tensors[name].copy_(weight)

    @torch.no_grad()
    def update(self, names: Sequence[str], inputs: UpdateInputs) -> None:
        """Move the averages of `names` towards the weights. If the step is skipped, nothing changes."""
        for name in names:
            average = self.tensors[name]
            average.lerp_(self._weights[name], unless_skipped(1 - self._decay, 0.0, inputs, average.dtype))
