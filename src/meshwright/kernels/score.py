"""One number of each token: the matmul of its hidden state with one row of weights, in fp32 whatever the dtype of both.

A score that is rounded to bf16 has three digits, of which a difference of two keeps fewer. So hidden states are widened, in parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels.norm import accumulate_dtype

PART = 1024
"""Tokens whose hidden states are widened at a time."""


@torch.no_grad()
def scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """The scores `(…)` of hidden `(…, hidden)` by weight `(1, hidden)`, without gradient."""
    wide = accumulate_dtype(hidden.dtype)
    row = weight[0].to(wide)
    parts = [part.to(wide) @ row for part in hidden.reshape(-1, hidden.shape[-1]).split(PART)]
    return torch.cat(parts).view(hidden.shape[:-1])


def weighted_sum(hidden: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    """The sum of the scores of hidden `(tokens, hidden)`, each times its factor `(tokens,)`, a scalar. The factors have no gradient."""
    return _WeightedSum.apply(hidden, weight, factors.to(accumulate_dtype(hidden.dtype)))


class _WeightedSum(torch.autograd.Function):
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
