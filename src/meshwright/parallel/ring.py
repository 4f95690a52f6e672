"""Causal ring attention; each rank has two chunks of the sequence (Liu et al. 2023; zigzag order, Zhu 2024).

Keys and values are sent from rank to rank while attention with the previous ones is computed, so that no rank holds
those of more than two ranks. Backward sends them round again, followed by the sums of their gradients, which reach
their owner in the last turn. Forward and backward are one operator each, so a compiled block stays one graph.

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
from meshwright.parallel.products import group_by_name


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: str, rank: int, ranks: int, *, plain: bool) -> Tensor:
    """This rank's part of causal attention over the ring `group`, shaped like q. Collective."""
    if not torch.is_grad_enabled():
        return ring_forward(q, k, v, group, rank, ranks, plain)[0]
    return _Ring.apply(q, k, v, group, rank, ranks, plain)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: str, rank: int, ranks: int, plain: bool) -> Tensor:
        out, total = ring_forward(q, k, v, group, rank, ranks, plain)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.where = group, rank, ranks, plain
        return out

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ring_backward(grad, *ctx.saved_tensors, *ctx.where), None, None, None, None


@torch.library.custom_op("meshwright::ring_forward", mutates_args=())
def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, group: str, rank: int, ranks: int, plain: bool
) -> tuple[Tensor, Tensor]:
    """The rank's part of the result and its log-sums `(batch, heads, seq / ranks)`."""
    ring, combined = _Ranks(group, rank, ranks), None
    here = torch.stack((k, v))
    for turn in range(ranks):
        ahead = ring.pass_on(here) if turn + 1 < ranks else None
        queries, keys, causal = visible_block(rank, (rank - turn) % ranks, q.shape[1])
        found = partial_attention(q[:, queries], here[0, :, keys], here[1, :, keys], causal, plain=plain)
        if combined is None:
            combined = AttentionAccumulator(*found)
        else:
            combined.add(queries, *found)
        if ahead is not None:
            here = ahead.wait()
    assert combined is not None
    return combined.out.to(q.dtype).contiguous(), combined.logsumexp.contiguous()


@ring_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group: str, rank: int, ranks: int, plain: bool) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty((batch, heads, seq), dtype=accumulate_dtype(q.dtype))


@torch.library.custom_op("meshwright::ring_backward", mutates_args=())
def ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, group: str, rank: int, ranks: int, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's q, k and v. They are summed, and travel, in the log-sums' dtype."""
    ring, wide = _Ranks(group, rank, ranks), total.dtype
    here, grad = torch.stack((k, v)), grad.contiguous()
    q_sum = torch.zeros(q.shape, dtype=wide, device=q.device)
    behind: _Moving | None = None
    for turn in range(ranks):
        ahead = ring.pass_on(here) if turn + 1 < ranks else None
        queries, keys, causal = visible_block(rank, (rank - turn) % ranks, q.shape[1])
        found = partial_gradients(
            grad[:, queries], q[:, queries], here[0, :, keys], here[1, :, keys], out[:, queries], total[..., queries], causal,
            plain=plain,
        )  # fmt: skip
        sums = torch.zeros(here.shape, dtype=wide, device=q.device) if behind is None else behind.wait()
        q_sum[:, queries] += found[0]
        sums[0, :, keys] += found[1]
        sums[1, :, keys] += found[2]
        behind = ring.pass_on(sums)  # with the last turn the next rank's own come to it
        if ahead is not None:
            here = ahead.wait()
    assert behind is not None
    k_sum, v_sum = behind.wait()
    # An operator's results may not share memory.
    return q_sum.to(q.dtype), k_sum.to(k.dtype, copy=True), v_sum.to(v.dtype, copy=True)


@ring_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, group: str, rank: int, ranks: int, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q_grad, k_grad, v_grad = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v))
    return q_grad, k_grad, v_grad


@dataclass(frozen=True)
class _Moving:
    """What the rank before sends, on its way; and what is sent meanwhile, whose memory must last as long."""

    arriving: Tensor
    leaving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


@dataclass(frozen=True)
class _Ranks:
    group: str
    rank: int
    ranks: int

    def pass_on(self, tensor: Tensor) -> _Moving:
        """Begin to send `tensor` to the next rank and to receive as much from the one before."""
        group, arriving = group_by_name(self.group), torch.empty_like(tensor)
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        messages = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=after),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=before),
        ]
        return _Moving(arriving, tensor, dist.batch_isend_irecv(messages))
