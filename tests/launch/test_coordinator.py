"""Reports of agents to a coordinator: attempts, hangs, suspects and evidence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshwright.events.messages import Corruption, ProgressMessage
from meshwright.launch.coordinator import Coordinator
from meshwright.launch.incidents import read_incidents
from meshwright.launch.outcome import RankState
from meshwright.launch.reports import Evidence, Report
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.supervision import Rules


def test_a_report_that_begins_an_attempt_adds_no_ranks_of_the_attempt_before(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, Rules(1, 8, RestartPolicy(3)), 1, lambda state: tmp_path)

    def until(status: str) -> None:
        while coordinator.state.status != status:
            coordinator.tick()
            time.sleep(0.001)

    coordinator.receive(Report("host", port=1))
    until("running")
    killed = (RankState(0, code=-9),)
    coordinator.receive(Report("host", attempt=1, ranks=killed))
    until("gathering")
    coordinator.receive(Report("host", port=2, attempt=1, ranks=killed))
    until("running")
    assert coordinator.state.attempt == 2
    coordinator.receive(Report("host", attempt=2, ranks=(RankState(0, code=0),)))
    until("finished")
    assert coordinator.code == 0
    coordinator.close()


def test_a_late_report_is_ignored(tmp_path: Path) -> None:
    """A cut network delivers a report when it works again. Its agent waits for the answer to another, and has to learn the end by that."""
    coordinator = Coordinator(tmp_path, Rules(1, 8, RestartPolicy(3)), 1, lambda state: tmp_path)

    def until(status: str) -> None:
        while coordinator.state.status != status:
            coordinator.tick()
            time.sleep(0.001)

    coordinator.receive(Report("host", port=1, number=1))
    until("running")
    late = Report("host", attempt=1, ended=False, ranks=(RankState(0, code=-9),), number=2)
    running = Report("host", attempt=1, ended=False, ranks=(RankState(0),), number=3)
    assert coordinator.receive(running).order == "run"
    assert coordinator.receive(late).order == "wait"
    assert coordinator.state.status == "running" and not coordinator.state.incidents
    ended = Report("host", attempt=1, ranks=(RankState(0, code=0),), number=4)
    coordinator.receive(ended)
    until("finished")
    assert coordinator.receive(late).order == "wait"
    assert coordinator.receive(Report("host", attempt=1, number=5)).order == "exit"
    assert not coordinator.uninformed
    coordinator.close()


def test_the_first_report_of_another_agent_with_the_name_of_a_lost_one_counts(tmp_path: Path) -> None:
    """A pod that is created again has the hostname and the process id of the one before."""
    now = [0.0]
    coordinator = Coordinator(tmp_path, Rules(2, 8, RestartPolicy(3)), 1, lambda state: tmp_path, clock=lambda: now[0])
    coordinator.receive(Report("pod/1", port=1, number=500))
    for _ in range(12):  # in steps of less than STOPPED_SECONDS
        now[0] += 1.0
        coordinator.tick()
    assert coordinator.hosts == ()
    coordinator.receive(Report("pod/1", port=1, number=1))
    assert coordinator.hosts == ("pod/1",) and coordinator.state.ready == ("pod/1",)
    coordinator.close()


def test_no_rank_counts_as_hung_while_a_host_is_not_heard(tmp_path: Path) -> None:
    """The link of host b is down for 3 s, just before its next report; the ranks make no progress for 5.6 s."""
    now = [0.0]
    coordinator = Coordinator(
        tmp_path, Rules(2, 8, RestartPolicy(3)), 1, lambda state: tmp_path, hang_seconds=5.0, clock=lambda: now[0]
    )
    for host in "ab":
        coordinator.receive(Report(host, port=1))
    while coordinator.state.status != "running":
        coordinator.tick()
        time.sleep(0.001)

    def train(until: float, hosts: str, *, progress: bool) -> None:
        """Reports of hosts every 0.1 s; ranks finish ten steps a second if they make progress."""
        while now[0] < until:
            now[0] += 0.1
            for rank, host in enumerate("ab"):
                step = 1 + round(10 * (now[0] if progress else progressed))
                state = RankState(rank, last_step=step, progress=ProgressMessage("train", step), progress_count=step)
                if host in hosts:
                    coordinator.receive(Report(host, attempt=1, ended=False, ranks=(state,)))
            coordinator.tick()

    progressed = 0.0
    train(10.0, "ab", progress=True)
    progressed = now[0]
    train(15.6, "a", progress=False)
    train(16.2, "ab", progress=False)
    assert coordinator.state.status == "running" and not coordinator.state.incidents
    train(22.5, "ab", progress=False)
    assert coordinator.state.incidents[-1].hang
    coordinator.close()


def test_corrupt_state_makes_its_host_a_suspect_and_is_recorded(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, Rules(2, 8, RestartPolicy(3)), 1, lambda state: tmp_path)
    for host in "ab":
        coordinator.receive(Report(host, port=1))
    while coordinator.state.status != "running":
        coordinator.tick()
        time.sleep(0.001)
    corruption = Corruption(1, 11, "silent corruption: on rank 1 (host b) norm.weight changed between two updates")
    for _ in range(2):
        ranks = (RankState(0, last_step=11, progress=ProgressMessage("train", 11)),)
        coordinator.receive(Report("a", attempt=1, ended=False, ranks=ranks, corruptions=(corruption,)))
    assert [suspect.host for suspect in coordinator.state.suspects] == ["b"]
    assert coordinator.state.status == "running"
    coordinator.close()
    (record,) = read_incidents(tmp_path)
    assert (record["cause"], record["rank"], record["host"], record["step"]) == ("corruption", 1, "b", 11)
    assert record["reason"] == corruption.cause
    assert record["answer"].endswith("host b runs the self-test before the next attempt")


def test_agents_learn_of_the_evidence_also_when_all_ranks_have_ended_and_the_next_attempt_is_prepared(
    tmp_path: Path,
) -> None:
    coordinator = Coordinator(tmp_path, Rules(1, 8, RestartPolicy(3)), 1, lambda state: tmp_path)
    coordinator.receive(Report("a", port=1))
    while coordinator.state.status != "running":
        coordinator.tick()
        time.sleep(0.001)
    killed = Report("a", port=1, attempt=1, ended=True, ranks=(RankState(0, -9, progress=ProgressMessage("train", 3)),))
    assert coordinator.receive(killed).order == "run"
    coordinator.tick()
    directive = coordinator.receive(killed)
    assert directive.order != "end" and coordinator.state.attempt == 2
    coordinator.close()
    (record,) = read_incidents(tmp_path)
    assert directive.evidence == Evidence(1, str(Path(record["evidence"]).absolute()))


@pytest.mark.parametrize(("code", "named"), [(5, (None, "b")), (1, (0, "a"))])
def test_a_host_that_does_not_answer_is_named_instead_of_a_rank_that_lost_it(
    tmp_path: Path, code: int, named: tuple[int | None, str]
) -> None:
    """Host b is silent; rank 0 on host a has lost its peer (code 5), or has failed by itself."""
    now = [0.0]
    coordinator = Coordinator(tmp_path, Rules(2, 8, RestartPolicy(3)), 1, lambda state: tmp_path, clock=lambda: now[0])
    for host in "ab":
        coordinator.receive(Report(host, port=1))
    while coordinator.state.status != "running":
        coordinator.tick()
        time.sleep(0.001)
    ended = Report("a", attempt=1, ended=True, ranks=(RankState(0, code=code, progress=ProgressMessage("train", 7)),))
    while "b" not in coordinator.state.lost:
        now[0] += 0.1
        coordinator.receive(ended)
        coordinator.tick()
    coordinator.close()
    (record,) = read_incidents(tmp_path)
    assert (record["rank"], record["host"]) == named and (record["cause"], record["step"]) == ("failure", 7)
    assert record["reason"].startswith("host b has not answered for 8 s; ") is (code == 5)
