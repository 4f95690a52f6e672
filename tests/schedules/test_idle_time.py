"""Closed-form idle time against simulated schedules."""

from __future__ import annotations

import pytest

from meshwright.schedules.idle_time import relative_idle_time
from meshwright.schedules.in_flight import NAMES
from meshwright.schedules.registry import build, entry_of, refusal
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timing import uniform_timing


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_closed_form_idle_time_equals_the_simulated_idle_time(name: str, ranks: int) -> None:
    virtual = entry_of(name).stages_per_rank.start
    for micro_batches in (ranks, 2 * ranks, 4 * ranks):
        if refusal(name, ranks, micro_batches, virtual):
            continue
        step_seconds = simulate(
            build(name, ranks, micro_batches, virtual), uniform_timing(ranks * virtual)
        ).step_seconds
        stage = 3.0 * virtual
        idle = (step_seconds - micro_batches * stage) / ((ranks - 1) * stage / virtual)
        assert float(relative_idle_time(NAMES.index(name), ranks, micro_batches)) == pytest.approx(idle, abs=0.01)
