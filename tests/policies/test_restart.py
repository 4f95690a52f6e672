from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.restart import LONGEST_DELAY, Incident, Restart, RestartPolicy, Stop, after_failure

KILLED = Incident(-9, "rank 1 was killed", 1, "a", 7)
POLICY, SKIPPING = RestartPolicy(5), RestartPolicy(5, "skip_data")


def decide(*incidents: Incident, policy: RestartPolicy = POLICY, trained: bool = True) -> Restart | Stop:
    return after_failure(incidents, policy, (2, 4, 6), trained=trained)


def test_the_first_failure_restarts_at_once_from_the_newest_checkpoint() -> None:
    assert decide(KILLED) == Restart()


def test_the_second_of_its_kind_takes_the_older_checkpoint_and_the_third_stops_with_7() -> None:
    assert decide(KILLED, KILLED) == Restart(2.0, resume_at_most=4)
    stop = decide(KILLED, KILLED, KILLED)
    assert isinstance(stop, Stop) and stop.code == 7
    assert stop.diagnosis == "the same failure occurred 3 times at step 7: rank 1 was killed"


def test_the_samples_of_a_step_that_fails_twice_are_skipped_if_the_run_says_so() -> None:
    assert decide(KILLED, KILLED, policy=SKIPPING) == Restart(2.0, skip_step=7)
    assert isinstance(decide(KILLED, KILLED, KILLED, policy=SKIPPING), Stop)
    saving = Incident(-9, "killed", 0, "a", 7, "save")
    assert decide(saving, saving, policy=SKIPPING) == Restart(2.0, resume_at_most=4), "its samples are trained"
    start = Incident(-9, "killed", 0, "a", None)
    assert decide(start, start, policy=SKIPPING) == Restart(2.0, resume_at_most=4)


@pytest.mark.parametrize("code", [2, 3, 4, 6, 75, 130])
def test_what_would_only_repeat_is_not_restarted(code: int) -> None:
    assert decide(Incident(code, "")) == Stop(code)


def test_an_internal_error_before_any_step_is_not_restarted() -> None:
    crash = Incident(1, "KeyError", 0, "a", None)
    assert isinstance(decide(crash, trained=False), Stop)
    assert decide(crash, trained=True) == Restart()


@given(st.lists(st.tuples(st.sampled_from([1, 5, -9, -11]), st.integers(1, 4)), max_size=30), st.integers(0, 5))
def test_restarts_are_bounded_and_delays_too(failures: list[tuple[int, int]], restarts: int) -> None:
    incidents: list[Incident] = []
    for code, step in failures:
        incidents.append(Incident(code, "", step=step))
        decision = after_failure(incidents, RestartPolicy(restarts), (), trained=True)
        if isinstance(decision, Stop):
            break
        assert decision.delay <= LONGEST_DELAY
    assert len(incidents) <= restarts + 1
