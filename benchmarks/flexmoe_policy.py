"""FlexMoE's idea with single copies: the copies of the step before, changed by a few at a time (Nie et al. 2023, arXiv 2304.03946).

Shapes: L layers, R ranks, E experts.
"""

from __future__ import annotations

import numpy as np

from meshwright.policies.expert_placement import PlacementProblem, cheapest
from meshwright.policies.expert_routing import owned

CHANGES = 10
"""Most copies that are added to a layer in a step."""


class SingleCopies:
    """A placement for `play_loads`; `present` `(L, R, E)` are the experts of the step before the first, None for owners alone."""

    def __init__(self, present: np.ndarray | None = None) -> None:
        self._present = present

    def __call__(self, problem: PlacementProblem) -> np.ndarray:
        """Experts present on each rank, `(L, R, E)`."""
        base = owned(problem.owners, problem.counts.shape[1])
        previous = base.copy() if self._present is None else self._present | base
        self._present = cheapest(problem, [changed(problem, base, previous)])
        return self._present


def changed(problem: PlacementProblem, base: np.ndarray, present: np.ndarray) -> np.ndarray:
    """`present`, changed while the largest load of a rank falls; owners keep the experts `base`.

    A change gives the expert with most rows per copy another copy, on the rank with the smallest load that lacks it. A rank without a free
    slot gives up the copy with the fewest rows.
    """
    layers, loads = np.arange(len(base)), problem.loads
    copies = present.sum(1)
    layer, rank, expert = np.nonzero(present)
    part = loads / copies
    flat = np.bincount(layer * base.shape[1] + rank, part[layer, expert], base.shape[0] * base.shape[1])
    rank_loads = flat.reshape(base.shape[:2])
    improving = np.ones(len(base), dtype=bool)
    for _ in range(CHANGES):
        expert = part.argmax(1)
        holders = present[layers, :, expert]
        rank = np.where(holders, np.inf, rank_loads).argmin(1)
        removable = present[layers, rank] & ~base[layers, rank]
        removed = np.where(removable, part, np.inf).argmin(1)
        full = removable.sum(1) >= problem.slots
        possible = improving & ~holders[layers, rank] & (removable.any(1) | ~full)
        added_part = loads[layers, expert] / (copies[layers, expert] + 1)
        removed_part = loads[layers, removed] / np.maximum(copies[layers, removed] - 1, 1)
        sums = rank_loads + holders * (added_part - part[layers, expert])[:, None]
        sums += present[layers, :, removed] * (full * (removed_part - part[layers, removed]))[:, None]
        sums[layers, rank] += added_part - full * removed_part
        improving = possible & (sums.max(1) < rank_loads.max(1))
        if not improving.any():
            break
        layer, dropping = layers[improving], layers[improving & full]
        present[dropping, rank[dropping], removed[dropping]] = False
        copies[dropping, removed[dropping]] -= 1
        present[layer, rank[layer], expert[layer]] = True
        copies[layer, expert[layer]] += 1
        rank_loads[layer] = sums[layer]
        part = loads / copies
    return present
