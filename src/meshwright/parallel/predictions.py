"""The loss of the prediction modules (which predict further tokens), added up over a step.

The modules belong to the unit of the head: their parameters are gathered and reduced together with the head's. The backward of the head
runs inside its forward (`parallel.executor`), and so does the backward of the modules. So schedules need not know the modules, and their
activations exist for one micro-batch at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.models.decoder import HeadLosses
from meshwright.parallel.routing import RoutingStatistics
from meshwright.spec.model import ModelSpec


class PredictionLoss:
    """The loss of a rank's prediction modules in one step, kept on the device.

    The loss of a step includes `weight` times the mean over modules of the modules' losses. The loss of a module is a sum over tokens,
    divided by the number of valid tokens as the next-token loss is (DeepSeek-V3, equations 24 and 25).
    """

    def __init__(self, spec: ModelSpec, weight: float, device: torch.device) -> None:
        self._weight = weight
        self._modules = spec.prediction_depth
        self._first_row = spec.layers
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        """This rank's share of the mean loss over modules, not yet multiplied by the weight."""

    def begin_step(self) -> None:
        """Start a step: set the loss to 0."""
        self.loss.zero_()

    def add(self, losses: HeadLosses, valid: Tensor | None, routing: RoutingStatistics | None) -> Tensor:
        """Add the losses of a micro-batch. Returns what they add to the step's loss, including the losses of the modules' routers.

        Losses are divided by `valid`, the number of valid tokens over all ranks, or summed if it is None.
        """
        mean = losses.further / self._modules
        mean = mean if valid is None else mean / valid.to(mean.dtype)
        self.loss += mean.detach()
        total = self._weight * mean
        for depth, routed in enumerate(losses.routed if routing is not None else ()):
            assert routing is not None
            routing.add(self._first_row + depth, routed)
            if (loss := routing.weighted_loss(routed)) is not None:
                total = total + loss
        return total
