"""Losses of reinforcement learning, as functions of log-probabilities. The loss of a token depends on that token alone.

Arguments, all `(batch, seq)`: `values` are the trainer's log-probabilities of the sampled tokens; `sampled` are the log-probabilities with
which the engine drew them; `advantages` has for each token the advantage of its answer. The ratio of a token is its probability now divided
by its probability when it was drawn. Each function returns the loss of each token. Where the ratio is not clipped, the gradient by `values`
is −advantage · ratio.

Example: a token of an answer with advantage 2 was drawn with probability 0.20 and has 0.24 now, so its ratio is 1.2. With bounds 0.2 and
0.2, the gradient of `clipped_loss` is −2.4 at ratio 1.2 and 0 beyond: the token has become likely enough for one update.
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
"""Default bounds (below, above) of the ratio: it is limited to 1 − below … 1 + above.

The bounds of cispo are from MiniMax-M1 (2025) and ScaleRL (Khatri et al. 2025); rloo has no bounds.
"""


def clipped_loss(ratio: Tensor, advantages: Tensor, below: float, above: float) -> Tensor:
    """−min(ratio · advantage, limited ratio · advantage), where the ratio is limited to 1 − below … 1 + above (Schulman et al. 2017)."""
    limited = ratio.clamp(1 - below, 1 + above)
    return -torch.minimum(ratio * advantages, limited * advantages)


def factored_loss(values: Tensor, ratio: Tensor, advantages: Tensor, cap: float) -> Tensor:
    """−min(ratio, cap) · advantage · log π, where the ratio has no gradient (CISPO). Every token keeps a gradient."""
    return -ratio.detach().clamp(max=cap) * advantages * values


def kl_of_tokens(values: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """An estimate, for each sampled token, of the KL divergence of the model from the reference. `reference` are its log-probabilities."""
    difference = values - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def correction_factors(values: Tensor, sampled: Tensor, rl: RlSpec) -> Tensor:
    """Factors that correct for tokens to which engine and trainer give different probabilities. They have no gradient.

    `truncate`: the ratio, but at most the upper bound (Yao et al. 2025). `mask`: 1 if the ratio is within the bounds, else 0.
    """
    ratio = (values.detach() - sampled).exp()
    if rl.correction == "truncate":
        return ratio.clamp(max=rl.correction_most)
    return ((ratio >= rl.correction_least) & (ratio <= rl.correction_most)).to(ratio.dtype)


class Agreement:
    """Measures how far the engine's and the trainer's log-probabilities of trained tokens differ, over the micro-batches of a step."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, values: Tensor, sampled: Tensor, trained: Tensor, clipped: Tensor) -> None:
        """Add a micro-batch. Arguments are `(batch, seq)`; `trained` and `clipped` say which tokens count and were clipped."""
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
        """The sums so far, and reset them. Waits for the device.

        In order: trained tokens, tokens with unequal values, sum of absolute differences, sum of divergence estimates, clipped tokens, and
        the largest difference.
        """
        taken = [*self._sums.tolist(), float(self._largest)]
        self._sums.zero_()
        self._largest.zero_()
        return taken

    @staticmethod
    def figures(taken: Sequence[Sequence[float]]) -> dict[str, float]:
        """The figures of a step from the results of `take` on all ranks. Ranks that compute the same tokens do not change them."""
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
    """The loss that `rl` describes. Micro-batches have the following columns, each `(batch, seq)`:

    - `sampled` and `advantages`, see above; `reference` if there is a KL penalty.
    - `factors`, by which the losses of tokens are multiplied.
    - `counts`, what each token adds to the divisor. Loss and gradients are therefore the same for any micro-batches and any layout.

    For an answer of n tokens:

    | `rl.divisor` | factors | counts |
    |---|---|---|
    | tokens | 1 | 1 |
    | sequences | 1 / n | 1 / n |
    | length | 1 | `rl.new_tokens` / n |

    Answers with advantage 0 are not computed, but count in the divisor: their counts are added to any token of the step.
    """

    rl: RlSpec
    agreement: Agreement
    """Gets both log-probabilities of every trained token. After a batch's first update they differ, as the weights changed."""
    by_sequence = False

    def count(self, batch: MicroBatch) -> float | Tensor:
        """What the micro-batch adds to the divisor."""
        return batch.columns["counts"].sum(dtype=torch.float64)

    def loss(self, log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        """The sum of the losses of a micro-batch's tokens."""
        assert batch.targets is not None
        values = log_probabilities
        rl = self.rl
        sampled, advantages, factors = (
            batch.columns[name].to(values.dtype) for name in ("sampled", "advantages", "factors")
        )
        # A correction allows only one update per batch. Then the ratio is 1, and the engine's deviation is a separate factor.
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
