"""Assigns experts to owner ranks: heterogeneous sharding (Hecate, arXiv 2502.02581, algorithm 2).

The owner of an expert has its master weights and optimizer state. Experts that are copied to all ranks in any case do not need balanced
owners. The other experts are spread so that ranks and nodes have equal loads in each layer. Over all layers together, ranks own equal
numbers of experts. In a single layer, a rank may own any number.
"""

from __future__ import annotations

import numpy as np

from meshwright.spec.errors import BadInput

LEAST_GAIN = 2
"""New owners must lower the busiest rank's load by at least this many percent, because moving experts takes time."""


def even_owners(layers: int, experts: int, ranks: int) -> np.ndarray:
    """Owners `(layers, experts)`, where each rank owns consecutive experts as in expert parallelism.

    With fewer experts than ranks, successive layers use successive ranks. Raises BadInput if ranks would own different numbers of experts.
    """
    if layers * experts % ranks:
        raise BadInput(f"plan.experts: expected a divisor of {layers} layers × {experts} experts, got {ranks} ranks")
    if experts % ranks == 0:
        return np.tile(np.arange(experts) // (experts // ranks), (layers, 1))
    return (np.arange(layers * experts) % ranks).reshape(layers, experts)


def heterogeneous_owners(loads: np.ndarray, copied: int, ranks: int, ranks_per_node: int) -> np.ndarray:
    """Owners `(layers, experts)` for `loads` of the same shape.

    The `copied` most loaded experts of each layer are on all ranks in any case.

    Layers are handled in the order of their largest load. The experts of a layer that are not copied are assigned by descending load: to
    the node with the smallest load, and within the node to the rank with the smallest load that has a free slot. If loads are equal, the
    rank with fewer free slots is chosen. Copied experts get the remaining slots. Raises BadInput if the ranks cannot own equal numbers.
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
    """Like `heterogeneous_owners`, but all ranks own equally many experts in each layer.

    Raises BadInput if the number of experts is not a multiple of the number of ranks.
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
    """For each layer, `layer_owners` if they lower the load of the busiest rank by at least `LEAST_GAIN` percent, else `owners`.

    Experts that are copied to all ranks do not count for loads.
    """
    found = layer_owners(loads, copied, ranks, ranks_per_node)
    counted = loads.copy()
    np.put_along_axis(counted, np.argsort(-loads, axis=1, kind="stable")[:, :copied], 0, axis=1)
    before, after = (_busiest(counted, candidate, ranks) for candidate in (owners, found))
    return np.where((100 * after <= (100 - LEAST_GAIN) * before)[:, None], found, owners)


def position_order(owners: np.ndarray, ranks: int) -> np.ndarray:
    """For each new position, the present position of the expert that moves there, `(layers, experts)`.

    Position p belongs to rank p ÷ (experts ÷ ranks). `owners` `(layers, experts)` has the new owner of the expert at each present position.
    Experts that stay on their rank keep their position.
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
    """Assign `experts`, in descending order of load, to ranks with free slots. Writes `owners` and lowers `free`."""
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
