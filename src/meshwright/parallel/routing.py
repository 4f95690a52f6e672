"""Statistics of the routers of a step's mixture-of-experts blocks, the weight of their balance losses, and their biases.

A block with experts returns its balance loss beside its output. The executor runs each block as an autograd graph of its own, so it passes
a gradient to both outputs: that of the next block to the output, and `RoutingStatistics.balance_gradient` to the balance loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from meshwright.models.moe import RoutedOutput
from meshwright.spec.model import ModelSpec


class RoutingStatistics:
    """Sums over one rank's micro-batches of one step, kept on the device. Forwards add to them; recomputed forwards do not.

    `weight` is the coefficient of the balance loss, and `global_batch` the number of sequences in a step over all ranks: the step's loss
    includes `weight` times the mean balance loss of these sequences. `biases` has by layer those that this rank's routers add to the scores
    that choose experts `(experts,)`; `bias_step` is how far an update moves each.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weight: float,
        global_batch: int,
        device: torch.device,
        *,
        biases: Mapping[int, torch.Tensor] = MappingProxyType({}),
        bias_step: float = 0.0,
    ) -> None:
        self.balance_gradient = weight / global_batch
        """Gradient of the step's loss with respect to the balance loss of each sequence and layer."""
        layers = spec.layers + spec.prediction_depth
        self._routed_layers = sum(spec.routed(layer) for layer in range(layers))
        self._global_batch, self._biases, self._bias_step = global_batch, biases, bias_step
        self.sums = torch.zeros(layers, 1 + spec.experts, dtype=torch.float64, device=device)
        """`(layers, 1 + experts)`: by layer the sum of balance losses, then the number of tokens of each expert.

        Prediction modules follow the layers.
        """

    def begin_step(self) -> None:
        """Set all sums to 0."""
        self.sums.zero_()

    def add(self, layer: int, routed: RoutedOutput) -> None:
        """Add the balance loss and the expert loads of one block's forward."""
        self.sums[layer, 0] += routed.balance.detach()
        self.sums[layer, 1:] += routed.load

    @torch.no_grad()
    def update_biases(self, skip: torch.Tensor) -> None:
        """Move each expert's bias up if it has fewer tokens than the mean, down if more; to be called once `sums` are summed.

        Nothing moves where `skip`, a boolean on the device, is true. All ranks with a layer compute the same biases. Source: Wang et al.
        2024, Auxiliary-loss-free load balancing.
        """
        if self._bias_step:
            load = self.sums[:, 1:]
            direction = (load.mean(1, keepdim=True) - load).sign() * self._bias_step * ~skip
            for layer, bias in self._biases.items():
                bias += direction[layer]

    def figures(self) -> torch.Tensor:
        """The mean balance loss, and the load of the busiest expert over the mean load, in the layer where it is largest.

        `(2,)`; to be called once `sums` are summed over all ranks. Both are 1 if every expert has the same number of tokens.
        """
        load = self.sums[:, 1:]
        busiest = (load.amax(1) / load.mean(1).clamp_min(1)).amax()
        return torch.stack([self.sums[:, 0].sum() / (self._routed_layers * self._global_batch), busiest])
