"""One number (score) per token: the dot product of its hidden state and one row of weights, in fp32 for any dtype.

A score rounded to bf16 has only three digits, and the difference of two such scores has fewer. So hidden states
are converted to fp32, one part of the tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels.norm import accumulate_dtype

PART = 1024
"""Number of tokens whose hidden states are converted at a time."""


@torch.no_grad()
def scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the scores `(…)` of `hidden` `(…, width)` with `weight` `(1, width)`, in fp32 or fp64, without gradient."""
    wide = accumulate_dtype(hidden.dtype)
    row = weight[0].to(wide)
    parts = [part.to(wide) @ row for part in hidden.reshape(-1, hidden.shape[-1]).split(PART)]
    return torch.cat(parts).view(hidden.shape[:-1])


def weighted_sum(hidden: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    """Return the scalar sum of score · factor over all tokens, for `hidden` `(tokens, width)` and `weight` `(1, width)`.

    `factors` is `(tokens,)` and has no gradient; `hidden` and `weight` have one.
    """
    return _WeightedSum.apply(hidden, weight, factors.to(accumulate_dtype(hidden.dtype)))


class _WeightedSum(torch.autograd.Function):
    """`weighted_sum`. The backward converts the hidden states in parts too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, factors)
        return scores(hidden, weight) @ factors

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, factors = ctx.saved_tensors
        factors = factors * grad_outputs[0]
        hidden_grad = factors[:, None].to(hidden.dtype) * weight
        weight_grad = torch.zeros_like(weight[0], dtype=factors.dtype)
        for part, own in zip(hidden.split(PART), factors.split(PART), strict=True):
            weight_grad += own @ part.to(factors.dtype)
        return hidden_grad, weight_grad[None].to(weight.dtype), None
