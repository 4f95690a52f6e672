"""Losses of reinforcement learning, as functions of log-probabilities; each token's part depends on that token alone.

`values` are the trainer's log-probabilities of the sampled tokens, `sampled` those with which the engine drew them, and `advantages` one
number for each token, that of its answer. All are `(batch, seq)`. Each function returns a token's loss, whose gradient by `values` is
−advantage · ratio where the ratio of the two probabilities has not been clipped.

Example: an answer with advantage 2 whose token has probability 0.24 now and had 0.20 has a ratio of 1.2. The gradient of `clipped_loss`
with bounds 0.2 and 0.2 is −2.4 up to there and 0 beyond: the token is likely enough for one update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.data.loader import MicroBatch
from meshwright.spec.rl import Estimator, Policy, RlSpec

CLIPS: Mapping[Policy, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "cispo": (1.0, 4.0),
    "rloo": (1.0, math.inf),
}
"""Largest fall and rise of a probability by default: cispo's of MiniMax-M1 (2025) and ScaleRL (Khatri et al. 2025); rloo has none."""


def clipped_loss(ratio: Tensor, advantages: Tensor, below: float, above: float) -> Tensor:
    """The lower of ratio · advantage and the same with the ratio limited to 1 − below … 1 + above, negated (Schulman et al. 2017)."""
    limited = ratio.clamp(1 - below, 1 + above)
    return -torch.minimum(ratio * advantages, limited * advantages)


def factored_loss(values: Tensor, ratio: Tensor, advantages: Tensor, cap: float) -> Tensor:
    """−log π · advantage, times the ratio up to `cap` as a number without gradient (CISPO): no token loses its gradient."""
    return -ratio.detach().clamp(max=cap) * advantages * values


def kl_of_tokens(values: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """An estimate of the divergence from the reference for each token that was sampled from the model."""
    difference = values - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def correction_factors(values: Tensor, sampled: Tensor, rl: RlSpec) -> Tensor:
    """Factors for tokens that the engine sampled with another probability than the trainer computes; without gradient.

    `truncate`: the ratio, at most the upper bound (Yao et al. 2025). `mask`: 1 within the bounds and 0 outside of them.
    """
    ratio = (values.detach() - sampled).exp()
    if rl.correction == "truncate":
        return ratio.clamp(max=rl.correction_most)
    return ((ratio >= rl.correction_least) & (ratio <= rl.correction_most)).to(ratio.dtype)


class Agreement:
    """How far the engine's log-probabilities of the trained tokens are from the trainer's, summed over the micro-batches of a step."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, values: Tensor, sampled: Tensor, trained: Tensor, clipped: Tensor) -> None:
        """Add the tokens that are `trained`, all `(batch, seq)`; `clipped` tells which ones the clip has changed."""
        difference = torch.where(trained, values - sampled, 0.0).double()
        estimate = torch.expm1(difference) - difference
        self._sums += torch.stack(
            [
                trained.sum(dtype=torch.float64),
                (difference != 0).sum(dtype=torch.float64),
                difference.abs().sum(),
                estimate.sum(),
                (trained & clipped).sum(dtype=torch.float64),
            ]
        )
        self._largest = torch.maximum(self._largest, difference.abs().max())

    def take(self) -> list[float]:
        """Tokens, unequal ones, sum of differences, sum of the divergence estimates, clipped tokens; and the largest difference. Waits."""
        taken = [*self._sums.tolist(), float(self._largest)]
        self._sums.zero_()
        self._largest.zero_()
        return taken

    @staticmethod
    def figures(taken: Sequence[Sequence[float]]) -> dict[str, float]:
        """The figures of a step from what its ranks have `taken`; ranks that compute the same tokens change none of them."""
        tokens, unequal, difference, divergence, clipped = (
            sum(column) for column in zip(*(row[:5] for row in taken), strict=True)
        )
        each = max(tokens, 1.0)
        return {
            "unequal_logprobs": unequal / each,
            "logprob_difference": difference / each,
            "largest_logprob_difference": max(row[5] for row in taken),
            "engine_kl": divergence / each,
            "clipped": clipped / each,
        }


@dataclass(frozen=True)
class PolicyObjective:
    """The loss that `rl` describes, of micro-batches with the columns below, each `(batch, seq)`.

    `sampled` and `advantages`; `reference` for a KL penalty; `factors` multiply the losses of tokens, and `counts` are what tokens add to
    the divisor, so that loss and gradients are the same for any micro-batches and any layout. For an answer of n tokens:

    | `rl.divisor` | factors | counts |
    |---|---|---|
    | tokens | 1 | 1 |
    | sequences | 1 / n | 1 / n |
    | length | 1 | `rl.new_tokens` / n |

    Answers that count and are not computed, because their advantages are 0, are in the counts of any token.
    """

    rl: RlSpec
    agreement: Agreement
    """Gets the two log-probabilities of every trained token. After the first update of a batch of answers they differ on purpose."""
    by_sequence = False

    def count(self, batch: MicroBatch) -> float | Tensor:
        """The micro-batch's part of the divisor."""
        return batch.columns["counts"].sum(dtype=torch.float64)

    def loss(self, log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch."""
        assert batch.targets is not None
        values = log_probabilities
        rl = self.rl
        sampled, advantages, factors = (
            batch.columns[name].to(values.dtype) for name in ("sampled", "advantages", "factors")
        )
        # With a correction, which takes one update a batch, the engine's deviation is a factor beside a ratio of 1.
        before = values.detach() if rl.correction != "none" else sampled
        ratio = (values - before).exp()
        below, above = CLIPS[rl.policy]
        below = rl.clip_below or below
        above = rl.clip_above or above
        rises = ratio > 1 + above
        falls = ratio < 1 - below
        if rl.policy == "cispo":
            losses = factored_loss(values, ratio, advantages, 1 + above)
            clipped = rises
        else:
            losses = clipped_loss(ratio, advantages, below, above)
            clipped = torch.where(advantages > 0, rises, falls)
        trained = batch.targets >= 0
        self.agreement.add(values.detach(), sampled, trained, clipped)
        if rl.correction != "none":
            losses = losses * correction_factors(values, sampled, rl)
        if rl.kl.weight:
            reference = batch.columns["reference"].to(values.dtype)
            losses = losses + rl.kl.weight * kl_of_tokens(values, reference, rl.kl.estimator)
        return torch.where(trained, losses * factors, 0.0).sum()
