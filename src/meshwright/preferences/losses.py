"""Losses of preferences, as functions of the log-probabilities of whole answers.

Notation: an answer has n tokens. l is its log-probability (the sum over its tokens), and r its log-probability under the
reference model. β, γ, w and c are options of the loss, z is an estimate of the divergence from the reference, and σ is
the sigmoid.

| loss | reward of an answer | loss of a pair with the margin m = reward of the chosen − reward of the rejected answer |
|---|---|---|
| dpo | β(l − r) | −log σ(m) |
| ipo | (l − r) / n | (m − 1/(2β))² |
| simpo | β l / n | −log σ(m − γ) |
| orpo | log p/(1 − p), p = exp(l/n) | −β log σ(m) − l/n of the chosen answer |
| kto | β(l − r) | for each answer alone: w · (1 − σ(±(reward − βz))), + for good answers |
| reward | the score s | −log σ(m − margin of the pair) + c(s + s')², s' being the score of the other answer |

Example: l is −12 for the chosen answer and −11 for the rejected one; under the reference they are −13 and −10. With β 0.1
the rewards of dpo are 0.1 and −0.1, the margin is 0.2 and the loss 0.598. Before the first update l = r. Then the margin
is 0 and the loss log 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from meshwright.spec.preference import PreferenceSpec

LEAST_SURPRISE = 1e-9
"""Least value of −l/n, in nat, for which orpo computes odds. The odds of a certain answer (p = 1) would be infinite."""


def rewards(spec: PreferenceSpec, totals: Tensor, tokens: Tensor, reference: Tensor | None) -> Tensor:
    """Return the reward of each answer, shaped like `totals`.

    `totals` are the answers' log-probabilities, `tokens` their numbers of tokens (at least 1), and `reference` their
    log-probabilities under the reference, or None. For a reward model `totals` are scores, which are the rewards.
    """
    ratios = totals if reference is None else totals - reference
    if spec.loss == "ipo":
        return ratios / tokens
    if spec.loss == "simpo":
        return spec.scale * ratios / tokens
    if spec.loss == "orpo":
        mean = (ratios / tokens).clamp(max=-LEAST_SURPRISE)
        return mean - torch.log(-torch.expm1(mean))
    return spec.scale * ratios


def pair_losses(spec: PreferenceSpec, margins: Tensor, chosen_means: Tensor) -> Tensor:
    """Return the loss of each pair, shaped like `margins`.

    `margins` is the chosen answer's reward minus the rejected answer's. `chosen_means` is the chosen answer's mean
    log-probability per token.
    """
    sft = spec.sft
    if spec.loss == "dpo":
        losses = _smoothed(spec, margins)
    elif spec.loss == "ipo":
        losses = (margins - 1 / (2 * spec.scale)).square()
    elif spec.loss == "simpo":
        losses = -logsigmoid(margins - spec.ahead)
    else:
        losses = -spec.scale * logsigmoid(margins)
        sft = 1.0
    return losses - sft * chosen_means if sft else losses


def score_losses(spec: PreferenceSpec, chosen: Tensor, rejected: Tensor, ahead: Tensor | float) -> Tensor:
    """Return the loss of each pair of a reward model. `chosen` and `rejected` are the scores of its answers.

    `ahead` is the margin by which the chosen answer's score should be higher.
    """
    return _smoothed(spec, chosen - rejected - ahead) + spec.center * (chosen + rejected).square()


def _smoothed(spec: PreferenceSpec, margins: Tensor) -> Tensor:
    """Return −log σ(margin). With label smoothing, a share `label_smoothing` of the loss is that of the negated margin."""
    flipped = spec.label_smoothing
    return -(1 - flipped) * logsigmoid(margins) - flipped * logsigmoid(-margins)


def answer_losses(spec: PreferenceSpec, values: Tensor, signs: Tensor, shift: Tensor) -> Tensor:
    """Return kto's loss of each answer, shaped like `values`, the rewards.

    `signs` are 1 for good and -1 for bad answers. `shift` is β·z, a scalar.
    """
    weights = torch.where(signs > 0, spec.desirable, spec.undesirable)
    return weights * (1 - torch.sigmoid(signs * (values - shift)))
