"""Losses that are functions of log-probabilities, such as those of preferences and of reinforcement learning.

The gradient of a token has a factor that may depend on the log-probabilities of its whole sequence. So the head runs twice for each
micro-batch: first it computes the log-probabilities, of which the objective makes its loss; then the gradients, with one number for each
token. That is one matmul of the head more than the loss of next tokens needs.

An objective sees whole sequences on every rank, so that it needs no collectives: each tensor rank has the log-probabilities of all tokens,
and context ranks gather them.
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
    """A loss of the log-probabilities of targets, summed over a micro-batch.

    The step's loss is the sum over all micro-batches of all ranks, divided by the sum of their counts, for any layout.
    """

    by_sequence: bool
    """Whether a token's part depends on other tokens of its sequence, which hybrid ranks may divide."""

    def count(self, batch: MicroBatch) -> float | Tensor:
        """What a micro-batch adds to the divisor: its tokens, sequences or pairs. A tensor is a scalar on the batch's device."""
        ...

    def loss(self, log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        """The summed loss, a scalar differentiable by `log_probabilities` `(batch, seq)`, fp32 or fp64, 0 where targets are -1.

        `batch` is the micro-batch with its whole sequences, on the device; its `columns` have what the loader added for the objective.
        """
        ...


class StepObjective(NamedTuple):
    """The objective of a step, and the number of all ranks by which its loss is divided, a scalar on the device."""

    objective: Objective
    divisor: Tensor


def losses_of_batches(
    step: StepObjective, batches: Sequence[MicroBatch], rank_model: StageModel, valid: Tensor | None
) -> list[OfLogProbabilities]:
    """For each micro-batch of whole sequences the function of this rank's log-probabilities that the head calls.

    Its results are multiplied by `valid` / `step.divisor`, because the executor divides all sums by `valid`. Only the first of the tensor
    and context ranks that divide a sequence returns its loss. Raises BadInput for losses of sequences on hybrid ranks.
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
