"""The loss of the modules that predict further tokens, added up over a step.

The modules belong to the unit of the head, whose backward runs inside its forward (`parallel.executor`). So no schedule needs to know them,
and their activations exist for one micro-batch at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.models.decoder import HeadLosses
from meshwright.parallel.routing import RoutingStatistics
from meshwright.spec.model import ModelSpec


class PredictionLoss:
    """The loss of a rank's prediction modules in one step, kept on the device.

    The step's loss includes `weight` times the mean over modules of their token losses. Like the loss of next tokens, each is divided by
    the number of valid tokens (DeepSeek-V3, equations 24 and 25).
    """

    def __init__(self, spec: ModelSpec, weight: float, device: torch.device) -> None:
        self._weight = weight
        self._modules = spec.prediction_depth
        self._first_row = spec.layers
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of this rank's part of the mean loss over modules, before the weight."""

    def begin_step(self) -> None:
        """Set the sum to 0."""
        self.loss.zero_()

    def add(self, losses: HeadLosses, valid: Tensor | None, routing: RoutingStatistics | None) -> Tensor:
        """Add a micro-batch's losses; returns their part of the step's loss, with the losses of routers.

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
