"""Copies experts in proportion to their loads, and spreads the copies over nodes and ranks."""

from __future__ import annotations

import numpy as np

FRACTIONS = 4096
"""Target numbers of copies are rounded to multiples of 1 / FRACTIONS. Sums of such numbers are exact, hence equal on all ranks."""


def spread_copies(
    loads: np.ndarray, base: np.ndarray, free: np.ndarray, ranks_per_node: int, on_all: bool = False
) -> np.ndarray:
    """The experts on each rank, `(L, R, E)` bool: those in `base`, and copies in proportion to `loads` `(L, E)`.

    A rank gets at most `free` `(L, R)` copies. With `on_all`, each expert that no rank has in `base` gets a copy first, as long as there
    are slots.

    Slots are filled in turns. In a turn each rank with a free slot gets one expert, and the experts with the most rows per copy come first.
    Within a turn, the least loaded rank of each node comes first, so the copies of an expert are spread over nodes before they share a node
    (Hecate, arXiv 2502.02581, algorithm 1).
    """
    layers, ranks, experts = base.shape
    existing = base.sum(1)
    copies = _copy_numbers(loads, existing, free.sum(1), ranks, on_all)
    part = loads / np.maximum(existing + copies, 1)
    sequence = _copy_sequence(part, copies, int(max(free.sum(1).max(), copies.sum(1).max())) + ranks)
    on_rank, expert = np.divmod(np.flatnonzero(base), experts)
    rank_loads = np.bincount(on_rank, part[on_rank // ranks, expert], layers * ranks).reshape(layers, ranks)
    scale = 1 / np.maximum(loads.sum(1, keepdims=True) + 1, 1)
    present = base.copy()
    offset = np.zeros(layers, dtype=np.int64)
    layer = np.arange(layers)[:, None]
    turn_index = np.arange(ranks)
    for turn in range(int(free.max())):
        is_free = free > turn
        by_node = np.where(is_free, rank_loads, np.inf).reshape(layers, -1, ranks_per_node)
        in_node = by_node.argsort(2, kind="stable").argsort(2, kind="stable").reshape(layers, ranks)
        # The expert at the start of this turn may have got copies in the turn before. Ranks that have it already come last.
        holders = present[layer[:, 0], :, np.maximum(sequence[layer[:, 0], offset], 0)]
        order = (in_node + rank_loads * scale + ranks * holders + 2 * ranks * ~is_free).argsort(1, kind="stable")
        number = is_free.sum(1, keepdims=True)
        expert = sequence[layer, offset[:, None] + turn_index]
        used = (turn_index < number) & (expert >= 0)
        on_layer = np.broadcast_to(layer, used.shape)[used]
        present[on_layer, order[used], expert[used]] = True
        rank_loads[on_layer, order[used]] += part[on_layer, expert[used]]
        offset += number[:, 0]
    return present


def _copy_numbers(loads: np.ndarray, existing: np.ndarray, slots: np.ndarray, ranks: int, on_all: bool) -> np.ndarray:
    """Additional copies of each expert, `(L, E)`, that fill `slots` `(L,)`, chosen so that all experts have nearly equal rows per copy.

    `existing` `(L, E)` is the number of copies that there are already.
    """
    needed = (existing == 0).astype(np.int64) if on_all else np.zeros_like(existing)
    most = ranks - existing
    total = loads.sum(1, keepdims=True)
    target = loads * (slots[:, None] + existing.sum(1, keepdims=True)) / np.maximum(total, 1)
    missing = np.clip(target - existing - needed, 0, most - needed)
    missing = np.floor(missing * FRACTIONS) / FRACTIONS
    spare = np.maximum(slots - needed.sum(1), 0)
    fraction = np.minimum(spare / np.maximum(missing.sum(1), 1), 1)
    copies = needed + np.floor(missing * fraction[:, None]).astype(np.int64)
    unused = (slots - copies.sum(1))[:, None]
    per_copy = np.where((copies < most) & (loads > 0), loads / np.maximum(existing + copies, 0.5), -1)
    order = (-per_copy).argsort(1, kind="stable")
    first = order.argsort(1, kind="stable") < unused
    return copies + (first & (per_copy > 0))


def _copy_sequence(part: np.ndarray, copies: np.ndarray, length: int) -> np.ndarray:
    """Experts by descending rows per copy, each repeated `copies` `(L, E)` times; filled with -1 up to `length`."""
    layers = len(part)
    order = (-part).argsort(1, kind="stable")
    numbers = np.take_along_axis(copies, order, axis=1)
    used = np.arange(length) < copies.sum(1, keepdims=True)
    sequence = np.full((layers, length), -1, dtype=np.int64)
    sequence[used] = np.repeat(order.ravel(), numbers.ravel())
    return sequence
