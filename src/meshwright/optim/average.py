"""The exponential moving average of a rank's shards of the weights, updated after each group of the optimizer's update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.optim.fused import UpdateInputs
from meshwright.optim.rule import unless_skipped


class WeightAverage:
    """Averages of `weights` in their dtype: average = decay × average + (1 − decay) × weight after each update."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._weights = dict(weights)
        self._decay = decay
        self.tensors = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        """The averages by parameter, as live memory."""

    @torch.no_grad()
    def start(self) -> None:
        """Set the averages to the weights."""
        for name, weight in self._weights.items():
            self.tensors[name].copy_(weight)

    @torch.no_grad()
    def update(self, names: Sequence[str], inputs: UpdateInputs) -> None:
        """Move the averages of `names` towards the weights; a skipped step changes nothing."""
        for name in names:
            average = self.tensors[name]
            average.lerp_(self._weights[name], unless_skipped(1 - self._decay, 0.0, inputs, average.dtype))
