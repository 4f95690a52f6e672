"""Causal attention of a sample that any number of ranks divide, by messages inside one existing process group.

A span is the set of ranks that divide a sample. A sample on k ranks is cut into 2k blocks. Rank i of the span has part i, which consists of
blocks i and 2k-1-i (`policies.sample_blocks`). Parts may differ in length; each rank computes the lengths of all parts from the length of
the sample. The ranks either exchange tokens for heads (`parallel.span_heads`) or pass keys and values round a ring (`parallel.span_ring`),
as `SpanPart.by_heads` says.

A slot is a micro-batch `(1, capacity)` that begins with at most one part. An int64 tensor on the CPU identifies the part. The tensor's
shape does not depend on the span, so a compiled block serves all slots.

Ranks must run the spans that they share in the same order; `policies.sample_balance.Balance` defines such an order.

Shapes: q `(1, capacity, heads, head_dim)`, k and v `(1, capacity, kv_heads, head_dim)`. The n tokens of the part come first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype
from meshwright.parallel.span_heads import heads_backward, heads_forward
from meshwright.parallel.span_part import SpanPart
from meshwright.parallel.span_ring import ring_backward, ring_forward


def span_attention(q: Tensor, k: Tensor, v: Tensor, span: Tensor, group: str, *, reference: bool) -> Tensor:
    """Return the attention output of the part at the beginning of a slot over its whole sample, and zeros for other tokens.

    The result has the shape of q. `span` is a tensor of `SpanPart.encode`; its ranks are those of `group`. Collective over the span's
    ranks. `reference` computes scores explicitly instead of calling an attention kernel.
    """
    if not torch.is_grad_enabled():
        return span_forward(q, k, v, span, group, reference)[0]
    return _Span.apply(q, k, v, span, group, reference)


class _Span(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, span: Tensor, group: str, reference: bool) -> Tensor:
        out, logsumexp = span_forward(q, k, v, span, group, reference)
        ctx.save_for_backward(q, k, v, out, logsumexp, span)
        ctx.group = group
        ctx.reference = reference
        return out

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *span_backward(grad, *ctx.saved_tensors, ctx.group, ctx.reference), None, None, None


@torch.library.custom_op("meshwright::span_forward", mutates_args=())
def span_forward(q: Tensor, k: Tensor, v: Tensor, span: Tensor, group: str, reference: bool) -> tuple[Tensor, Tensor]:
    """Return what `span_attention` returns, and the log-sum-exp of each query's scores `(1, heads, capacity)`, 0 outside the part.

    The arguments are those of `span_attention`. This operator alone has no gradient.
    """
    out, logsumexp = _empty_results(q)
    own = SpanPart.decode(span)
    if own is None:
        return out.zero_(), logsumexp.zero_()
    tokens = own.tokens
    forward = heads_forward if own.by_heads else ring_forward
    part, part_logsumexp = forward(q[:, :tokens], k[:, :tokens], v[:, :tokens], own, group, reference=reference)
    for result, of_part in ((out, part), (logsumexp.mT, part_logsumexp.mT)):
        result[:, :tokens] = of_part
        result[:, tokens:] = 0
    return out, logsumexp


@span_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, span: Tensor, group: str, reference: bool) -> tuple[Tensor, Tensor]:
    return _empty_results(q)


@torch.library.custom_op("meshwright::span_backward", mutates_args=())
def span_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    span: Tensor,
    group: str,
    reference: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, which are 0 outside the part. They are summed and sent in the dtype of `logsumexp`."""
    q_grad, k_grad, v_grad = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    own = SpanPart.decode(span)
    if own is None:
        return q_grad, k_grad, v_grad
    tokens = own.tokens
    backward = heads_backward if own.by_heads else ring_backward
    grad, q, k, v, out = (tensor[:, :tokens] for tensor in (grad.contiguous(), q, k, v, out))
    totals = backward(grad, q, k, v, out, logsumexp[..., :tokens], own, group, reference=reference)
    for gradient, total in zip((q_grad, k_grad, v_grad), totals, strict=True):
        gradient[:, :tokens] = total
    return q_grad, k_grad, v_grad


@span_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    span: Tensor,
    group: str,
    reference: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return q_grad, k_grad, v_grad


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the attention output and the log-sum-exps for queries q."""
    batch, seq, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty((batch, heads, seq), dtype=accumulate_dtype(q.dtype))
