"""The culprit of a hang: injections into played schedules, and single rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.diagnosis.culprit import RankStatus, find_culprit
from meshwright.events.progress import PendingWait
from meshwright.schedules.expand import expand
from meshwright.schedules.registry import build
from meshwright.spec.layout import Layout
from tests.diagnosis.stalled import stalls

COUNT = 280
RIGHT = 0.95
"""Least share of injections whose culprit is named."""


SCHEDULE = expand(build("1f1b", 2, 4), 1)
LAYOUT = Layout((("pipeline", 2), ("shard", 2)), 2)
SUM = PendingWait("all_reduce", -1, -1, -1, -1, 0)


@pytest.mark.parametrize("count", [COUNT // 2, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_the_culprit_of_injected_stalls_is_named(count: int) -> None:
    wrong = []
    for stall in stalls(count, seed=31):
        culprit = stall.named()
        assert culprit is not None
        if culprit.rank != stall.culprit:
            wrong.append(f"{stall.text}; named {culprit.confidence}: {culprit.reason}")
            assert culprit.confidence == "likely", wrong[-1]
    assert len(wrong) <= (1 - RIGHT) * count, "\n".join(wrong)


def at(rank: int, step: int, action: int, phase: str = "train", pending: PendingWait | None = None) -> RankStatus:
    return RankStatus(rank, f"host-{rank // 2}", phase, step, action, 10.0, pending=pending)


def test_a_rank_that_has_not_begun_the_step_holds_up_the_others() -> None:
    last = len(SCHEDULE.actions[1]) - 1
    ranks = [at(0, 8, 0, pending=SUM), at(1, 8, 0, pending=SUM), at(2, 7, 0, "save"), at(3, 8, 0, pending=SUM)]
    culprit = find_culprit(ranks, SCHEDULE, LAYOUT)
    assert culprit is not None
    assert (culprit.rank, culprit.action, culprit.confidence) == (2, "save", "certain")
    assert {wait.rank for wait in culprit.waiting} == {0, 1, 3}
    ends = [at(rank, 8, len(SCHEDULE.actions[rank // 2]) - 1, pending=SUM) for rank in range(4)]
    ends[3] = at(3, 8, last)  # in the optimizer
    culprit = find_culprit(ends, SCHEDULE, LAYOUT)
    assert culprit is not None
    assert (culprit.rank, culprit.action, culprit.confidence) == (3, "optim", "certain")


def test_the_reason_names_host_action_and_waiting_ranks() -> None:
    first, second = ([str(a) for a in actions] for actions in SCHEDULE.actions)
    receive = PendingWait("recv", 1, 1, -1, 0, 0)
    ranks = [
        at(0, 41, first.index("F0.1/0")),
        at(1, 41, first.index("F0.2/0")),
        at(2, 41, second.index("F1.1/0"), pending=receive),
        at(3, 41, second.index("F1.1/0")),
    ]
    ranks[1] = replace(ranks[1], action=first.index("F0.1/0") + 1, pending=None)
    culprit = find_culprit(ranks, SCHEDULE, LAYOUT)
    assert culprit is not None
    assert culprit.rank == 0
    assert culprit.reason.startswith("rank 0 on host-0 is in forward 0.1/0 of step 41 since 10.0 s; rank")
    assert "for its activation" in culprit.reason


def test_a_stopped_or_dead_rank_is_named_before_others() -> None:
    ranks = [at(rank, 5, 2) for rank in range(4)]
    for name in ("stopped", "dead"):
        marked = [replace(status, **{name: status.rank == 2}) for status in ranks]
        culprit = find_culprit(marked, SCHEDULE, LAYOUT)
        assert culprit is not None
        assert culprit.rank == 2
        without = find_culprit(marked, None, LAYOUT)
        assert without is not None
        assert without.rank == 2


@pytest.mark.parametrize("action", [0, len(SCHEDULE.actions[0]) - 1])
def test_the_others_wait_for_a_rank_that_stopped_in_a_sum_over_all_ranks(action: int) -> None:
    last = [len(actions) - 1 for actions in SCHEDULE.actions]
    ranks = [at(rank, 5, action and last[rank // 2], pending=SUM) for rank in range(4)]
    ranks[2] = replace(ranks[2], stopped=True)
    culprit = find_culprit(ranks, SCHEDULE, LAYOUT)
    assert culprit is not None
    assert (culprit.rank, culprit.confidence) == (2, "certain")
    assert {wait.rank for wait in culprit.waiting} == {0, 1, 3}


@pytest.mark.parametrize("ranks", [[], [at(0, 3, 0, "save"), at(1, 3, 0, "validate")]])
def test_without_a_training_step_the_first_in_order_is_named(ranks: list[RankStatus]) -> None:
    culprit = find_culprit(ranks, SCHEDULE, LAYOUT)
    assert (culprit and culprit.rank) == (1 if ranks else None)


def test_a_job_of_thousands_of_ranks_is_replayed() -> None:
    layout = Layout((("replicate", 8), ("pipeline", 8), ("shard", 16)), 8)
    schedule = expand(build("1f1b", 8, 16), 2)
    ranks = [
        at(rank, 9, len(schedule.actions[layout.coordinates(rank)["pipeline"]]) - 1) for rank in range(layout.ranks)
    ]
    ranks[700] = replace(ranks[700], action=40)
    culprit = find_culprit(ranks, schedule, layout, hosts_wait=False)
    assert culprit is not None
    assert (culprit.rank, culprit.confidence, len(culprit.waiting)) == (700, "certain", layout.ranks - 1)
