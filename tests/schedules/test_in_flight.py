"""Micro-batches alive in closed form against every schedule played."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.schedules.activation_residency import peak_in_flight
from meshwright.schedules.in_flight import NAMES, in_flight
from meshwright.schedules.registry import SCHEDULES, build, refusal

SIZES = [
    (ranks, micro, virtual) for ranks in (1, 2, 3, 4, 8) for micro in (1, 2, 3, 4, 7, 8, 17) for virtual in (1, 2, 3)
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_closed_form_is_what_the_schedule_holds(name: str) -> None:
    checked = 0
    for ranks, micro, virtual in SIZES:
        if refusal(name, ranks, micro, virtual):
            continue
        played = [held / virtual for held in peak_in_flight(build(name, ranks, micro, virtual))]
        assert in_flight(NAMES.index(name), ranks, micro, virtual, np.arange(ranks)) == pytest.approx(played), (
            ranks,
            micro,
        )
        checked += 1
    assert checked >= 9


def test_arrays_of_schedules_stand_side_by_side() -> None:
    numbers = [NAMES.index(name) for name in ("gpipe", "1f1b", "zbv")]
    assert in_flight(numbers, [4, 4, 4], [16, 16, 2], [1, 1, 2]).tolist() == [16, 4, 1.5]
