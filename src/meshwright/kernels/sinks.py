"""Attention sinks: each head has one more score that takes part in its softmax but has no value (Xiao et al. 2023; gpt-oss, 2025).

A sink can be joined to a result that was computed without it. Let l be the log-sum-exp of the other scores and s the sink. The result is
multiplied by σ(l - s), and its log-sum-exp becomes log(eˡ + eˢ). The ordinary backward of attention computes weights as
e^(score - log-sum-exp). So with the joined result and log-sum-exp it returns the right gradients of q, k and v. Only the gradient of the
sink itself must be computed in addition.

Shapes: out and its gradient `(batch, seq, heads, head_dim)`, log-sum-exps `(batch, heads, seq)`, sinks `(heads,)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.partial import partial_attention, partial_gradients


def join_sinks(out: Tensor, logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Join sinks to an attention result and its log-sum-exp that were computed without them; returns both."""
    column = sinks.to(logsumexp.dtype)[:, None]
    joined = out * torch.sigmoid(logsumexp - column).transpose(1, 2)[..., None]
    # `to` is not called if the dtype is right already: torch 2.11 compiles an autograd function that returns such a result to gradients 0.
    joined = joined if joined.dtype == out.dtype else joined.to(out.dtype)
    return joined, torch.logaddexp(logsumexp, column.expand_as(logsumexp))


def sink_gradient(grad: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks. `grad` is the gradient of the joined result `out`."""
    products = (grad.to(logsumexp.dtype) * out.to(logsumexp.dtype)).sum(-1).transpose(1, 2)
    weights = torch.exp(sinks.to(logsumexp.dtype)[:, None] - logsumexp)
    return -(weights * products).sum((0, 2)).to(sinks.dtype)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax weights of scores `(…, keys)`. With sinks `(…)` they add up to less than 1; the rest is the sink's weight."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype)[..., None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


@torch.library.custom_op("meshwright::sink_attention", mutates_args=())
def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention with sinks, and the log-sum-exps of its scores.

    q is `(batch, seq, heads, head_dim)`, k and v `(batch, seq, kv_heads, head_dim)`. Scores are scaled by 1/√head_dim.
    """
    out, logsumexp = join_sinks(*partial_attention(q, k, v, True), sinks)
    return out.contiguous(), logsumexp.contiguous()


@sink_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    out = q.new_empty((batch, seq, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, seq), dtype=accumulate_dtype(q.dtype))


@torch.library.custom_op("meshwright::sink_attention_backward", mutates_args=())
def _sink_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = partial_gradients(grad.contiguous(), q, k, v, out, logsumexp, True)
    # Outputs of a custom operator have the strides of its fake.
    q_grad, k_grad, v_grad = (
        gradient.to(x.dtype).contiguous() for gradient, x in zip(gradients, (q, k, v), strict=True)
    )
    return q_grad, k_grad, v_grad, sink_gradient(grad, out, logsumexp, sinks)


@_sink_gradients.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return q_grad, k_grad, v_grad, torch.empty_like(sinks)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return _sink_gradients(grad, *ctx.saved_tensors)


sink_attention.register_autograd(_backward, setup_context=_save_for_backward)
