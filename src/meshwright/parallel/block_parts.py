"""The three parts of a block with experts. Its rows are exchanged between the parts; `parallel.paired_blocks` runs them.

route:    attention, router, and the rows in the order in which they are sent
          (exchange: rows go to the ranks of their experts)
compute:  the outputs of this rank's experts for the rows that arrive
          (exchange: outputs return to the ranks of their rows)
combine:  the weighted sum of each token's outputs, the shared expert, the residual
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
    """Results of `route`.

    - `x` `(batch, seq, hidden)`: the block's input plus the attention's output.
    - `normed`: the input of the MoE layer.
    - `sent`, `sent_load`, `sent_order`: the results of `DistributedExperts.rows_to_send`.
    - `weights`, `order`, `balance`, `load`, `squares`: fields of `models.moe.RoutedTokens`.
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
    """The three functions of a block with experts, wrapped for the plan's compilation and recompute, and the exchange between them.

    - `route`: maps the block's inputs to `Routed`.
    - `compute`: maps received rows and their counts by rank and expert to outputs.
    - `combine`: maps `Routed.x`, `Routed.normed`, the returned rows, the weights and the two orders to the block's output.
    - `exchange`: sends rows to the ranks of their experts, and sends outputs back.
    - `local`: a tensor `(1,)` on the host. If it is not 0, all rows of all ranks are for experts of their own rank, and nothing is sent.
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
    """Return the parts of a block.

    `wrap` turns a function of the block and of tensors with static shapes into a function of the tensors only, recomputed and compiled as
    planned. `recompute` wraps a function that is not compiled. With `taps` the functions get taps (`kernels.linear.with_taps`), so that
    weight gradients can be computed later.
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
    return x + block.mlp_branch_output(block.moe.combine(rows, order, normed))


def _experts_of(block: Block) -> DistributedExperts:
    assert isinstance(block.moe.experts, DistributedExperts)
    return block.moe.experts
