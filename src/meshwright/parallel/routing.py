"""Statistics of the routers of a step's MoE blocks, the weights of their losses, and their biases.

A block with experts returns the sums of its router's losses beside its output. The executor runs each block as an autograd graph of its
own, so it starts a backward from both: the output with the gradient of the next block, and `RoutingStatistics.weighted_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from meshwright.models.moe import RoutedOutput
from meshwright.spec.model import ModelSpec


class RoutingStatistics:
    """Sums over one rank's micro-batches of one step, kept on the device. Forwards add to them; recomputed forwards do not.

    `weight` is the coefficient of the balance loss, and `data_ranks` the number of ranks that have different sequences: the step's loss
    includes `weight` times the mean balance loss of all their sequences, or of samples or sequences weighted by counted tokens, and for
    each layer `z_loss` times the mean squared log-sum-exp of the router logits of all their tokens. `biases` has by layer the biases
    `(experts,)` that this rank's routers add to the scores that choose experts; an update moves each bias by `bias_step`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weight: float,
        data_ranks: int,
        device: torch.device,
        *,
        biases: Mapping[int, torch.Tensor] = MappingProxyType({}),
        bias_step: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        layers = spec.layers + spec.prediction_depth
        self._weight = weight
        self._z_loss = z_loss
        self._sequences: int | torch.Tensor = 1
        self._tokens: int | torch.Tensor = 1
        self._routed_layers = sum(spec.routed(layer) for layer in range(layers))
        self._data_ranks = data_ranks
        self._biases = biases
        self._bias_step = bias_step
        self.choose: Callable[[int, int | None], None] | None = None
        """Called before a block's forward with its layer and micro-batch, or None outside of training (`ReplayedRouting`)."""
        self.sums = torch.zeros(layers, 2 + spec.experts, dtype=torch.float64, device=device)
        """`(layers, 2 + experts)`: by layer the sums of balance losses and of squares, then the number of tokens of each expert.

        Prediction modules follow the layers.
        """

    def begin_step(self, sequences: int, seq: int, counted: torch.Tensor | None = None) -> None:
        """Set all sums to 0, for a step of `sequences` on this rank of `seq` tokens each, of which `counted` (default: all) count.

        If some tokens do not count, balance losses are per sample, multiplied by the sample's counted tokens.
        """
        self._sequences = self._data_ranks * sequences if counted is None else counted
        self._tokens = self._data_ranks * sequences * seq if counted is None else counted
        self.sums.zero_()

    def add(self, layer: int, routed: RoutedOutput) -> None:
        """Add the losses and the expert loads of one block's forward."""
        self.sums[layer, 0] += routed.balance.detach()
        if self._z_loss:
            self.sums[layer, 1] += routed.squares.detach()
        self.sums[layer, 2:] += routed.load

    def weighted_loss(self, routed: RoutedOutput) -> torch.Tensor | None:
        """Return a block's router losses, weighted as in the step's loss; None if no router loss has a weight."""
        terms = [(routed.balance, self._weight, self._sequences), (routed.squares, self._z_loss, self._tokens)]
        weighted = [term * (weight / count) for term, weight, count in terms if weight]
        return sum(weighted[1:], weighted[0]) if weighted else None

    @torch.no_grad()
    def update_biases(self, skip: torch.Tensor) -> None:
        """Move each expert's bias up if it has fewer tokens than the mean, down if more; to be called once `sums` are summed.

        Nothing moves where `skip`, a boolean on the device, is true. All ranks with a layer compute the same biases. Source: Wang et al.
        2024, Auxiliary-loss-free load balancing.
        """
        if self._bias_step:
            load = self.sums[:, 2:]
            direction = (load.mean(1, keepdim=True) - load).sign() * self._bias_step * ~skip
            for layer, bias in self._biases.items():
                bias += direction[layer]

    def loads(self) -> torch.Tensor:
        """Number of tokens of each expert, `(layers with experts, experts)`; to be called once `sums` are summed over all ranks."""
        return self.sums[-self._routed_layers :, 2:].clone()  # dense layers come first

    def figures(self) -> torch.Tensor:
        """The mean balance loss, the load of the busiest expert over the mean load, the mean square.

        `(3,)`; to be called once `sums` are summed over all ranks. The first two are 1 if every expert has the same number of tokens; the
        second is that of the layer where it is largest.
        """
        load = self.sums[:, 2:]
        busiest = (load.amax(1) / load.mean(1).clamp_min(1)).amax()
        balance, squares = self.sums[:, :2].sum(0) / self._routed_layers
        return torch.stack([balance / self._sequences, busiest, squares / self._tokens])
