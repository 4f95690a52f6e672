"""The exit code of a job and the lines about its end, from what the launcher knows of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.events.messages import Failure
from meshwright.launch.outcome import RankState, cause, culprit, job_code, outcome_lines

LOGS = Path("/run/logs")
LOST = Failure(5, "communication failed: Connection closed by peer")


def lines(*ends: RankState) -> list[str]:
    return list(outcome_lines(ends, LOGS))


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([RankState(0, 0), RankState(1, 0)], 0),
        ([RankState(0, 5), RankState(1, 4)], 4),
        ([RankState(0, 5), RankState(1, -9)], 5),
        ([RankState(0, 5, LOST), RankState(1, None, Failure(3, "disk full"))], 3),
        ([RankState(0, 75), RankState(1, 75)], 75),
        (
            [RankState(0, 75), RankState(1, 1)],
            1,
        ),  # a rank that crashed while the others saved: no reason to queue again
        ([RankState(0, -6), RankState(1, 1)], 1),  # NCCL's watchdog aborts the victims
        (
            [RankState(0, -6, Failure(3, "out of memory")), RankState(1, 5)],
            3,
        ),  # and ranks that report while they clean up
        ([RankState(0, None), RankState(1, None)], 0),
    ],
)
def test_the_code_is_that_of_the_first_own_failure(ends: list[RankState], code: int) -> None:
    assert job_code(ends) == code


def test_the_same_failure_of_several_ranks_is_one_line() -> None:
    full = Failure(3, "saving step 4: no space left")
    assert lines(RankState(0, 3, full), RankState(1, 3, full)) == ["saving step 4: no space left"]


def test_the_culprit_speaks_and_its_victims_do_not() -> None:
    torn = Failure(4, "shard 3 is torn")
    assert lines(RankState(0, 5, LOST), RankState(1, 4, torn)) == ["rank 1: shard 3 is torn"]
    first = culprit([RankState(0, 5, LOST), RankState(1, 4, torn)])
    assert first is not None and cause(first) == "rank 1 failed: shard 3 is torn"
    assert culprit([RankState(0, 0), RankState(1, None)]) is None


def test_an_internal_error_names_its_log_if_there_is_one() -> None:
    failure = Failure(1, "internal error: KeyError: 3", "/run/logs/rank-00000.log")
    assert lines(RankState(0, 1, failure)) == [failure.message, "  traceback in /run/logs/rank-00000.log"]
    assert lines(RankState(0, 1, Failure(1, "internal error: KeyError: 3"))) == ["internal error: KeyError: 3"]


def test_killed_and_silent_ranks_are_named_with_their_last_step() -> None:
    killed = lines(RankState(0, 5, LOST), RankState(1, -9, None, 7))
    assert killed == [
        "rank 1 was killed by signal 9 (Killed), often because the host ran out of memory; the last step it finished "
        "is 7; the ranks' logs are in /run/logs"
    ]
    silent = lines(RankState(0, 5, LOST), RankState(1, None))
    assert silent == [
        "rank 1 did not answer while others waited for it; it had not finished a step; the ranks' logs are in /run/logs"
    ]
    assert "ended with exit code 1 and without a message" in lines(RankState(0, 1))[0]


def test_a_failed_job_has_at_least_one_line() -> None:
    assert "rank 0 ended with exit code 5" in lines(RankState(0, 5), RankState(1, 5))[0]
    assert len(lines(RankState(0, 0), RankState(1, -6))) == 1


def test_peers_lost_elsewhere_are_one_line() -> None:
    assert lines(RankState(0, 5, LOST), RankState(1, 5, LOST)) == [LOST.message]
