"""Loads of experts for each sample of a slot, where several ranks may divide the slot's first sample."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.parallel.span_heads import exchange_with_ranks
from meshwright.parallel.span_part import SpanPart


@torch.library.custom_op("meshwright::sum_span_loads", mutates_args=())
def sum_span_loads(loads: Tensor, span: Tensor, group: str) -> Tensor:
    """Return the loads `(samples, experts)` of whole samples, from the loads of a slot's tokens.

    `span` is a tensor of `SpanPart.encode`. The sample that the ranks of the span divide has number 0. Collective over these ranks.
    """
    total = loads.clone()
    own = SpanPart.decode(span)
    if own is not None:
        received = [torch.empty_like(total[0]) for _ in own.ranks]
        total[0] = torch.stack(exchange_with_ranks([loads[0]] * len(own.ranks), received, own, group)).sum(0)
    return total


@sum_span_loads.register_fake
def _(loads: Tensor, span: Tensor, group: str) -> Tensor:
    return torch.empty_like(loads)
