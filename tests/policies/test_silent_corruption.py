"""The wrong copy is that of the minority, or the one farthest from the recomputed value; without either none is named."""

from __future__ import annotations

import math

from meshwright.policies.silent_corruption import deviating_ranks, farthest_rank, ranks_by_key


def test_keys_of_several_ranks_are_found() -> None:
    assert ranks_by_key([[1, 2], [2, 3], [3, 4, 2]]) == {2: (0, 1, 2), 3: (1, 2)}
    assert ranks_by_key([[1], [2]]) == {}


def test_the_minority_deviates() -> None:
    assert deviating_ranks({0: "a", 4: "b", 8: "a"}) == (4,)
    assert deviating_ranks({0: "a", 1: "b", 2: "a", 3: "a", 4: "c"}) == (1, 4)
    assert deviating_ranks({0: "a", 1: "a"}) == ()


def test_without_a_majority_no_rank_is_named() -> None:
    assert deviating_ranks({0: "a", 1: "b"}) is None
    assert deviating_ranks({0: "a", 1: "b", 2: "c"}) is None
    assert deviating_ranks({0: "a", 1: "b", 2: "a", 3: "b"}) is None


def test_the_farthest_copy_is_wrong() -> None:
    assert farthest_rank({0: 1e-7, 3: 0.5}) == 3
    assert farthest_rank({0: math.inf, 1: 0.5}) == 0
    assert farthest_rank({0: 0.25, 1: 0.25}) is None
