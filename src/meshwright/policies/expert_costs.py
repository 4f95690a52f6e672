"""Estimates the seconds of an MoE layer in a step, from the rows and the weights that a placement of its experts sends.

The slowest rank and the slowest link decide, because all ranks wait for each other in the exchange of rows. Every operation here is exact
or correctly rounded, and in a fixed order, so all ranks compute bitwise equal seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.policies.expert_routing import RowTotals


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds of the work of one MoE layer. All layers have the same costs."""

    ranks_per_node: int
    row_compute: float
    """Forward of one row through its expert."""
    row_inside: float
    """Transfer of one row to a rank of the same node."""
    row_across: float
    """Transfer of one row to another node, over the link of the whole node."""
    expert_inside: float
    """Transfer of one expert's weights between ranks of a node."""
    expert_across: float
    """Transfer of one expert's weights from one node to another."""
    hidden: float
    """Duration of the layer's other work, which overlaps one exchange of weights."""
    compute_passes: int = 3
    """Forward and backward take as long as this many forwards; one more with recompute."""
    row_exchanges: int = 4
    """Exchanges of rows in forward and backward; two more if recompute sends the rows again."""
    weight_exchanges: int = 2
    """The gather of weights and the reduction of gradients; one more if weights are gathered again for the backward."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer in a step, each `(L,)`."""

    compute: np.ndarray
    """Computation of experts on the rank with the most rows."""
    exchange: np.ndarray
    """Exchange of rows."""
    weights: np.ndarray
    """Exchange of weights, as far as no other work overlaps it."""

    @property
    def total(self) -> np.ndarray:
        return self.compute + self.exchange + self.weights


def layer_times(totals: RowTotals, owners: np.ndarray, costs: ExpertCosts) -> LayerTimes:
    """Seconds of each layer with the rows `totals`, where copies of experts come from their `owners` `(L, E)`."""
    exchange = np.maximum(totals.inside.max(1) * costs.row_inside, totals.across.max(1) * costs.row_across)
    exposed = np.maximum(gather_seconds(totals, owners, costs) - costs.hidden, 0)
    return LayerTimes(
        totals.computed.max(1) * costs.row_compute * costs.compute_passes,
        exchange * costs.row_exchanges,
        exposed * costs.weight_exchanges,
    )


def gather_seconds(totals: RowTotals, owners: np.ndarray, costs: ExpertCosts) -> np.ndarray:
    """Seconds `(L,)` until copies have reached all ranks. Each copy is sent to a node once, and from there to the ranks of the node."""
    layers, ranks = totals.rank_experts.shape
    on_rank = np.arange(layers)[:, None] * ranks + owners
    owned_count = np.bincount(on_rank.ravel(), minlength=layers * ranks).reshape(layers, ranks)
    owned_in_node = owned_count.reshape(layers, totals.node_experts.shape[1], -1).sum(2)
    received = (totals.rank_experts - owned_count).max(1)
    entered = (totals.node_experts - owned_in_node).max(1)
    return np.maximum(received * costs.expert_inside, entered * costs.expert_across)
