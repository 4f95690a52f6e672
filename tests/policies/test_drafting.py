"""When drafting pauses: played step by step against the rule in words."""

from __future__ import annotations

from itertools import pairwise

import pytest

from meshwright.policies.drafting import (
    DRAFTED_TOKENS,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    TRIAL,
    DraftPauses,
    least_accepted,
    most_drafting,
)


def drafted_steps(pauses: DraftPauses, steps: int, accepted: int) -> list[int]:
    """The steps in which request 7 may get drafts, of which each accepts so many."""
    drafted = []
    for step in range(steps):
        pauses.next_step()
        if 7 in pauses.drafting:
            drafted.append(step)
            pauses.record(7, accepted)
    return drafted


def test_a_request_without_accepted_drafts_tries_again_after_longer_and_longer_pauses() -> None:
    pauses = DraftPauses(0.3)
    pauses.begin(7)
    drafted = drafted_steps(pauses, 3000, 0)
    trials = [drafted[start : start + TRIAL] for start in range(0, len(drafted), TRIAL)]
    assert all(trial == list(range(trial[0], trial[0] + TRIAL)) for trial in trials[:-1])
    gaps = [after[0] - before[-1] - 1 for before, after in pairwise(trials)]
    assert gaps[:5] == [FIRST_PAUSE * 2**index for index in range(5)]
    assert set(gaps[4:]) == {LONGEST_PAUSE}


def test_accepted_drafts_keep_a_request_drafting_and_make_the_next_pause_short() -> None:
    pauses = DraftPauses(0.5)
    pauses.begin(7)
    drafted_steps(pauses, TRIAL + FIRST_PAUSE, 0)
    assert drafted_steps(pauses, 10 * TRIAL, 1) == list(range(10 * TRIAL))
    assert drafted_steps(pauses, 2 * TRIAL + FIRST_PAUSE, 0) == [
        *range(TRIAL),
        *range(TRIAL + FIRST_PAUSE, 2 * TRIAL + FIRST_PAUSE),
    ]


def test_requests_are_judged_alone_and_forgotten() -> None:
    pauses = DraftPauses(0.5)
    for number in (7, 8):
        pauses.begin(number)
    for _ in range(TRIAL):
        pauses.next_step()
        pauses.record(7, 0)
        pauses.record(8, 2)
    assert pauses.drafting == {8}
    pauses.end(7)
    pauses.end(8)
    pauses.record(8, 0)
    for _ in range(2 * FIRST_PAUSE):
        pauses.next_step()
    assert not pauses.drafting


def test_drafts_pay_for_their_step() -> None:
    """Tokens per time with as many accepted drafts as `least_accepted` says are those without drafts: 1 per step."""
    for drafts, cost, share in ((4, 0.3, 0.0), (5, 0.3, 0.1), (2, 1.0, 1.0)):
        step = 1 + cost + (drafts + 1) * share
        assert (1 + least_accepted(drafts, cost, share)) / step == pytest.approx(1)
    assert most_drafting(4) * 5 <= DRAFTED_TOKENS < (most_drafting(4) + 1) * 5
    assert most_drafting(DRAFTED_TOKENS) == 1
