"""Assignment of experts to owner ranks: heterogeneous sharding (Hecate, arXiv 2502.02581, algorithm 2).

An owner keeps an expert's master weights and optimizer state. Experts that are copied to all ranks anyway need no balanced owners. The
others are spread so that ranks and nodes have equal loads in each layer. A rank has an equal number of experts over all layers together,
and any number of one layer's.
"""

from __future__ import annotations

import numpy as np

from meshwright.spec.errors import BadInput

LEAST_GAIN = 2
"""Percent of the busiest rank's load by which new owners must lower it: moving experts takes time."""


def even_owners(layers: int, experts: int, ranks: int) -> np.ndarray:
    """Owners `(layers, experts)` in blocks of consecutive experts, as expert parallelism has them.

    With fewer experts than ranks, consecutive layers use consecutive ranks. Raises BadInput if ranks would own different numbers.
    """
    if layers * experts % ranks:
        raise BadInput(f"plan.experts: expected a divisor of {layers} layers × {experts} experts, got {ranks} ranks")
    if experts % ranks == 0:
        return np.tile(np.arange(experts) // (experts // ranks), (layers, 1))
    return (np.arange(layers * experts) % ranks).reshape(layers, experts)


def heterogeneous_owners(loads: np.ndarray, copied: int, ranks: int, ranks_per_node: int) -> np.ndarray:
    """Owners `(layers, experts)` for `loads` of that shape, if each layer's `copied` most loaded experts are on all ranks.

    Layers with the highest load of one expert choose first. The others of a layer go to the node with the smallest load and in it
    to the rank with the smallest load, among those with free slots; equal loads to the one with fewer free slots. Experts that
    are copied take what is left. Raises BadInput if the ranks cannot own equal numbers.
    """
    layers, experts = loads.shape
    if layers * experts % ranks:
        raise BadInput(f"plan.experts: expected a divisor of {layers} layers × {experts} experts, got {ranks} ranks")
    order = np.argsort(-loads, axis=1, kind="stable")
    free = [layers * experts // ranks] * ranks
    owners = np.empty((layers, experts), dtype=np.int64)
    layer_order = np.argsort(-loads.max(1), kind="stable")
    for layer in layer_order.tolist():
        _spread(owners[layer], loads[layer], order[layer, copied:], free, ranks_per_node)
    slots = np.repeat(np.arange(ranks), free)
    copied_experts = order[layer_order, :copied]
    owners[layer_order[:, None], copied_experts] = slots.reshape(copied_experts.shape)
    return owners


def layer_owners(loads: np.ndarray, copied: int, ranks: int, ranks_per_node: int) -> np.ndarray:
    """As `heterogeneous_owners`, with equal numbers of experts on all ranks in each layer.

    Raises BadInput if the ranks do not divide the experts.
    """
    layers, experts = loads.shape
    if experts % ranks:
        raise BadInput(f"plan.experts: expected a divisor of {experts} experts, got {ranks} ranks")
    order = np.argsort(-loads, axis=1, kind="stable")
    owners = np.empty((layers, experts), dtype=np.int64)
    for layer in range(layers):
        free = [experts // ranks] * ranks
        _spread(owners[layer], loads[layer], order[layer, copied:], free, ranks_per_node)
        owners[layer, order[layer, :copied]] = np.repeat(np.arange(ranks), free)
    return owners


def better_owners(loads: np.ndarray, owners: np.ndarray, copied: int, ranks: int, ranks_per_node: int) -> np.ndarray:
    """`layer_owners` where they lower the load of a layer's busiest rank by `LEAST_GAIN` or more, elsewhere `owners`.

    Experts that are copied do not count.
    """
    found = layer_owners(loads, copied, ranks, ranks_per_node)
    counted = loads.copy()
    np.put_along_axis(counted, np.argsort(-loads, axis=1, kind="stable")[:, :copied], 0, axis=1)
    before, after = (_busiest(counted, candidate, ranks) for candidate in (owners, found))
    return np.where((100 * after <= (100 - LEAST_GAIN) * before)[:, None], found, owners)


def position_order(owners: np.ndarray, ranks: int) -> np.ndarray:
    """Old position of the expert of each position, `(layers, experts)`; position p belongs to rank p ÷ (experts ÷ ranks).

    `owners` `(layers, experts)` are the new owners by present position. Experts that stay on their rank keep their position.
    """
    layers, experts = owners.shape
    order = np.tile(np.arange(experts), (layers, 1))
    here = np.arange(experts) // (experts // ranks)
    for layer in range(layers):
        leaving = np.flatnonzero(owners[layer] != here)
        order[layer, leaving] = leaving[np.argsort(owners[layer, leaving], kind="stable")]
    return order


def _busiest(loads: np.ndarray, owners: np.ndarray, ranks: int) -> np.ndarray:
    """The load of the busiest rank of each layer."""
    return np.stack([np.where(owners == rank, loads, 0).sum(1) for rank in range(ranks)]).max(0)


def _spread(owners: np.ndarray, loads: np.ndarray, experts: np.ndarray, free: list[int], ranks_per_node: int) -> None:
    """Give the `experts` of a layer, by falling load, owners among the ranks with `free` slots, which become fewer."""
    rank_loads = [0] * len(free)
    for expert in experts.tolist():
        rank = _next_owner(rank_loads, free, ranks_per_node)
        owners[expert] = rank
        rank_loads[rank] += int(loads[expert])
        free[rank] -= 1


def _next_owner(rank_loads: list[int], free: list[int], ranks_per_node: int) -> int:
    """The rank with free slots that has the smallest load in the node with the smallest load."""
    nodes = []
    for first in range(0, len(free), ranks_per_node):
        ranks = range(first, first + ranks_per_node)
        if node_free := sum(free[rank] for rank in ranks):
            nodes.append((sum(rank_loads[rank] for rank in ranks), node_free, first))
    first = min(nodes)[2]
    open_ranks = [rank for rank in range(first, first + ranks_per_node) if free[rank]]
    return min(open_ranks, key=lambda rank: (rank_loads[rank], free[rank], rank))
