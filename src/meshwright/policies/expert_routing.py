"""Decides where rows are sent if an expert is on several ranks, and counts the rows that each rank computes.

A row is the activation of one token for one of its experts. A rank has the experts that it owns, and copies of others. A row is sent to the
first of these that exists (Hecate, arXiv 2502.02581, section 4.3):

1. its own rank, if the expert is there,
2. the ranks of the same node that have the expert; they share the rows equally,
3. all ranks that have the expert; they share the rows equally.

Shapes: L layers, R ranks in the order of their nodes, N nodes, E experts. Counts are whole numbers. Their sums are exact in float64 in any
order, so all ranks compute bitwise equal figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowTotals:
    """Rows in one exchange, from the tokens' ranks to the experts. The second exchange sends as many rows back."""

    computed: np.ndarray
    """Rows that each rank's experts process, `(L, R)`."""
    inside: np.ndarray
    """Rows that each rank receives from other ranks of its node, `(L, R)`."""
    across: np.ndarray
    """Rows that each node receives from other nodes or sends to them, whichever is more, `(L, N)`."""
    rank_experts: np.ndarray
    """Number of experts present on each rank, `(L, R)`."""
    node_experts: np.ndarray
    """Number of different experts present on each node, `(L, N)`."""


def owned(owners: np.ndarray, ranks: int) -> np.ndarray:
    """The experts on each rank, `(L, R, E)` bool, if each expert is only on its owner, as in expert parallelism. `owners` is `(L, E)`."""
    return owners[:, None, :] == np.arange(ranks)[None, :, None]


def route(counts: np.ndarray, present: np.ndarray, rank: int, ranks_per_node: int) -> np.ndarray:
    """How many rows of `rank` for each expert go to each rank, `(E, R)`. `counts` `(E,)` are its rows by expert; `present` is `(R, E)`.

    Shares differ by at most one row. Which ranks get the additional row depends on `rank` and the expert, so that it is not always the same
    one.
    """
    ranks, experts = present.shape
    destinations = np.zeros((experts, ranks), dtype=np.int64)
    first = rank // ranks_per_node * ranks_per_node
    for expert in np.flatnonzero(counts):
        candidates = np.flatnonzero(present[:, expert])
        in_node = candidates[(candidates >= first) & (candidates < first + ranks_per_node)]
        if present[rank, expert]:
            candidates = np.array([rank])
        elif len(in_node):
            candidates = in_node
        part, remainder = divmod(int(counts[expert]), len(candidates))
        destinations[expert, candidates] = part
        destinations[expert, np.roll(candidates, rank + int(expert))[:remainder]] += 1
    return destinations


def node_rows(counts: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """Rows of each node, `(L, N, E)`: the sums of `counts` `(L, R, E)` over the ranks of the node."""
    layers, ranks, experts = counts.shape
    return counts.reshape(layers, ranks // ranks_per_node, ranks_per_node, experts).sum(2)


def row_totals(counts: np.ndarray, by_node: np.ndarray, present: np.ndarray) -> RowTotals:
    """Rows of each rank and node. `counts` is `(L, R, E)`, `by_node` its `node_rows`, and `present` `(L, R, E)` the experts on each rank.

    Each share is rounded up to whole rows, so a rank may have a few rows more than with `route`. The time grows with the number of experts
    on ranks, because all other elements of `counts` are needed only in `by_node`.
    """
    layers, ranks, experts = counts.shape
    nodes = by_node.shape[1]
    flat = np.flatnonzero(present)
    on_rank, expert = np.divmod(flat, experts)
    on_node = on_rank // (ranks // nodes) * experts + expert
    local = counts.ravel()[flat]
    copies = np.bincount(on_node, minlength=by_node.size).reshape(by_node.shape)
    leaving = by_node - np.bincount(on_node, local, by_node.size).reshape(by_node.shape)
    inside_part = np.ceil(leaving / np.maximum(copies, 1))
    crossing = np.where(copies, 0, by_node)
    across_part = np.ceil(crossing.sum(1) / np.maximum(copies.sum(1), 1))
    across = across_part[on_rank // ranks, expert]
    inside = np.bincount(on_rank, inside_part.ravel()[on_node], layers * ranks).reshape(layers, ranks)
    received = np.bincount(on_rank, across, layers * ranks).reshape(layers, ranks)
    across_in = received.reshape(layers, nodes, -1).sum(2)
    return RowTotals(
        np.bincount(on_rank, local, layers * ranks).reshape(layers, ranks) + inside + received,
        inside,
        np.maximum(across_in, crossing.sum(2)),
        np.bincount(on_rank, minlength=layers * ranks).reshape(layers, ranks),
        np.count_nonzero(copies, axis=2),
    )
