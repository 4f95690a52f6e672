"""The choice of experts for tokens by one kernel, which computes experts, weights, probabilities and loads in one pass over the logits.

`models.moe` computes the same with torch's operators. They are used on other devices, for routers with groups of experts, and if experts
are chosen so that they get recorded loads (`parallel.replayed_routing`).

In tensor shapes, `copies` is the number of experts that each token chooses: the token is copied to each of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.spec.serving_limits import MOST_EXPERTS


class ExpertChoice(NamedTuple):
    """The experts that tokens choose.

    - `weights` `(batch, seq, copies)`: the factor of each chosen expert's output. Differentiable.
    - `chosen` `(batch, seq, copies)`: the indices of the chosen experts.
    - `probability_sums` `(batch, experts)`: the sum of each expert's probabilities over a sequence. Differentiable.
    - `loads` `(batch, experts)`: how often a sequence chooses each expert.
    """

    weights: Tensor
    chosen: Tensor
    probability_sums: Tensor
    loads: Tensor


def has_kernel(x: Tensor, experts: int) -> bool:
    """Whether the kernels support x (the logits or the chosen experts) with this number of experts."""
    return x.is_cuda and experts <= MOST_EXPERTS and (not x.is_floating_point() or x.element_size() <= 4)


def choose(
    logits: Tensor, bias: Tensor | None, *, sigmoid: bool, copies: int, normalised: bool, scale: float
) -> ExpertChoice:
    """Return for each token the `copies` experts with the highest scores.

    - `logits` `(batch, seq, experts)`: the output of a router, for which `has_kernel` is true.
    - `sigmoid`: scores are sigmoids of the logits; otherwise their softmax.
    - `bias` `(experts,)`: added to the scores, but only to choose experts. Of equal scores the expert with the lower number is chosen.
    - `scale`: weights are scores multiplied by it.
    - `normalised`: before that, the scores of a token's experts are divided by their sum. For a softmax with a bias the sum is at least
      `LEAST_SUM`.
    """
    return ExpertChoice(*_choose_experts(logits, bias, sigmoid, copies, normalised, scale))


def pick(
    logits: Tensor, bias: Tensor | None, *, sigmoid: bool, copies: int, normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return only `weights` and `chosen` of `choose`, without gradients, for inference."""
    from meshwright.kernels import router_triton

    return router_triton.pick(logits, bias, sigmoid, copies, normalised, scale)


# Defined here, because a recompute policy recognises the operator also without Triton.
@torch.library.custom_op("meshwright::choose_experts", mutates_args=())
def _choose_experts(
    logits: Tensor, bias: Tensor | None, sigmoid: bool, copies: int, normalised: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from meshwright.kernels import router_triton

    return router_triton.choose(logits, bias, sigmoid, copies, normalised, scale)


@torch.library.custom_op("meshwright::choose_experts_backward", mutates_args=())
def _choose_experts_backward(
    weights_grad: Tensor,
    sums_grad: Tensor,
    logits: Tensor,
    chosen: Tensor,
    sigmoid: bool,
    biased: bool,
    normalised: bool,
    scale: float,
) -> Tensor:
    from meshwright.kernels import router_triton

    return router_triton.choice_gradient(weights_grad, sums_grad, logits, chosen, sigmoid, biased, normalised, scale)


@_choose_experts.register_fake
def _(
    logits: Tensor, bias: Tensor | None, sigmoid: bool, copies: int, normalised: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del bias, sigmoid, normalised, scale
    batch, seq, experts = logits.shape
    weights, chosen = (logits.new_empty(batch, seq, copies, dtype=dtype) for dtype in (torch.float32, torch.int64))
    sums, loads = (logits.new_empty(batch, experts, dtype=dtype) for dtype in (torch.float32, torch.int64))
    return weights, chosen, sums, loads


@_choose_experts_backward.register_fake
def _(
    weights_grad: Tensor,
    sums_grad: Tensor,
    logits: Tensor,
    chosen: Tensor,
    sigmoid: bool,
    biased: bool,
    normalised: bool,
    scale: float,
) -> Tensor:
    del weights_grad, sums_grad, chosen, sigmoid, biased, normalised, scale
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, bias, sigmoid, _copies, normalised, scale = inputs
    _weights, chosen, _sums, _loads = output
    ctx.options = sigmoid, bias is not None, normalised, scale
    ctx.save_for_backward(logits, chosen)


def _autograd_backward(
    ctx: Any, weights_grad: Tensor, chosen_grad: None, sums_grad: Tensor, loads_grad: None
) -> tuple[Tensor | None, ...]:
    del chosen_grad, loads_grad
    logits_grad = _choose_experts_backward(weights_grad, sums_grad, *ctx.saved_tensors, *ctx.options)
    return logits_grad, None, None, None, None, None


_choose_experts.register_autograd(_autograd_backward, setup_context=_setup_context)
CHOICE_OPERATOR = torch.ops.meshwright.choose_experts.default
"""The operator by which a recompute policy recognises the choice of experts."""
