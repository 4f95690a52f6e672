"""Numbers the slots of all ranks in one common order, in which a divided sample has the same number on all its ranks.

In a pipeline, a rank computes the forwards of several slots before the first backward. Ranks that share a sample wait for each other in its
forward and in its backward. If each rank counted its own slots, one rank could wait in a forward for a rank that waits in a backward for
it: a deadlock. With common numbers, all ranks of a stage follow one schedule in one order. A rank leaves out the numbers for which it has
no slot.
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
    """Number of each slot, by rank and then by slot of the `Balance`. A rank without slots has a number for one empty slot."""


def slot_order(balance: Balance) -> SlotOrder:
    """The smallest common numbers for which the divided samples of each rank keep their order.

    Slots without a divided sample get the smallest numbers that are still free on their rank.
    """
    numbers = tuple(
        (*divided, *islice(_free(divided), max(slots, 1) - len(divided)))
        for divided, slots in zip(_numbers_of_divided(balance), balance.slots.tolist(), strict=True)
    )
    return SlotOrder(1 + max(map(max, numbers)), numbers)


def _free(used: Sequence[int]) -> Iterator[int]:
    """All numbers from 0 on that are not `used`, ascending."""
    taken = frozenset(used)
    return (number for number in count() if number not in taken)


def _numbers_of_divided(balance: Balance) -> list[list[int]]:
    """For each rank, the ascending numbers of its slots with divided samples. These are its first slots.

    A sample gets a number as soon as it is the next divided sample of all its ranks.
    """
    samples: list[list[int]] = [[] for _ in range(balance.pool.ranks)]
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for index in np.flatnonzero(balance.parts > 1).tolist():
        rank = int(balance.rank[index])
        sample = int(balance.sample[index])
        samples[rank].append(sample)
        ranks_of[sample].append(rank)
    numbers: list[list[int]] = [[] for _ in samples]
    waiting: Counter[int] = Counter()  # for each sample, how many ranks have reached it
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
