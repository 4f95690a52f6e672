"""Norms of queries and keys over all heads of a token together, where tensor ranks divide the heads.

A rank computes the sums of squares of its own heads. One all-reduce adds the sums of all ranks: two fp32 numbers per token, 8 bytes. A
gather of the heads would move all queries and keys instead. The backward adds as many numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype, rms_norm_of
from meshwright.models.attention import Attention
from meshwright.parallel.linear_exchanges import group_by_name


def norm_divided_heads(
    attention: Attention, q: Tensor, k: Tensor, *, group: str, ranks: int, copies: int
) -> tuple[Tensor, Tensor]:
    """`models.attention.norm_all_heads` for the heads of this rank, one of `ranks` tensor ranks. Collective over `group`.

    If there are fewer key heads than ranks, `copies` ranks have each key head. The sum over ranks is divided so that it counts each once.
    """
    squares = [x.to(accumulate_dtype(x.dtype)).square().sum((-2, -1)) for x in (q, k)]
    total_q, total_k = _added(torch.stack((squares[0], squares[1] / copies)), group)
    norms = (attention.q_norm, q, total_q, ranks), (attention.k_norm, k, total_k, ranks // copies)
    normed_q, normed_k = (
        rms_norm_of(
            x.flatten(-2),
            (total / (x.shape[-2] * x.shape[-1] * parts))[..., None],
            norm.weight,
            norm.eps,
            plus_one=norm.plus_one,
        )
        for norm, x, total, parts in norms
    )
    return normed_q.view_as(q), normed_k.view_as(k)


def _added(x: Tensor, group: str) -> Tensor:
    """Return the sum of x over all ranks. Each rank's result depends on every x, so backward adds the gradients of all ranks."""
    return _Added.apply(x, group) if torch.is_grad_enabled() else add_over_ranks(x, group)


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return add_over_ranks(x, group)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return add_over_ranks(grad, ctx.group), None


@torch.library.custom_op("meshwright::add_over_ranks", mutates_args=())
def add_over_ranks(x: Tensor, group: str) -> Tensor:
    """Return the sum of x over all ranks of the group with this name, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group_by_name(group))
    return total


@add_over_ranks.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
