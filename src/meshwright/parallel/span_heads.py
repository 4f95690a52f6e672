"""Attention of a divided sample whose ranks exchange tokens for heads (Ulysses; Jacobs et al. 2023).

Each of k ranks gets all tokens of 1/k of the heads, computes the attention of the whole sample with them, and sends the results back. The
messages go between the sample's ranks only, inside one existing group. The number of key/value heads must be a multiple of k. The backward
exchanges its inputs again, so that a slot keeps no tensor whose shape depends on its sample.

Shapes: the rank's part has n tokens, the sample s; q `(1, n, heads, head_dim)`, k and v `(1, n, kv_heads, head_dim)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.partial import partial_attention, partial_gradients
from meshwright.parallel.linear_exchanges import group_by_name
from meshwright.parallel.span_part import SpanPart


def heads_forward(
    q: Tensor, k: Tensor, v: Tensor, own: SpanPart, group: str, *, reference: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention of the part's tokens over the whole sample, and the log-sum-exp of their scores `(1, heads, n)`. Collective.

    `reference` computes scores explicitly instead of calling an attention kernel; this is so in the backward too.
    """
    q, k, v = tokens_to_heads((q, k, v), own, group)
    out, logsumexp = partial_attention(q, k, v, True, lengths_vary=True, reference=reference)
    (out,) = heads_to_tokens((out,), own, group)
    (logsumexp,) = heads_to_tokens((logsumexp.mT,), own, group)
    return out, logsumexp.mT


def heads_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    own: SpanPart,
    group: str,
    *,
    reference: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v. `out` and `logsumexp` are results of `heads_forward`. Collective."""
    grad, q, k, v, out = tokens_to_heads((grad, q, k, v, out), own, group)
    (logsumexp,) = tokens_to_heads((logsumexp.mT,), own, group)
    gradients = partial_gradients(
        grad, q, k, v, out, logsumexp.mT.contiguous(), True, lengths_vary=True, reference=reference
    )
    return heads_to_tokens(gradients, own, group)


def tokens_to_heads(tensors: Sequence[Tensor], own: SpanPart, group: str) -> list[Tensor]:
    """Exchange tensors of the part's tokens `(1, n, heads, …)` for tensors of this rank's heads of all tokens `(1, s, heads / k, …)`."""
    ranks = len(own.ranks)
    widths = [tensor.shape[2] // ranks for tensor in tensors]
    by_rank = zip(*(tensor.chunk(ranks, dim=2) for tensor in tensors), strict=True)
    sent = [torch.cat(of_rank, dim=2) for of_rank in by_rank]
    received = [sent[0].new_empty((1, tokens, *sent[0].shape[2:])) for tokens in own.sizes]
    joined = torch.cat(exchange_with_ranks(sent, received, own, group), dim=1)
    ordered = torch.empty_like(joined)
    ordered[:, own.positions(joined.device)] = joined
    return [heads.contiguous() for heads in ordered.split(widths, dim=2)]


def heads_to_tokens(tensors: Sequence[Tensor], own: SpanPart, group: str) -> tuple[Tensor, ...]:
    """The inverse of `tokens_to_heads`."""
    widths = [tensor.shape[2] for tensor in tensors]
    joined = torch.cat(list(tensors), dim=2)
    sent = list(joined[:, own.positions(joined.device)].split(own.sizes, dim=1))
    received = [torch.empty_like(sent[own.part]) for _ in own.ranks]
    by_rank = [part.split(widths, dim=2) for part in exchange_with_ranks(sent, received, own, group)]
    return tuple(torch.cat(of_tensor, dim=2) for of_tensor in zip(*by_rank, strict=True))


def exchange_with_ranks(sent: list[Tensor], received: list[Tensor], own: SpanPart, group: str) -> list[Tensor]:
    """Send each of the sample's ranks its tensor of `sent`, and receive its tensor into `received`, which is returned.

    Compute waits for the messages. Parts without tokens have no messages.
    """
    members = group_by_name(group)
    messages = []
    for part, rank in enumerate(own.ranks):
        if part == own.part:
            received[part] = sent[part]
            continue
        if sent[part].numel():
            messages.append(dist.P2POp(dist.isend, sent[part], group=members, group_peer=rank))
        if received[part].numel():
            messages.append(dist.P2POp(dist.irecv, received[part], group=members, group_peer=rank))
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return received
