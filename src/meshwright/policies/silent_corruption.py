"""Finds the rank with a wrong copy of replicated state: by majority, or by distance from a recomputed value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


def ranks_by_key(keys_by_rank: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """For each key that several ranks have, these ranks, ascending."""
    ranks: dict[int, list[int]] = {}
    for rank, keys in enumerate(keys_by_rank):
        for key in keys:
            ranks.setdefault(key, []).append(rank)
    return {key: tuple(owners) for key, owners in ranks.items() if len(owners) > 1}


def deviating_ranks(digests: Mapping[int, Hashable]) -> tuple[int, ...] | None:
    """The ranks whose copy differs from the copy that more than half of the ranks have; None if there is no such majority."""
    value, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return None
    return tuple(sorted(rank for rank, digest in digests.items() if digest != value))


def farthest_rank(distances: Mapping[int, float]) -> int | None:
    """The rank whose copy is farthest from the recomputed value; None if several are equally far.

    A wrong copy also changes the right copies slightly, because ranks sum their gradients. But the right copies stay near the recomputed
    value.
    """
    rank = max(distances, key=lambda rank: distances[rank])
    return rank if list(distances.values()).count(distances[rank]) == 1 else None
