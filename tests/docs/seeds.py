"""Looks for the seeds of `tests/distributed/test_drawn.py`: few whose plans together have every pair of features that any plan has.

`python -m tests.docs.seeds` prints them, those first that add most. They are looked for anew when what is drawn from changes.
"""

from __future__ import annotations

from itertools import combinations

from tests.distributed.drawn import Drawn, drawn
from tests.distributed.test_drawn import FLOAT64, LOW, NARROW
from tests.docs.features import FEATURES, ORDERS

LOOKED_AT = 4000


def pairs(one: Drawn) -> set[tuple[str, str]]:
    """Features that meet in the plan."""
    held = [name for name, feature in (ORDERS | FEATURES).items() if feature.has(one.plan, one.spec)]
    return set(combinations(held, 2))


def covering(found: dict[int, set[tuple[str, str]]]) -> list[int]:
    """Seeds that have every pair of all, the next one always that which has most of those left."""
    left, chosen = set().union(*found.values()), []
    while left:
        chosen.append(max(found, key=lambda seed: len(found[seed] & left)))
        left -= found[chosen[-1]]
    return chosen


if __name__ == "__main__":
    for name, precision, compile in (
        ("", FLOAT64, False),
        ("_COMPILED", FLOAT64, True),
        ("_LOW", LOW, False),
        ("_NARROW", NARROW, False),
    ):
        found = {seed: pairs(drawn(seed, precision, compile=compile)) for seed in range(LOOKED_AT)}
        print(f"SEEDS{name} = {covering(found)}")
