"""The exit code of a job and the lines about its end, from what the launcher knows of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.events.messages import Failure
from meshwright.launch.outcome import RankEnd, cause, job_code, outcome_lines

LOGS = Path("/run/logs")
LOST = Failure(5, "communication failed: Connection closed by peer")


def lines(*ends: RankEnd) -> list[str]:
    return list(outcome_lines(ends, LOGS))


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([RankEnd(0, 0), RankEnd(1, 0)], 0),
        ([RankEnd(0, 5), RankEnd(1, 4)], 4),
        ([RankEnd(0, 5), RankEnd(1, -9)], 5),
        ([RankEnd(0, 5, LOST), RankEnd(1, None, Failure(3, "disk full"))], 3),
        ([RankEnd(0, 75), RankEnd(1, 75)], 75),
        ([RankEnd(0, None), RankEnd(1, None)], 0),
    ],
)
def test_the_code_is_that_of_the_first_own_failure(ends: list[RankEnd], code: int) -> None:
    assert job_code(ends) == code


def test_the_same_failure_of_several_ranks_is_one_line() -> None:
    full = Failure(3, "saving step 4: no space left")
    assert lines(RankEnd(0, 3, full), RankEnd(1, 3, full)) == ["saving step 4: no space left"]


def test_the_culprit_speaks_and_its_victims_do_not() -> None:
    torn = Failure(4, "shard 3 is torn")
    assert lines(RankEnd(0, 5, LOST), RankEnd(1, 4, torn)) == ["rank 1: shard 3 is torn"]
    assert cause([RankEnd(0, 5, LOST), RankEnd(1, 4, torn)]) == "rank 1 failed: shard 3 is torn"


def test_an_internal_error_names_its_log_if_there_is_one() -> None:
    failure = Failure(1, "internal error: KeyError: 3", "/run/logs/rank-00000.log")
    assert lines(RankEnd(0, 1, failure)) == [failure.message, "  traceback in /run/logs/rank-00000.log"]
    assert lines(RankEnd(0, 1, Failure(1, "internal error: KeyError: 3"))) == ["internal error: KeyError: 3"]


def test_killed_and_silent_ranks_are_named_with_their_last_step() -> None:
    killed = lines(RankEnd(0, 5, LOST), RankEnd(1, -9, None, 7))
    assert killed == [
        "rank 1 was killed by signal 9 (Killed), often because the host ran out of memory; the last step it finished "
        "is 7; the ranks' logs are in /run/logs"
    ]
    silent = lines(RankEnd(0, 5, LOST), RankEnd(1, None))
    assert silent == [
        "rank 1 did not answer while others waited for it; it had not finished a step; the ranks' logs are in /run/logs"
    ]
    assert "ended with exit code 1 and without a message" in lines(RankEnd(0, 1))[0]


def test_peers_lost_elsewhere_are_one_line() -> None:
    assert lines(RankEnd(0, 5, LOST), RankEnd(1, 5, LOST)) == [LOST.message]
