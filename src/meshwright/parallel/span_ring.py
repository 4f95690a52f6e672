"""Causal ring attention of a sample that any number of ranks divide, by messages inside one existing group.

A span is the set of ranks that divide a sample. Rank i of k has part i: blocks i and 2k-1-i of the sample's 2k (`policies.sample_blocks`).
Parts may differ in length, so ranks exchange tensors of different sizes; each rank knows all of them from the sample's length. Keys,
values and gradient sums travel as in `parallel.ring`, between neighbours of the span only: no group is created for a span.

A slot is a micro-batch `(1, capacity)` that begins with at most one part. Which part that is, an int64 tensor on the CPU says, whose shape
does not depend on the span, so that a compiled block serves all slots.

All ranks must run the spans that they share in the same order; the spans of a `policies.sample_balance.Balance` have one.

Shapes: q `(1, capacity, heads, head_dim)`, k and v `(1, capacity, kv_heads, head_dim)`; n tokens of the part come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.partial import (
    AttentionAccumulator,
    VisibleBlock,
    partial_attention,
    partial_gradients,
    visible_part,
)
from meshwright.parallel.ring import PendingExchange, start_exchange
from meshwright.policies.sample_blocks import block_ranges


@dataclass(frozen=True)
class SpanPart:
    """A rank's part of a sample of `length` tokens, divided over `ranks` of a group in the order of their parts."""

    length: int
    ranks: tuple[int, ...]
    part: int

    def encode(self, group_size: int) -> Tensor:
        """This part as an int64 tensor `(group_size + 2,)`, for `span_attention`."""
        absent = [-1] * (group_size - len(self.ranks))
        return torch.tensor([self.length, self.part, *self.ranks, *absent])

    @classmethod
    def decode(cls, span: Tensor) -> SpanPart | None:
        """The part of a tensor of `encode`, or None for `no_span`."""
        length, part, *ranks = span.tolist()
        return cls(length, tuple(rank for rank in ranks if rank >= 0), part) if length else None

    def size(self, part: int) -> tuple[int, int]:
        """(tokens of the first block, tokens of both blocks) of `part`."""
        first, second = block_ranges(self.length, len(self.ranks), part)
        return len(first), len(first) + len(second)

    @property
    def tokens(self) -> int:
        """Tokens of this part."""
        return self.size(self.part)[1]


def no_span(group_size: int) -> Tensor:
    """The tensor of a slot without a divided sample, shaped like those of `SpanPart.encode`."""
    return torch.tensor([0, 0, *[-1] * group_size])


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
        ctx.group, ctx.plain = group, plain
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
    combined, tokens = None, own.tokens
    q, keys_values = q[:, :tokens], torch.stack((k[:, :tokens], v[:, :tokens]))
    for turn in _turns(own):
        pending = turn.start_exchange(keys_values, group) if not turn.is_last else None
        queries, keys, causal = turn.visible
        if not turn.is_empty:
            k, v = keys_values[:, :, keys]
            partial = partial_attention(q[:, queries], k, v, causal, plain=plain)
            if combined is None:  # in the first turn, in which all queries attend to keys
                combined = AttentionAccumulator(*partial)
            else:
                combined.add(queries, *partial)
        if pending is not None:
            keys_values = pending.wait()
    assert combined is not None
    for result, part in ((out, combined.out), (logsumexp.mT, combined.logsumexp.mT)):
        result[:, :tokens] = part
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
    tokens, wide = own.tokens, logsumexp.dtype
    keys_values = torch.stack((k[:, :tokens], v[:, :tokens]))
    grad, q, out, logsumexp = grad[:, :tokens].contiguous(), q[:, :tokens], out[:, :tokens], logsumexp[..., :tokens]
    q_sum = torch.zeros(q.shape, dtype=wide, device=q.device)
    pending_sums: PendingExchange | None = None
    for turn in _turns(own):
        pending = turn.start_exchange(keys_values, group) if not turn.is_last else None
        queries, keys, causal = turn.visible
        partial = None
        if not turn.is_empty:
            k, v = keys_values[:, :, keys]
            partial = partial_gradients(
                grad[:, queries], q[:, queries], k, v, out[:, queries], logsumexp[..., queries], causal, plain=plain
            )
        # The sums of these keys and values so far; each rank begins those of its own keys and values.
        sums = (
            torch.zeros(keys_values.shape, dtype=wide, device=q.device) if pending_sums is None else pending_sums.wait()
        )
        if partial is not None:
            q_sum[:, queries] += partial[0]
            sums[0, :, keys] += partial[1]
            sums[1, :, keys] += partial[2]
        # In the last turn each rank receives the sums of its own keys and values.
        pending_sums = turn.start_exchange(sums, group)
        if pending is not None:
            keys_values = pending.wait()
    assert pending_sums is not None
    k_sum, v_sum = pending_sums.wait()
    for gradient, total in ((q_grad, q_sum), (k_grad, k_sum), (v_grad, v_sum)):
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


@dataclass(frozen=True)
class _Turn:
    """A turn of the ring, in which the rank of `own` has the keys and values of part `source`."""

    own: SpanPart
    number: int

    @property
    def source(self) -> int:
        return (self.own.part - self.number) % len(self.own.ranks)

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self.own.ranks)

    @property
    def visible(self) -> VisibleBlock:
        own = self.own
        return visible_part(own.part, self.source, own.size(own.part), own.size(self.source))

    @property
    def is_empty(self) -> bool:
        """Whether no query attends to any key: a block of a short sample may have no token."""
        queries, keys, _ = self.visible
        return (queries.start or 0) == queries.stop or keys.stop == 0

    def start_exchange(self, sent: Tensor, group: str) -> PendingExchange:
        """Start to send a tensor of part `source` on to the next rank, and to receive one of the next turn's part."""
        ranks, part = self.own.ranks, self.own.part
        tokens = self.own.size((self.source - 1) % len(ranks))[1]
        received = sent.new_empty((*sent.shape[:2], tokens, *sent.shape[3:]))
        return start_exchange(sent, received, group, ranks[(part + 1) % len(ranks)], ranks[part - 1])


def _turns(own: SpanPart) -> Iterator[_Turn]:
    return (_Turn(own, number) for number in range(len(own.ranks)))
