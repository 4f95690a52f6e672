"""Gives the slots of all ranks common numbers, in which a divided sample has the same number on all its ranks.

In a pipeline a rank runs the forwards of several slots before the first backward, and ranks that share a sample wait for each other in
its forward and in its backward. If each rank counted its own slots, one could wait in a forward for a rank that waits in a backward for
it. With common numbers all ranks of a stage run parts of one schedule in one order; a rank leaves out the numbers for which it has no
slot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from meshwright.policies.sample_balance import Balance


@dataclass(frozen=True)
class SlotOrder:
    """The numbers of all slots."""

    count: int
    """Numbers are at least 0 and below this."""
    numbers: tuple[tuple[int, ...], ...]
    """Number of each slot, by rank and slot of the `Balance`; a rank without slots has a number for an empty one."""


def slot_order(balance: Balance) -> SlotOrder:
    """The smallest common numbers with which the divided samples of each rank keep their order.

    Slots of whole samples take the numbers that their rank has free.
    """
    numbers = tuple(
        (*divided, *islice(_free(divided), max(slots, 1) - len(divided)))
        for divided, slots in zip(_numbers_of_divided(balance), balance.slots.tolist(), strict=True)
    )
    return SlotOrder(1 + max(map(max, numbers)), numbers)


def _free(used: Sequence[int]) -> Iterator[int]:
    """All numbers from 0 but those `used`."""
    taken = frozenset(used)
    return (number for number in count() if number not in taken)


def _numbers_of_divided(balance: Balance) -> list[list[int]]:
    """By rank, the rising numbers of its slots with divided samples, which are its first slots.

    A sample gets its number once it is the next one of all its ranks.
    """
    samples: list[list[int]] = [[] for _ in range(balance.pool.ranks)]
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for index in np.flatnonzero(balance.parts > 1).tolist():
        rank = int(balance.rank[index])
        sample = int(balance.sample[index])
        samples[rank].append(sample)
        ranks_of[sample].append(rank)
    numbers: list[list[int]] = [[] for _ in samples]
    waiting: Counter[int] = Counter()  # by sample, the ranks that have reached it
    changed = list(range(len(samples)))
    while changed:
        rank = changed.pop()
        if len(numbers[rank]) == len(samples[rank]):
            continue
        sample = samples[rank][len(numbers[rank])]
        waiting[sample] += 1
        if waiting[sample] == len(ranks_of[sample]):
            number = max(numbers[other][-1] + 1 if numbers[other] else 0 for other in ranks_of[sample])
            for other in ranks_of[sample]:
                numbers[other].append(number)
            changed += ranks_of[sample]
    assert [*map(len, numbers)] == [*map(len, samples)], "ranks have the samples that they share in one order"
    return numbers
