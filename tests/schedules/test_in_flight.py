"""Closed-form micro-batches in flight against the peak of each schedule's actions."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.schedules.activation_residency import peak_in_flight
from meshwright.schedules.in_flight import NAMES, in_flight
from meshwright.schedules.registry import SCHEDULES, build, refusal

SIZES = [
    (ranks, micro, virtual)
    for ranks in (1, 2, 3, 4, 8)
    for micro in (1, 2, 3, 4, 6, 7, 8, 10, 12, 14, 16, 17, 18)
    for virtual in (1, 2, 3)
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_closed_form_equals_the_peak_of_the_schedule(name: str) -> None:
    checked = 0
    for ranks, micro, virtual in SIZES:
        if refusal(name, ranks, micro, virtual):
            continue
        peaks = [peak / virtual for peak in peak_in_flight(build(name, ranks, micro, virtual))]
        assert in_flight(NAMES.index(name), ranks, micro, virtual, np.arange(ranks)) == pytest.approx(peaks), (
            ranks,
            micro,
        )
        checked += 1
    assert checked >= 9


def test_in_flight_takes_arrays_of_schedules() -> None:
    numbers = [NAMES.index(name) for name in ("gpipe", "1f1b", "zbv")]
    assert in_flight(numbers, [4, 4, 4], [16, 16, 2], [1, 1, 2]).tolist() == [16, 4, 1.5]
