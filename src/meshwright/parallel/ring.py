"""Causal ring attention. Each rank has two chunks of the sequence (Liu et al. 2023; zigzag order, Zhu 2024).

In each turn a rank sends keys and values to the next rank while it computes attention with them. A rank therefore stores the keys and
values of at most two ranks. The backward sends keys and values around the ring again, and after them the sums of their gradients. In the
last turn each sum arrives at the rank that its keys and values belong to. Forward and backward are one custom operator each, so a compiled
block stays one graph.

Shapes: q `(batch, seq / ranks, heads, head_dim)`, k and v `(batch, seq / ranks, kv_heads, head_dim)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.partial import AttentionAccumulator, partial_attention, partial_gradients, visible_block
from meshwright.kernels.sinks import join_sinks, sink_gradient
from meshwright.parallel.linear_exchanges import group_by_name


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: str, rank: int, ranks: int, *, sinks: Tensor | None = None, reference: bool
) -> Tensor:
    """Return the causal attention of this rank's queries over the keys of all ranks in `group`, shaped like q. Collective.

    `sinks` `(heads,)`, if given, are one more score in each query's softmax. `reference` computes scores explicitly instead of calling an
    attention kernel.
    """
    if not torch.is_grad_enabled():
        out, logsumexp = ring_forward(q, k, v, group, rank, ranks, reference)
        return out if sinks is None else join_sinks(out, logsumexp, sinks)[0]
    return _Ring.apply(q, k, v, sinks, group, rank, ranks, reference)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        group: str,
        rank: int,
        ranks: int,
        reference: bool,
    ) -> Tensor:
        out, logsumexp = ring_forward(q, k, v, group, rank, ranks, reference)
        if sinks is not None:
            out, logsumexp = join_sinks(out, logsumexp, sinks)
        ctx.save_for_backward(q, k, v, out, logsumexp, sinks)
        ctx.ring = group, rank, ranks, reference
        return out

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        of_sinks = None if sinks is None else sink_gradient(grad, saved[3], saved[4], sinks)
        return *ring_backward(grad, *saved, *ctx.ring), of_sinks, None, None, None, None


@torch.library.custom_op("meshwright::ring_forward", mutates_args=())
def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, group: str, rank: int, ranks: int, reference: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention of this rank's queries, and the log-sum-exp of each query's scores, `(batch, heads, seq / ranks)`.

    The arguments are those of `ring_attention`.
    """
    ring = _RingGroup(group, rank, ranks)
    combined = None
    keys_values = torch.stack((k, v))
    for turn in range(ranks):
        next_keys_values = ring.start_exchange(keys_values) if turn + 1 < ranks else None
        queries, keys, causal = visible_block(rank, (rank - turn) % ranks, q.shape[1])
        partial = partial_attention(
            q[:, queries], keys_values[0, :, keys], keys_values[1, :, keys], causal, reference=reference
        )
        if combined is None:
            combined = AttentionAccumulator(*partial)
        else:
            combined.add(queries, *partial)
        if next_keys_values is not None:
            keys_values = next_keys_values.wait()
    assert combined is not None
    return combined.out.to(q.dtype).contiguous(), combined.logsumexp.contiguous()


@ring_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group: str, rank: int, ranks: int, reference: bool) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty((batch, heads, seq), dtype=accumulate_dtype(q.dtype))


@torch.library.custom_op("meshwright::ring_backward", mutates_args=())
def ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    group: str,
    rank: int,
    ranks: int,
    reference: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's q, k and v. They are summed and sent in the dtype of `logsumexp`."""
    ring = _RingGroup(group, rank, ranks)
    wide = logsumexp.dtype
    keys_values = torch.stack((k, v))
    grad = grad.contiguous()
    q_sum = torch.zeros(q.shape, dtype=wide, device=q.device)
    pending_sums: PendingExchange | None = None
    for turn in range(ranks):
        next_keys_values = ring.start_exchange(keys_values) if turn + 1 < ranks else None
        queries, keys, causal = visible_block(rank, (rank - turn) % ranks, q.shape[1])
        gradients = partial_gradients(
            grad[:, queries],
            q[:, queries],
            keys_values[0, :, keys],
            keys_values[1, :, keys],
            out[:, queries],
            logsumexp[..., queries],
            causal,
            reference=reference,
        )
        sums = (
            torch.zeros(keys_values.shape, dtype=wide, device=q.device) if pending_sums is None else pending_sums.wait()
        )
        q_sum[:, queries] += gradients[0]
        sums[0, :, keys] += gradients[1]
        sums[1, :, keys] += gradients[2]
        # In the last turn each rank receives the sums of its own keys and values.
        pending_sums = ring.start_exchange(sums)
        if next_keys_values is not None:
            keys_values = next_keys_values.wait()
    assert pending_sums is not None
    k_sum, v_sum = pending_sums.wait()
    # Outputs of a custom operator must not share memory.
    return q_sum.to(q.dtype), k_sum.to(k.dtype, copy=True), v_sum.to(v.dtype, copy=True)


@ring_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    group: str,
    rank: int,
    ranks: int,
    reference: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return q_grad, k_grad, v_grad


@dataclass(frozen=True)
class PendingExchange:
    """A receive from the previous rank and a send to the next rank that may still run. It references both buffers."""

    received: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def start_exchange(sent: Tensor, received: Tensor, group: str, to: int, source: int) -> PendingExchange:
    """Start to send `sent` to rank `to` of `group`, and to receive into `received` from rank `source`."""
    messages = [
        dist.P2POp(dist.isend, sent, group=group_by_name(group), group_peer=to),
        dist.P2POp(dist.irecv, received, group=group_by_name(group), group_peer=source),
    ]
    return PendingExchange(received, sent, dist.batch_isend_irecv(messages))


@dataclass(frozen=True)
class _RingGroup:
    """The ranks of a ring: the name of their process group, this rank's index and the number of ranks."""

    group: str
    rank: int
    ranks: int

    def start_exchange(self, tensor: Tensor) -> PendingExchange:
        """Start to send `tensor` to the next rank and to receive a tensor of the same shape from the previous rank."""
        next_rank = (self.rank + 1) % self.ranks
        previous_rank = (self.rank - 1) % self.ranks
        return start_exchange(tensor, torch.empty_like(tensor), self.group, next_rank, previous_rank)
