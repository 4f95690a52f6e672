"""Exit code of a job, and the end of ranks that still run by its launcher; the clock is a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.job_end import (
    AGREEMENT_SECONDS,
    CULPRIT_SECONDS,
    GRACE_SECONDS,
    STOP_SECONDS,
    culprit,
    job_code,
    next_action,
)

CODES = st.lists(st.sampled_from([None, 0, 1, 2, 3, 4, 5, 6, 75, 130, -6, -9, -15]), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("codes", "rank", "code"),
    [
        ([0, 0], None, 0),
        ([None, None], None, 0),
        ([5, 4], 1, 4),
        ([5, -9], 1, 5),
        ([5, 3], 1, 3),
        ([75, 75], 0, 75),
        ([75, 1], 1, 1),  # a rank that crashed while the others saved: no reason to queue again
        ([-6, 1], 1, 1),  # NCCL's watchdog aborts the victims
        ([0, 5, 5], 1, 5),
        ([5, 130], 1, 130),
    ],
)
def test_the_code_is_that_of_the_first_own_failure(codes: list[int | None], rank: int | None, code: int) -> None:
    assert culprit(codes) == rank and job_code(codes) == code


@given(CODES)
def test_a_job_fails_exactly_if_a_rank_does(codes: list[int | None]) -> None:
    failed = [code for code in codes if code not in (None, 0)]
    assert (job_code(codes) != 0) == bool(failed) == (culprit(codes) is not None)
    assert job_code(codes) >= 0


@pytest.mark.parametrize(
    ("codes", "patience"),
    [
        ([75, None], STOP_SECONDS),
        ([5, None], CULPRIT_SECONDS),
        ([-6, 5, None], CULPRIT_SECONDS),
        ([3, None], AGREEMENT_SECONDS),
        ([75, 5, None], AGREEMENT_SECONDS),
    ],
)
def test_the_others_have_time_to_stop_or_the_culprit_to_show(codes: list[int | None], patience: float) -> None:
    assert next_action(codes, patience - 0.01, None) == "wait"
    assert next_action(codes, patience, None) == "request end"


@pytest.mark.parametrize("codes", [[None, -9], [5, None, -11]])
def test_a_killed_rank_ends_the_others_at_once(codes: list[int | None]) -> None:
    assert next_action(codes, 0.0, None) == "request end"


@given(CODES, st.floats(0, 100))
def test_ranks_that_were_told_to_end_have_their_grace(codes: list[int | None], since_failure: float) -> None:
    assert next_action(codes, since_failure, GRACE_SECONDS) == "wait"
    assert next_action(codes, since_failure, GRACE_SECONDS + 0.01) == "kill"
