"""What the routers of a step did, summed on the device; and how much their balance losses weigh against the tokens'.

A block with experts hands out its balance loss beside its output. The executor runs every unit as a graph of its own, so it gives both
outputs their gradients by hand, and no trick is needed to join a loss that arises in the middle of the model to the one at its end.
"""

from __future__ import annotations

import torch

from meshwright.models.moe import RoutedOutput
from meshwright.spec.model import ModelSpec


class Routing:
    """Sums over one rank's micro-batches of one step. Taken when a block runs forward, so recompute does not count again.

    `weight` is the balance loss's coefficient and `global_batch` the step's sequences: the loss is a mean over them, whoever has them.
    """

    def __init__(self, spec: ModelSpec, weight: float, global_batch: int, device: torch.device) -> None:
        self.slope = weight / global_batch
        self._mixtures = sum(spec.routed(layer) for layer in range(spec.layers))
        self._sequences = global_batch
        self.sums = torch.zeros(spec.layers, 1 + spec.experts, dtype=torch.float64, device=device)
        """By layer: the balance losses, then the tokens of each expert."""

    def begin_step(self) -> None:
        self.sums.zero_()

    def add(self, layer: int, routed: RoutedOutput) -> None:
        self.sums[layer, 0] += routed.balance.detach()
        self.sums[layer, 1:] += routed.load

    def figures(self) -> torch.Tensor:
        """[mean balance loss, tokens of the busiest expert over its layer's mean, in the worst layer] from sums over all ranks.

        Both are 1 if every expert has the same number of tokens.

        Both are 1 when every expert has as many tokens as any other.
        """
        load = self.sums[:, 1:]
        busiest = (load.amax(1) / load.mean(1).clamp_min(1)).amax()
        return torch.stack([self.sums[:, 0].sum() / (self._mixtures * self._sequences), busiest])
