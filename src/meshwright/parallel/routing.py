"""Statistics of the routers of a step's MoE blocks, the weights of the routers' losses, and the routers' biases.

A block with experts returns the sums of its router's losses in addition to its output. The executor runs each block as an autograd graph of
its own. It therefore starts the block's backward from two tensors: the output, with the gradient from the next block, and the result of
`RoutingStatistics.weighted_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from meshwright.models.moe import RoutedOutput
from meshwright.spec.model import ModelSpec


class RoutingStatistics:
    """Sums over one rank's micro-batches of one step, kept on the device. Recomputed forwards are not added again.

    The router losses in the loss of a step are:

    - `weight` times the mean balance loss of all sequences on all `data_ranks` ranks. If only some tokens count, it is the mean over
      samples or sequences, weighted by their counted tokens.
    - for each layer, `z_loss` times the mean over tokens of the squared log-sum-exp of the router logits.

    `data_ranks` is the number of ranks that have different sequences. `biases` has, for each layer on this rank, the biases `(experts,)`
    that are added to the scores when a router chooses experts. An update moves each bias by `bias_step`.
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
        """Called before a block's forward with the layer and the micro-batch's number (None outside training); see `ReplayedRouting`."""
        self.sums = torch.zeros(layers, 2 + spec.experts, dtype=torch.float64, device=device)
        """`(layers, 2 + experts)`. Each row has the sum of balance losses, the sum of squares, and the number of tokens of each expert.

        The rows of prediction modules follow the rows of the layers.
        """

    def begin_step(self, sequences: int, seq: int, counted: torch.Tensor | None = None) -> None:
        """Set all sums to 0 at the start of a step with `sequences` sequences of `seq` tokens on this rank.

        `counted` is the number of tokens over all ranks that count; None means all. If only some count, the balance loss of a sample is
        multiplied by its number of counted tokens.
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
        """Return the sum of a block's router losses with the weights of the step's loss; None if no router loss has a weight."""
        terms = [(routed.balance, self._weight, self._sequences), (routed.squares, self._z_loss, self._tokens)]
        weighted = [term * (weight / count) for term, weight, count in terms if weight]
        return sum(weighted[1:], weighted[0]) if weighted else None

    @torch.no_grad()
    def update_biases(self, skip: torch.Tensor) -> None:
        """Move the bias of each expert up if the expert has fewer tokens than the mean, and down if it has more.

        Call it once `sums` are summed over all ranks. Nothing moves if `skip`, a boolean on the device, is true. All ranks with a layer
        compute the same biases. Source: Wang et al. 2024, Auxiliary-loss-free load balancing.
        """
        if self._bias_step:
            load = self.sums[:, 2:]
            direction = (load.mean(1, keepdim=True) - load).sign() * self._bias_step * ~skip
            for layer, bias in self._biases.items():
                bias += direction[layer]

    def loads(self) -> torch.Tensor:
        """Return the number of tokens of each expert, `(layers with experts, experts)`. Call it once `sums` are summed over all ranks."""
        return self.sums[-self._routed_layers :, 2:].clone()  # dense layers come first

    def figures(self) -> torch.Tensor:
        """Return three figures `(3,)`. Call it once `sums` are summed over all ranks.

        1. the mean balance loss;
        2. the load of the busiest expert divided by the mean load, in the layer where this ratio is largest;
        3. the mean squared log-sum-exp of router logits.

        The first two are 1 if every expert has the same number of tokens.
        """
        load = self.sums[:, 2:]
        busiest = (load.amax(1) / load.mean(1).clamp_min(1)).amax()
        balance, squares = self.sums[:, :2].sum(0) / self._routed_layers
        return torch.stack([balance / self._sequences, busiest, squares / self._tokens])
