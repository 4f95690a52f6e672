"""Statistics of the routers of a step's mixture-of-experts blocks, and the weight of their balance losses.

A block with experts returns its balance loss beside its output. The executor runs each block as an autograd graph of its own, so it passes
a gradient to both outputs: that of the next block to the output, and `RoutingStatistics.balance_gradient` to the balance loss.
"""

from __future__ import annotations

import torch

from meshwright.models.moe import RoutedOutput
from meshwright.spec.model import ModelSpec


class RoutingStatistics:
    """Sums over one rank's micro-batches of one step, kept on the device. Forwards add to them; recomputed forwards do not.

    `weight` is the coefficient of the balance loss, and `global_batch` the number of sequences in a step over all ranks: the step's loss
    includes `weight` times the mean balance loss of these sequences.
    """

    def __init__(self, spec: ModelSpec, weight: float, global_batch: int, device: torch.device) -> None:
        self.balance_gradient = weight / global_batch
        """Gradient of the step's loss with respect to the balance loss of each sequence and layer."""
        self._routed_layers = sum(spec.routed(layer) for layer in range(spec.layers))
        self._global_batch = global_batch
        self.sums = torch.zeros(spec.layers, 1 + spec.experts, dtype=torch.float64, device=device)
        """`(layers, 1 + experts)`: by layer the sum of balance losses, then the number of tokens of each expert."""

    def begin_step(self) -> None:
        """Set all sums to 0."""
        self.sums.zero_()

    def add(self, layer: int, routed: RoutedOutput) -> None:
        """Add the balance loss and the expert loads of one block's forward."""
        self.sums[layer, 0] += routed.balance.detach()
        self.sums[layer, 1:] += routed.load

    def figures(self) -> torch.Tensor:
        """The mean balance loss, and the load of the busiest expert over the mean load, in the layer where it is largest.

        `(2,)`; to be called once `sums` are summed over all ranks. Both are 1 if every expert has the same number of tokens.
        """
        load = self.sums[:, 1:]
        busiest = (load.amax(1) / load.mean(1).clamp_min(1)).amax()
        return torch.stack([self.sums[:, 0].sum() / (self._routed_layers * self._global_batch), busiest])
