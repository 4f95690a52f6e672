"""The time that an asynchronous save costs training, and the save interval that follows from it."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from meshwright.policies.checkpoint_times import auto_interval
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import AUTO_FIRST_SECONDS, CheckpointSpec
from meshwright.training import saving
from meshwright.training.saving import CheckpointTimer, SaveCost


def test_the_cost_of_a_save_is_the_extra_time_of_the_steps_during_it() -> None:
    cost = SaveCost()
    for seconds in (1.0, 1.1, 0.9, 1.0):
        cost.step(seconds, beside=False)
    cost.step(1.5, beside=True)
    assert cost.take() is None, "too few steps ran without a save"
    cost.step(1.0, beside=False)
    for seconds in (1.4, 1.0, 1.1):
        cost.step(seconds, beside=True)
    assert cost.take() == pytest.approx(0.5)
    assert cost.take() == 0.0, "each step counts once"
    cost.step(0.5, beside=True)
    assert cost.take() == 0.0, "a save costs nothing less than nothing"


def test_the_save_interval_follows_the_measured_cost_after_the_first_checkpoint() -> None:
    now = [0.0]
    with patch.object(saving.time, "monotonic", lambda: now[0]):
        timer = CheckpointTimer(CheckpointSpec(), ClusterSpec(nodes=512, host_mtbf_hours=1000.0))
        now[0] = AUTO_FIRST_SECONDS - 1
        assert not timer.due()
        now[0] += 1
        assert timer.due()
        timer.restart()
        timer.measured(1.0, 5.0)
        interval = auto_interval(1.0, 5.0, 512, 1000.0)
        assert 60 < interval < 200
        now[0] += interval - 1
        assert not timer.due()
        now[0] += 2
        assert timer.due()
