"""Causal attention of a sample that any number of ranks divide, by messages inside one existing group.

A span is the set of ranks that divide a sample. Rank i of k has part i: blocks i and 2k-1-i of the sample's 2k (`policies.sample_blocks`).
Parts may differ in length; each rank knows the lengths of all from the sample's. The ranks exchange tokens for heads
(`parallel.span_heads`) or pass keys and values round a ring (`parallel.span_ring`); the part says which.

A slot is a micro-batch `(1, capacity)` that begins with at most one part. An int64 tensor on the CPU identifies the part. Its shape does
not depend on the span, so a compiled block serves all slots.

Ranks must run the spans that they share in the same order; `policies.sample_balance.Balance` defines such an order.

Shapes: q `(1, capacity, heads, head_dim)`, k and v `(1, capacity, kv_heads, head_dim)`; n tokens of the part come first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype
from meshwright.parallel.span_heads import heads_backward, heads_forward
from meshwright.parallel.span_part import SpanPart
from meshwright.parallel.span_ring import ring_backward, ring_forward


def span_attention(q: Tensor, k: Tensor, v: Tensor, span: Tensor, group: str, *, plain: bool) -> Tensor:
    """Attention of the part at the beginning of a slot over its whole sample, and zeros for other tokens; shaped like q.

    `span` is a tensor of `SpanPart.encode`, whose ranks are those of `group`. Collective over the span's ranks. `plain` computes scores
    explicitly instead of calling an attention kernel.
    """
    if not torch.is_grad_enabled():
        return span_forward(q, k, v, span, group, plain)[0]
    return _Span.apply(q, k, v, span, group, plain)


class _Span(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, span: Tensor, group: str, plain: bool) -> Tensor:
        out, logsumexp = span_forward(q, k, v, span, group, plain)
        ctx.save_for_backward(q, k, v, out, logsumexp, span)
        ctx.group = group
        ctx.plain = plain
        return out

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *span_backward(grad, *ctx.saved_tensors, ctx.group, ctx.plain), None, None, None


@torch.library.custom_op("meshwright::span_forward", mutates_args=())
def span_forward(q: Tensor, k: Tensor, v: Tensor, span: Tensor, group: str, plain: bool) -> tuple[Tensor, Tensor]:
    """`span_attention` without a gradient, and the log-sum-exps `(1, heads, capacity)` of the scores, 0 for other tokens."""
    out, logsumexp = _empty_results(q)
    own = SpanPart.decode(span)
    if own is None:
        return out.zero_(), logsumexp.zero_()
    tokens = own.tokens
    forward = heads_forward if own.by_heads else ring_forward
    part, part_logsumexp = forward(q[:, :tokens], k[:, :tokens], v[:, :tokens], own, group, plain=plain)
    for result, of_part in ((out, part), (logsumexp.mT, part_logsumexp.mT)):
        result[:, :tokens] = of_part
        result[:, tokens:] = 0
    return out, logsumexp


@span_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, span: Tensor, group: str, plain: bool) -> tuple[Tensor, Tensor]:
    return _empty_results(q)


@torch.library.custom_op("meshwright::span_backward", mutates_args=())
def span_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, span: Tensor, group: str, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, 0 for other tokens. They are summed and sent in the dtype of the log-sum-exps."""
    q_grad, k_grad, v_grad = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    own = SpanPart.decode(span)
    if own is None:
        return q_grad, k_grad, v_grad
    tokens = own.tokens
    backward = heads_backward if own.by_heads else ring_backward
    grad, q, k, v, out = (tensor[:, :tokens] for tensor in (grad.contiguous(), q, k, v, out))
    totals = backward(grad, q, k, v, out, logsumexp[..., :tokens], own, group, plain=plain)
    for gradient, total in zip((q_grad, k_grad, v_grad), totals, strict=True):
        gradient[:, :tokens] = total
    return q_grad, k_grad, v_grad


@span_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, span: Tensor, group: str, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return q_grad, k_grad, v_grad


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the result of attention and the log-sum-exps of its scores."""
    batch, seq, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty((batch, heads, seq), dtype=accumulate_dtype(q.dtype))
