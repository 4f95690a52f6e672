"""A run played through failures in abstract time agrees with the closed form."""

from __future__ import annotations

import pytest

from meshwright.policies.effective_time import FailureClass, FailureModel, effective_time
from meshwright.simulator.failures import simulate_failures
from meshwright.simulator.supervised import simulate_supervised
from tests.slow import quick_first

CLASSES = (
    FailureClass("process", 0.19, 1, 45, 1, 1),
    FailureClass("hang", 0.15, 35, 45, 1, 1),
    FailureClass("host", 0.66, 10, 45, 5, 10, loses_host=True),
)


@pytest.mark.parametrize(("hosts", "mttf_hours"), [(1536, 2.78), (16_384, 0.23)])
@pytest.mark.parametrize("spares", [0, 1, 4])
@pytest.mark.parametrize("wait", [None, 0.0, 60.0])
def test_events_and_closed_form_agree(hosts: int, mttf_hours: float, spares: int, wait: float | None) -> None:
    model = FailureModel(hosts, mttf_hours * 3600, 60.0, 0.1, CLASSES, spares, 600.0, wait, 50.0)
    assert simulate_failures(model) == pytest.approx(effective_time(model), abs=0.005)


def test_without_failures_only_checkpoints_cost_time() -> None:
    model = FailureModel(8, 1e9, 100.0, 1.0, (FailureClass("process", 1.0, 0, 0, 0),))
    assert simulate_failures(model, failures=5) == pytest.approx(100 / 101, rel=1e-4)


def test_a_single_host_waits_for_its_replacement() -> None:
    lost = (FailureClass("host", 1.0, 0, 0, 0, loses_host=True),)
    model = FailureModel(1, 3600.0, 10.0, 0.0, lost, 0, 3600.0, wait_seconds=0.0)
    assert simulate_failures(model) == pytest.approx(0.5, abs=0.01)


def test_the_same_seed_gives_the_same_result() -> None:
    model = FailureModel(100, 3600.0, 60.0, 0.1, CLASSES, 1, 600.0)
    assert simulate_failures(model, 500, seed=3) == simulate_failures(model, 500, seed=3)
    assert simulate_failures(model, 500, seed=3) != simulate_failures(model, 500, seed=4)


@pytest.mark.parametrize(
    ("spares", "hosts", "mttf_hours"),
    quick_first(
        1,
        [(4, 16_384, 0.23), (0, 1536, 2.78), (1, 1536, 2.78), (1, 16_384, 0.23), (4, 1536, 2.78), (0, 16_384, 0.23)],
        unpack=True,
    ),
)
def test_the_supervisor_s_decisions_and_closed_form_agree(spares: int, hosts: int, mttf_hours: float) -> None:
    model = FailureModel(hosts, mttf_hours * 3600, 60.0, 0.1, CLASSES, spares, 600.0)
    assert simulate_supervised(model).effective == pytest.approx(effective_time(model), abs=0.01)


def test_a_run_without_restarts_is_requeued_after_each_failure_of_a_process() -> None:
    """A failure every ten hours ends the job: 10 s until it is detected, 600 s of the scheduler, 30 s of start, lost steps."""
    crash = (FailureClass("process", 1.0, 10, 30, 0),)
    model = FailureModel(2, 36_000.0, 60.0, 0.0, crash)
    ended = simulate_supervised(model, restarts=0, failures=2_000)
    assert ended.requeues == pytest.approx(2_000, rel=0.05)
    assert ended.effective == pytest.approx(1 - (10 + 600 + 30 + 60 / 2) / 36_000, abs=0.002)
    assert simulate_supervised(model, restarts=3, failures=2_000).requeues == 0
