"""Chooses the seeds of `tests/distributed/test_drawn.py`: few plans that together cover every pair of features.

`python -m tests.docs.seeds` prints them, seeds that add most pairs first. Run it again when the choices of `draw_case`
change.
"""

from __future__ import annotations

from itertools import combinations

from tests.distributed.drawn import DrawnCase, draw_case
from tests.distributed.test_drawn import FLOAT64, LOW, NARROW
from tools.features import FEATURES, ORDERS

CANDIDATE_SEEDS = 4000


def pairs(case: DrawnCase) -> set[tuple[str, str]]:
    """Returns the pairs of features in the plan."""
    names = [name for name, feature in (ORDERS | FEATURES).items() if feature.in_plan(case.plan, case.spec)]
    return set(combinations(names, 2))


def covering(pairs_of: dict[int, set[tuple[str, str]]]) -> list[int]:
    """Returns seeds that cover all pairs; each next seed covers most of the uncovered pairs."""
    uncovered, chosen = set().union(*pairs_of.values()), []
    while uncovered:
        chosen.append(max(pairs_of, key=lambda seed: len(pairs_of[seed] & uncovered)))
        uncovered -= pairs_of[chosen[-1]]
    return chosen


if __name__ == "__main__":
    for name, precision, compile in (
        ("", FLOAT64, False),
        ("_COMPILED", FLOAT64, True),
        ("_LOW", LOW, False),
        ("_NARROW", NARROW, False),
    ):
        pairs_of = {seed: pairs(draw_case(seed, precision, compile=compile)) for seed in range(CANDIDATE_SEEDS)}
        print(f"SEEDS{name} = {covering(pairs_of)}")
