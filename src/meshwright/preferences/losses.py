"""Losses of preferences, as functions of the log-probabilities of whole answers.

An answer of n tokens has the log-probability l, the sum over its tokens, and r under the reference. Its reward is

| loss | reward | loss of a pair with the margin m = reward of the chosen answer − reward of the rejected one |
|---|---|---|
| dpo | β(l − r) | −log σ(m) |
| ipo | (l − r) / n | (m − 1/(2β))² |
| simpo | β l / n | −log σ(m − γ) |
| orpo | log p/(1 − p), p = exp(l/n) | −β log σ(m) − l/n of the chosen answer |
| kto | β(l − r) | of an answer: w · (1 − σ(±(reward − βz))) |
| reward | the score s | −log σ(m − margin of the pair) + c(s + s')² with the score s' of the other answer |

Example: l is −12 for the chosen answer and −11 for the rejected one, under the reference −13 and −10. With β 0.1 the rewards of dpo are 0.1
and −0.1, the margin is 0.2 and the loss 0.598. Before the first update l = r: the margin is 0 and the loss log 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from meshwright.spec.preference import PreferenceSpec

LEAST_SURPRISE = 1e-9
"""Least mean surprise of an answer's tokens, in nat, of which odds are computed: those of a certain answer are infinite."""


def rewards(spec: PreferenceSpec, totals: Tensor, tokens: Tensor, reference: Tensor | None) -> Tensor:
    """The reward of each answer, shaped like `totals`, its log-probability; `tokens` is the number of its tokens, at least 1.

    Of a reward model `totals` are scores, which are the rewards.
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
    """The loss of each pair, shaped like `margins`; `chosen_means` are the mean log-probabilities per token of the chosen answers."""
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
    """The loss of each pair of a reward model from its scores; `ahead` is by how much the chosen answer should be ahead."""
    return _smoothed(spec, chosen - rejected - ahead) + spec.center * (chosen + rejected).square()


def _smoothed(spec: PreferenceSpec, margins: Tensor) -> Tensor:
    """−log σ of the margins, of which a share `label_smoothing` is taken as negated."""
    flipped = spec.label_smoothing
    return -(1 - flipped) * logsigmoid(margins) - flipped * logsigmoid(-margins)


def answer_losses(spec: PreferenceSpec, values: Tensor, signs: Tensor, shift: Tensor) -> Tensor:
    """The loss of each answer of kto, shaped like `values`, the rewards; `signs` are 1 and -1, and `shift` is β·z, a scalar."""
    weights = torch.where(signs > 0, spec.desirable, spec.undesirable)
    return weights * (1 - torch.sigmoid(signs * (values - shift)))
