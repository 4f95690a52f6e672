"""Collectives of context parallelism around attention: all-to-alls of heads (Ulysses), all-gathers of tokens (ring).

Each collective is one custom operator, so that a compiled block stays one graph. The functions `scatter_heads`, `gather_heads` and
`gather_sequence` are differentiable; their backward is the inverse collective.

A ring rank has two chunks of a sequence. With n ranks the sequence has 2n chunks, and rank r has chunks r and 2n-1-r, so that causal
attention takes the same time on all ranks. Example: with 2 ranks, rank 0 has chunks 0 and 3, rank 1 has chunks 1 and 2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.linear_exchanges import ALL_GATHER, REDUCE_SCATTER, group_by_name


def scatter_heads(x: Tensor, group: str, ranks: int) -> Tensor:
    """Exchange heads for tokens: x `(batch, seq / ranks, heads, …)` becomes `(batch, seq, heads / ranks, …)`, this rank's heads."""
    return _ScatterHeads.apply(x, group, ranks)


def gather_heads(x: Tensor, group: str, ranks: int) -> Tensor:
    """The inverse of `scatter_heads`: x `(batch, seq, heads / ranks, …)` becomes `(batch, seq / ranks, heads, …)`."""
    return _GatherHeads.apply(x, group, ranks)


def gather_sequence(x: Tensor, group: str, ranks: int) -> Tensor:
    """All-gather the ring ranks' chunks x `(batch, seq / ranks, …)` into sequence order `(batch, seq, …)`.

    Backward sums the gradients over ranks and returns this rank's chunks.
    """
    return _GatherSequence.apply(x, group, ranks)


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group = group
        ctx.ranks = ranks
        return scatter_heads_op(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_heads_op(grad, ctx.group, ctx.ranks), None, None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group = group
        ctx.ranks = ranks
        return gather_heads_op(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_heads_op(grad, ctx.group, ctx.ranks), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group = group
        ctx.ranks = ranks
        return gather_chunks_op(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_chunks_op(grad, ctx.group, ctx.ranks), None, None


@torch.library.custom_op("meshwright::scatter_heads", mutates_args=())
def scatter_heads_op(x: Tensor, group: str, ranks: int) -> Tensor:
    """`scatter_heads` without a gradient."""
    sent = x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()  # (ranks, batch, seq / ranks, heads / ranks, …)
    return _all_to_all(sent, group).movedim(0, 1).flatten(1, 2).contiguous()


@scatter_heads_op.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * ranks, x.shape[2] // ranks, *x.shape[3:]))


@torch.library.custom_op("meshwright::gather_heads", mutates_args=())
def gather_heads_op(x: Tensor, group: str, ranks: int) -> Tensor:
    """`gather_heads` without a gradient."""
    sent = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
    return _all_to_all(sent, group).movedim(0, 2).flatten(2, 3).contiguous()


@gather_heads_op.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // ranks, x.shape[2] * ranks, *x.shape[3:]))


@torch.library.custom_op("meshwright::gather_chunks", mutates_args=())
def gather_chunks_op(x: Tensor, group: str, ranks: int) -> Tensor:
    """`gather_sequence` without a gradient."""
    gathered = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    ALL_GATHER(gathered, x.contiguous(), group=group_by_name(group))
    early, late = gathered.unflatten(0, (ranks, -1)).chunk(2, dim=2)
    return torch.cat((*early, *late.flip(0)), dim=1)


@gather_chunks_op.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * ranks, *x.shape[2:]))


@torch.library.custom_op("meshwright::scatter_chunks", mutates_args=())
def scatter_chunks_op(x: Tensor, group: str, ranks: int) -> Tensor:
    """Sum x `(batch, seq, …)` over the ring ranks and return this rank's two chunks of the sum, `(batch, seq / ranks, …)`."""
    chunks = x.chunk(2 * ranks, dim=1)
    ranked = torch.stack([torch.cat((chunks[rank], chunks[-1 - rank]), dim=1) for rank in range(ranks)])
    local = ranked.new_empty(ranked.shape[1:])
    REDUCE_SCATTER(local, ranked.flatten(0, 1), group=group_by_name(group))
    return local


@scatter_chunks_op.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // ranks, *x.shape[2:]))


def _all_to_all(sent: Tensor, group: str) -> Tensor:
    """Send `sent[rank]` to each rank. Returns `(ranks, …)`, the tensors that this rank received, by sending rank."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group_by_name(group))
    return received
