"""The three parts of a block with experts, between which its tokens are exchanged; `parallel.paired_blocks` runs them.

route:    attention, router, and the rows in the order in which they are sent
compute:  the outputs of this rank's experts for the rows that arrive
combine:  the weighted sum of the rows that return, the shared expert, the residual
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.grouped import ExpertOrder
from meshwright.kernels.linear import with_taps
from meshwright.kernels.rope import RotaryTables
from meshwright.models.block import AttentionKind, Block
from meshwright.models.moe import CountedTokens
from meshwright.parallel.experts import AllToAll, DistributedExperts, compute_received


class Routed(NamedTuple):
    """Results of the first part, and those of `models.moe.RoutedTokens`.

    `x` `(batch, seq, hidden)` has the attention's output added, `normed` is the MoE layer's input. `sent`, `sent_load`
    and `sent_order` are those of `DistributedExperts.rows_to_send`.
    """

    x: Tensor
    normed: Tensor
    sent: Tensor
    weights: Tensor
    sent_load: Tensor
    sent_order: ExpertOrder | None
    order: ExpertOrder
    balance: Tensor
    load: Tensor
    squares: Tensor


@dataclass(frozen=True)
class BlockParts:
    """The functions of a block's parts, as the plan compiles and recomputes them, and the exchange of its experts.

    `route` maps the block's inputs to `Routed`; `compute` maps received rows and their numbers by rank and expert to outputs;
    `combine` maps `Routed.x` and `normed`, the returned rows, the weights and both orders to the block's output. `local` as in
    `TokenExchange`.
    """

    route: Callable[..., Routed]
    compute: Callable[[Tensor, Tensor], Tensor]
    combine: Callable[..., Tensor]
    exchange: AllToAll
    local: Tensor | None
    attention_kind: AttentionKind


def parts_of(
    block: Block,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    recompute: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    taps: bool,
) -> BlockParts:
    """The parts of a block, with `taps` those of `kernels.linear.with_taps`.

    `wrap` makes a function of the block and tensors of static shapes one of the tensors, recomputed and compiled as planned; `recompute`
    wraps a function that is not compiled.
    """
    experts = _experts_of(block)
    assert isinstance(experts.exchange, AllToAll), "other exchanges are refused for paired micro-batches"
    route = wrap(_route)
    combine = wrap(_combine)
    if taps:
        shared = [module for module in (block.moe.shared, block.moe.shared_gate) if module is not None]
        route = with_taps(route, [block.attention, block.moe.router])
        combine = with_taps(combine, shared)
    # The number of received rows changes from step to step: a compiled function would be compiled again.
    compute = recompute(partial(compute_received, experts.compute))
    return BlockParts(route, compute, combine, experts.exchange, experts.local, block.attention_kind)


def _route(
    block: Block, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None, counted: CountedTokens | None
) -> Routed:
    x, normed = block.add_attention(x, rope, mask)
    tokens = block.moe.route(normed, counted)
    sent, sent_load, sent_order = _experts_of(block).rows_to_send(tokens.sorted_rows, tokens.order)
    return Routed(
        x,
        normed,
        sent,
        tokens.weights,
        sent_load,
        sent_order,
        tokens.order,
        tokens.balance,
        tokens.load,
        tokens.squares,
    )


def _combine(
    block: Block,
    x: Tensor,
    normed: Tensor,
    returned: Tensor,
    weights: Tensor,
    order: ExpertOrder,
    sent_order: ExpertOrder | None,
) -> Tensor:
    rows = _experts_of(block).weighted(returned, sent_order, weights)
    return x + block.added_output(block.moe.combine(rows, order, normed))


def _experts_of(block: Block) -> DistributedExperts:
    assert isinstance(block.moe.experts, DistributedExperts)
    return block.moe.experts
