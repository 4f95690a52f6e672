"""The lines about a job's end, made from the messages and exit codes of its ranks."""

from __future__ import annotations

from pathlib import Path

from meshwright.events.messages import FailureMessage
from meshwright.launch.outcome import RankState, cause, exit_codes, outcome_lines
from meshwright.policies.job_end import culprit, job_code

LOGS = Path("/run/logs")
LOST = FailureMessage(5, "communication failed: Connection closed by peer")


def lines(*states: RankState) -> list[str]:
    return list(outcome_lines(states, LOGS))


def test_the_same_failure_of_several_ranks_is_one_line() -> None:
    full = FailureMessage(3, "saving step 4: no space left")
    assert lines(RankState(0, 3, full), RankState(1, 3, full)) == ["saving step 4: no space left"]


def test_the_failed_rank_is_reported_and_ranks_that_failed_because_of_it_are_not() -> None:
    torn = FailureMessage(4, "shard 3 is torn")
    assert lines(RankState(0, 5, LOST), RankState(1, 4, torn)) == ["rank 1: shard 3 is torn"]
    assert cause(RankState(1, 4, torn)) == "rank 1 failed: shard 3 is torn"


def test_what_a_rank_reported_counts_more_than_how_its_process_ended() -> None:
    """This also holds for a rank without an exit code: it has reported a failure, and its process has not ended yet."""
    states = [RankState(0, -6, FailureMessage(3, "out of memory")), RankState(1, 5), RankState(2, None, LOST)]
    assert exit_codes(states) == [3, 5, 5]
    assert culprit(exit_codes(states)) == 0 and job_code(exit_codes(states)) == 3


def test_an_internal_error_names_its_log_if_there_is_one() -> None:
    failure = FailureMessage(1, "internal error: KeyError: 3", "/run/logs/rank-00000.log")
    assert lines(RankState(0, 1, failure)) == [failure.message, "  traceback in /run/logs/rank-00000.log"]
    assert lines(RankState(0, 1, FailureMessage(1, "internal error: KeyError: 3"))) == ["internal error: KeyError: 3"]


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


def test_ranks_that_all_report_a_lost_connection_are_one_line() -> None:
    assert lines(RankState(0, 5, LOST), RankState(1, 5, LOST)) == [LOST.message]
