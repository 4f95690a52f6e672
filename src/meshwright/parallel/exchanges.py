"""What context ranks send one another around attention: heads for tokens, and keys and values of a whole sequence.

Each message is one operator, so that a compiled block stays one graph; those with gradients know the way back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.products import ALL_GATHER, REDUCE_SCATTER, group_by_name


def exchanged_heads(x: Tensor, group: str, ranks: int) -> Tensor:
    """All ranks' tokens of this rank's heads: `(batch, seq, heads / ranks, …)` of x `(batch, seq / ranks, heads, …)`."""
    return _Exchanged.apply(x, group, ranks)


def exchanged_tokens(x: Tensor, group: str, ranks: int) -> Tensor:
    """The way back: `(batch, seq / ranks, heads, …)` of x `(batch, seq, heads / ranks, …)`."""
    return _Returned.apply(x, group, ranks)


def gathered_sequence(x: Tensor, group: str, ranks: int) -> Tensor:
    """All tokens `(batch, seq, …)` in order, of each ring rank's two chunks `(batch, seq / ranks, …)`; gradients are summed."""
    return _Gathered.apply(x, group, ranks)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return heads_for_tokens(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tokens_for_heads(grad, ctx.group, ctx.ranks), None, None


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return tokens_for_heads(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return heads_for_tokens(grad, ctx.group, ctx.ranks), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return gathered_chunks(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return scattered_chunks(grad, ctx.group, ctx.ranks), None, None


@torch.library.custom_op("meshwright::heads_for_tokens", mutates_args=())
def heads_for_tokens(x: Tensor, group: str, ranks: int) -> Tensor:
    """All ranks' tokens of this rank's heads: `(batch, seq, heads / ranks, …)` of x `(batch, seq / ranks, heads, …)`."""
    leaving = x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()  # (ranks, batch, seq / ranks, heads / ranks, …)
    return _all_to_all(leaving, group).movedim(0, 1).flatten(1, 2).contiguous()


@heads_for_tokens.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * ranks, x.shape[2] // ranks, *x.shape[3:]))


@torch.library.custom_op("meshwright::tokens_for_heads", mutates_args=())
def tokens_for_heads(x: Tensor, group: str, ranks: int) -> Tensor:
    """The way back: `(batch, seq / ranks, heads, …)` of x `(batch, seq, heads / ranks, …)`."""
    leaving = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
    return _all_to_all(leaving, group).movedim(0, 2).flatten(2, 3).contiguous()


@tokens_for_heads.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // ranks, x.shape[2] * ranks, *x.shape[3:]))


@torch.library.custom_op("meshwright::gathered_chunks", mutates_args=())
def gathered_chunks(x: Tensor, group: str, ranks: int) -> Tensor:
    """All tokens `(batch, seq, …)` in order, of each ring rank's two chunks `(batch, seq / ranks, …)`."""
    found = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    ALL_GATHER(found, x.contiguous(), group=group_by_name(group))
    early, late = found.unflatten(0, (ranks, -1)).chunk(2, dim=2)
    return torch.cat((*early, *late.flip(0)), dim=1)


@gathered_chunks.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * ranks, *x.shape[2:]))


@torch.library.custom_op("meshwright::scattered_chunks", mutates_args=())
def scattered_chunks(x: Tensor, group: str, ranks: int) -> Tensor:
    """The ring ranks' sum of x `(batch, seq, …)`, and of it this rank's two chunks `(batch, seq / ranks, …)`."""
    chunks = x.chunk(2 * ranks, dim=1)
    ranked = torch.stack([torch.cat((chunks[rank], chunks[-1 - rank]), dim=1) for rank in range(ranks)])
    mine = ranked.new_empty(ranked.shape[1:])
    REDUCE_SCATTER(mine, ranked.flatten(0, 1), group=group_by_name(group))
    return mine


@scattered_chunks.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // ranks, *x.shape[2:]))


def _all_to_all(leaving: Tensor, group: str) -> Tensor:
    """From every rank what it has for this one, of what each has for each `(ranks, …)`."""
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group_by_name(group))
    return arriving
