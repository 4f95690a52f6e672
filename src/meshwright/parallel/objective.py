"""Losses that are functions of log-probabilities, such as those of preference training and of reinforcement learning.

The gradient of a token's logits is the gradient of its log-probability times a factor, the derivative of the loss with respect to this
log-probability. The factor may depend on the log-probabilities of the whole sequence. So the head runs twice for each micro-batch. First it
computes the log-probabilities, from which the objective computes the loss and the factors. Then it computes the gradients with one factor
for each token. The next-token loss needs no first pass, so an objective costs one more matmul of the head.

An objective sees whole sequences on every rank and therefore needs no collectives: each tensor rank has the log-probabilities of all
tokens, and context ranks gather them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.data.loader import MicroBatch
from meshwright.models.decoder import OfLogProbabilities
from meshwright.parallel.context import SplitSequences
from meshwright.parallel.hybrid import DividedSamples
from meshwright.parallel.stages import StageModel
from meshwright.spec.errors import BadInput


class Objective(Protocol):
    """A loss that is a function of the log-probabilities of the targets, summed over a micro-batch.

    The loss of a step is the sum over all micro-batches of all ranks, divided by the sum of their `count`s. It does not depend on the
    layout.
    """

    by_sequence: bool
    """Whether the loss of a token depends on other tokens of its sequence. Such a loss needs whole sequences on each rank."""

    def count(self, batch: MicroBatch) -> float | Tensor:
        """Return what the micro-batch adds to the divisor of the loss, for example its tokens, sequences or pairs.

        If it is a tensor, it is a scalar on the device of the batch.
        """
        ...

    def loss(self, log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss, a scalar that is differentiable with respect to `log_probabilities`.

        `log_probabilities` `(batch, seq)` are fp32 or fp64, and 0 where targets are -1. `batch` is the micro-batch with its whole
        sequences, on the device. Its `columns` have what the loader added for the objective.
        """
        ...


class StepObjective(NamedTuple):
    """The objective of a step, and the divisor of its loss: the sum of `count` over all ranks, a scalar on the device."""

    objective: Objective
    divisor: Tensor


def losses_of_batches(
    step: StepObjective, batches: Sequence[MicroBatch], rank_model: StageModel, valid: Tensor | None
) -> list[OfLogProbabilities]:
    """For each micro-batch of whole sequences, return the function that the head calls with this rank's log-probabilities.

    The function multiplies loss and factors by `valid` / `step.divisor`, because the executor divides all losses by `valid`. Several tensor
    and context ranks compute the loss of the same sequence; only the first of them returns it, the others return 0. Raises BadInput if a
    loss needs whole sequences and the plan has hybrid ranks, which divide sequences.
    """
    context = rank_model.context
    if step.objective.by_sequence and isinstance(context, DividedSamples):
        raise BadInput("plan.hybrid: expected no hybrid ranks with a loss of whole sequences, which these ranks divide")
    scale = (1.0 if valid is None else valid) / step.divisor
    is_first = rank_model.tensor.index == 0 and not (isinstance(context, SplitSequences) and not context.is_first)
    return [_of_batch(step.objective, batch, context, scale, is_first) for batch in batches]


def _of_batch(
    objective: Objective,
    batch: MicroBatch,
    context: SplitSequences | DividedSamples | None,
    scale: Tensor,
    is_first: bool,
) -> OfLogProbabilities:
    def loss_and_factors(local: Tensor) -> tuple[Tensor, Tensor]:
        whole = local if context is None else context.gather_tokens(local)
        with torch.enable_grad():
            values = whole.detach().requires_grad_()
            loss = objective.loss(values, batch)
            values_grad = torch.autograd.grad(loss, values)[0] if loss.requires_grad else torch.zeros_like(values)
        factors = values_grad * -scale.to(values_grad.dtype)
        loss = loss.detach() * scale.to(loss.dtype) if is_first else torch.zeros_like(loss)
        return loss, factors if context is None else context.local_tokens(factors)

    return loss_and_factors
