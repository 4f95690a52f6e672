"""Placement policies played over loads whose best placement is known."""

from __future__ import annotations

import numpy as np

from meshwright.policies.expert_costs import ExpertCosts
from meshwright.policies.expert_owners import even_owners
from meshwright.policies.expert_placement import place_experts
from meshwright.policies.expert_routing import owned
from meshwright.simulator.expert_loads import play_loads

OWNERS = even_owners(1, 4, 4)
COSTS = ExpertCosts(
    4, row_compute=1.0, row_inside=0.0, row_across=0.0, expert_inside=0.0, expert_across=0.0, hidden=0.0
)


def loads(popular: int) -> np.ndarray:
    """Each of four ranks sends all of its 100 rows to the expert `popular`."""
    counts = np.zeros((1, 4, 4), dtype=np.int64)
    counts[:, :, popular] = 100
    return counts


def test_a_step_is_placed_by_the_step_before_it() -> None:
    """After step 1 every rank has expert 0. Step 3 has another popular expert, which only its owner has until step 4."""
    played = play_loads(
        [loads(0), loads(0), loads(1), loads(1)], OWNERS, COSTS, place=place_experts, slots=1, initial=owned(OWNERS, 4)
    )
    assert played.imbalance.tolist() == [[1], [4], [1]]
    assert played.step_seconds.tolist() == [300, 1200, 300]


def test_without_a_policy_the_initial_placement_stays() -> None:
    played = play_loads([loads(0)] * 3, OWNERS, COSTS, initial=owned(OWNERS, 4))
    assert played.compute.tolist() == [[1200], [1200]] and played.imbalance.tolist() == [[4], [4]]


def test_a_window_keeps_loads_of_earlier_steps() -> None:
    """Step 3 is placed by step 2 alone, step 4 by steps 2 and 3, so all ranks have both popular experts then."""
    steps = [loads(0), loads(0), loads(3), loads(3)]
    played = play_loads(steps, OWNERS, COSTS, place=place_experts, slots=2, window=2)
    assert played.imbalance.tolist() == [[1], [4], [1]]
    played = play_loads([*steps, loads(0)], OWNERS, COSTS, place=place_experts, slots=2, window=4)
    assert played.imbalance.tolist() == [[1], [4], [1], [1]]
