"""Seconds of a layer of experts in a step, for the rows and the weights that a placement of its experts sends.

The slowest rank and the slowest link decide, as all ranks wait for each other in the exchange of rows. Every operation here is exact or
correctly rounded and in a fixed order, so all ranks get the same seconds bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.policies.expert_routing import RowTotals


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds of the work of one layer of experts. All layers are alike."""

    ranks_per_node: int
    row_compute: float
    """Forward of one row at its expert."""
    row_inside: float
    """Transfer of one row to a rank of the same node."""
    row_across: float
    """Transfer of one row to another node, on the link of the whole node."""
    expert_inside: float
    """Transfer of one expert's weights to a rank from its node."""
    expert_across: float
    """Transfer of one expert's weights to a node from another one."""
    hidden: float
    """Other work of the layer that hides one exchange of weights."""
    compute_passes: int = 3
    """Forwards that forward and backward take, one more with recompute."""
    row_exchanges: int = 4
    """Exchanges of rows in forward and backward, two more if recompute sends them again."""
    weight_exchanges: int = 2
    """The gather and the reduction of gradients, one more if weights are gathered again for the backward."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer in a step, each `(L,)`."""

    compute: np.ndarray
    """Experts of the rank with most rows."""
    exchange: np.ndarray
    """Exchange of rows."""
    weights: np.ndarray
    """The part of the exchange of weights that is not hidden."""

    @property
    def total(self) -> np.ndarray:
        return self.compute + self.exchange + self.weights


def layer_times(totals: RowTotals, owners: np.ndarray, costs: ExpertCosts) -> LayerTimes:
    """Times for the rows `totals` of a placement whose experts are copied from their `owners` `(L, E)`."""
    exchange = np.maximum(totals.inside.max(1) * costs.row_inside, totals.across.max(1) * costs.row_across)
    exposed = np.maximum(gather_seconds(totals, owners, costs) - costs.hidden, 0)
    return LayerTimes(
        totals.computed.max(1) * costs.row_compute * costs.compute_passes,
        exchange * costs.row_exchanges,
        exposed * costs.weight_exchanges,
    )


def gather_seconds(totals: RowTotals, owners: np.ndarray, costs: ExpertCosts) -> np.ndarray:
    """Seconds `(L,)` in which copies reach all ranks: each crosses to a node once, and from there to its ranks."""
    layers, ranks = totals.rank_experts.shape
    on_rank = np.arange(layers)[:, None] * ranks + owners
    owned_count = np.bincount(on_rank.ravel(), minlength=layers * ranks).reshape(layers, ranks)
    owned_in_node = owned_count.reshape(layers, totals.node_experts.shape[1], -1).sum(2)
    received = (totals.rank_experts - owned_count).max(1)
    entered = (totals.node_experts - owned_in_node).max(1)
    return np.maximum(received * costs.expert_inside, entered * costs.expert_across)
