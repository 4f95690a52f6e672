"""FlexMoE as LAER-MoE's authors ran it: experts exchanged on all nodes at once, up to ten times for each micro-batch.

A node always has every expert, and a rank has as many slots in all steps, of which one expert may take several; the node's rows of an
expert are divided over its slots there. Described by galvatron/core/runtime/moe/prefetch/solver.py of the artifact.

Shapes: R ranks, N nodes, E experts.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 10
"""Most exchanges of a decision."""


def rank_loads(slots: np.ndarray, node_loads: np.ndarray) -> np.ndarray:
    """Rows that each rank computes, `(R,)`. `slots` `(R, E)` are numbers of slots, `node_loads` `(N, E)` the rows of a node's tokens."""
    by_node = slots.reshape(len(node_loads), -1, slots.shape[1])
    return (by_node / by_node.sum(1, keepdims=True) * node_loads[:, None]).sum(2).ravel()


def improved_slots(slots: np.ndarray, node_loads: np.ndarray, per_rank: int) -> np.ndarray:
    """`slots` after exchanges for `node_loads`, while the busiest rank's rows fall, absolutely or relative to the least busy one's."""
    best, loads = slots, rank_loads(slots, node_loads)
    for _ in range(ROUNDS):
        candidate = _exchanged(best, loads, node_loads, per_rank)
        if candidate is None:
            break
        changed = rank_loads(candidate, node_loads)
        if changed.max() >= loads.max() and changed.max() * loads.min() >= loads.max() * changed.min():
            break
        best, loads = candidate, changed
    return best


def _exchanged(slots: np.ndarray, loads: np.ndarray, node_loads: np.ndarray, per_rank: int) -> np.ndarray | None:
    """On each node a slot of the expert with fewest rows per slot goes to the one with most; None if there is no such pair.

    A rank that already has the gaining expert takes the slot, if it can, and gives its most loaded other expert to the rank that lost one.
    """
    nodes = len(node_loads)
    total = slots.sum(0)
    per_slot = node_loads.sum(0) // total
    order = np.argsort(-per_slot, kind="stable")
    spare = [expert for expert in order if total[expert] > nodes]
    if not spare or spare[-1] == order[0]:
        return None
    gains, loses, result = order[0], spare[-1], slots.copy()
    for ranks in np.arange(len(slots)).reshape(nodes, -1):
        giver = min(ranks[slots[ranks, loses] > 0], key=lambda rank: loads[rank])
        takers = [rank for rank in ranks if 0 < slots[rank, gains] < per_rank]
        result[giver, loses] -= 1
        if not takers or takers[0] == giver:
            result[giver, gains] += 1
            continue
        others = [expert for expert in np.flatnonzero(slots[takers[0]]) if expert != gains]
        moved = max(others, key=lambda expert: per_slot[expert])
        result[takers[0], gains] += 1
        result[takers[0], moved] -= 1
        result[giver, moved] += 1
    return result
