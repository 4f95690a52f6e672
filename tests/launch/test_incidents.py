"""Records of failures, and the evidence that an agent collects of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from meshwright.cli.incidents import incident_lines, incidents
from meshwright.diagnosis.culprit import Culprit, Waiting
from meshwright.events.messages import CHANNEL, CollectivesRequest, ProgressMessage, encode
from meshwright.events.stacks import STACKS, evidence_memory
from meshwright.launch import evidence
from meshwright.launch.evidence import CRASH_SECONDS, HANG_SECONDS, SILENT_SECONDS, RankProcess, collect
from meshwright.launch.incidents import KEPT, blamed, is_recorded, new_folder, read_incidents, write_incident
from meshwright.launch.outcome import RankState
from meshwright.policies.restart import Incident
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_PREEMPTED

RANKS = [
    RankState(0, progress=ProgressMessage("train", 41, 3)),
    RankState(1, progress=ProgressMessage("train", 41, 7), stopped=True),
]
HANG = Incident(EXIT_COMMUNICATION, "rank 1 has made no progress", 1, "b", 41, hang=True)
ENTRY = {"profiling_name": "gloo:all_reduce", "process_group": ["1", "shard"], "is_p2p": False, "collective_seq_id": 7}
ENTRY |= {"retired": False, "state": "scheduled", "input_sizes": [[4]]}
CHILD = f"""
import json, sys, threading, time, types
dump = json.dumps({{"entries": [{ENTRY!r}], "version": "2.10"}}).encode()
sys.modules["torch._C._distributed_c10d"] = types.SimpleNamespace(_dump_fr_trace_json=lambda: dump)
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.training.lifecycle import RankLife
from meshwright.training.stop import StopRequest
RankLife(RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0), StopRequest())
def wait_for_peer():
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=wait_for_peer, name="second").start()
"""


def test_a_record_says_who_did_what_and_who_waited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = (Waiting(0, 1, "activation"),)
    culprit = Culprit(1, "b", 41, "forward 2.3", 12.1, "rank 1 on b is in forward 2.3", "certain", waiting)
    folder = new_folder(tmp_path, HANG.step)
    write_incident(folder, HANG, 2, "restart 1 of 3", RANKS, {0: "a", 1: "b"}, None, culprit)
    (record,) = read_incidents(tmp_path)
    assert folder.name == "0001-41" and record["evidence"] == str(folder)
    assert (record["cause"], record["rank"], record["host"], record["attempt"]) == ("hang", 1, "b", 2)
    assert record["waiting"] == [{"rank": 0, "for_rank": 1, "needs": "activation"}]
    assert [rank["stopped"] for rank in record["ranks"]] == [False, True]
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").touch()
    incidents(tmp_path)
    printed = capsys.readouterr().out
    assert "step 41, attempt 2: hang" in printed and "cause (certain): rank 1 on b in forward 2.3" in printed
    assert "restart 1 of 3" in printed and str(folder) in printed


def test_a_rank_that_raised_an_error_is_the_first_to_fail() -> None:
    record = {"time": 0.0, "step": 2, "attempt": 1, "cause": "failure", "rank": 0, "host": "a", "action": "end"}
    record |= {"confidence": "certain", "reason": "r", "answer": "b", "evidence": "e"}
    assert incident_lines(record)[1] == "  first to fail (certain): rank 0 on a"
    assert incident_lines({**record, "cause": "hang"})[1] == "  cause (certain): rank 0 on a as it ended"
    assert incident_lines({**record, "rank": None})[1] == "  cause (certain): no single rank"


def test_old_incidents_are_removed_and_numbers_go_on(tmp_path: Path) -> None:
    for step in range(KEPT + 5):
        new_folder(tmp_path, step)
    names = sorted(path.name for path in (tmp_path / "incidents").iterdir())
    assert len(names) == KEPT and (names[0], names[-1]) == ("0006-5", f"{KEPT + 5:04d}-{KEPT + 4}")


def test_numbers_of_incidents_may_have_five_digits(tmp_path: Path) -> None:
    (tmp_path / "incidents" / "9999-1").mkdir(parents=True)
    (tmp_path / "incidents" / "notes-1").mkdir()
    assert [new_folder(tmp_path, step).name for step in (2, 3)] == ["10000-2", "10001-3"]
    for step in range(KEPT - 1):
        new_folder(tmp_path, step)
    assert not (tmp_path / "incidents" / "9999-1").exists() and (tmp_path / "incidents" / "10001-3").exists()


def test_a_stopped_rank_is_named_when_the_others_report_a_lost_peer() -> None:
    loss = Incident(EXIT_COMMUNICATION, "rank 0 lost the others", 0, "a", 41)
    hosts = {0: "a", 1: "b"}
    named = blamed(loss, RANKS, hosts)
    assert (named.rank, named.host, named.cause) == (1, "b", "rank 1 is stopped; rank 0 lost the others")
    assert blamed(loss, RANKS[:1], hosts) == loss
    assert blamed(replace(loss, code=-9), RANKS, hosts).rank == 0


def test_requests_to_stop_are_no_incidents() -> None:
    assert not is_recorded(Incident(EXIT_PREEMPTED, "SIGTERM"), (EXIT_PREEMPTED,))
    assert is_recorded(Incident(-9, "killed"), (EXIT_PREEMPTED,))


def test_evidence_has_the_stacks_of_all_threads_and_waits_for_no_stopped_process(tmp_path: Path) -> None:
    subjects, processes = [], []
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00000.log").write_text("x" * 10_000 + "\nlast words\n")
    for rank, script in enumerate((CHILD, CHILD, "print('ready', flush=True); import time; time.sleep(60)")):
        stacks = evidence_memory()
        _, channel = os.pipe()
        env = {**os.environ, STACKS: f"/proc/{os.getpid()}/fd/{stacks}", CHANNEL: str(channel)}
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env=env,
            pass_fds=[channel],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        subjects.append(RankProcess(process.pid, RankState(rank), stacks))
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        processes[1].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, processes[1].pid, os.WSTOPPED | os.WNOWAIT)
        subjects[1].state.stopped = True
        for hang, limit in ((False, CRASH_SECONDS), (True, HANG_SECONDS)):
            for process, subject in zip(processes, subjects, strict=True):
                assert process.stdin is not None
                subject.collectives = evidence_memory()
                request = encode(CollectivesRequest(f"/proc/{os.getpid()}/fd/{subject.collectives}"))
                subject.request_collectives = partial(os.write, process.stdin.fileno(), request)
            began = time.monotonic()
            collect(subjects, tmp_path / "incident", tmp_path / "logs", hang=hang).join()
            assert time.monotonic() - began < limit + 1.0
        assert [process.poll() for process in processes] == [None] * 3
    finally:
        for process in processes:
            process.kill()
            process.wait()
    first, stopped, without = ((tmp_path / "incident" / "stacks" / f"rank-{rank}.txt").read_text() for rank in range(3))
    assert "in wait_for_peer" in first and first.count("most recent call first") >= 2
    assert "last words\n" in first and len(first) < 20_000
    assert first.endswith("== unfinished collectives\ngloo:all_reduce 7 of group 1 shard, [[4]], scheduled\n")
    record = json.loads((tmp_path / "incident" / "collectives" / "rank-0.json").read_text())
    assert record == {"gloo": {"entries": [{**ENTRY, "finished": False}], "version": "2.10"}}
    assert [path.name for path in (tmp_path / "incident" / "collectives").iterdir()] == ["rank-0.json"]
    assert "it is stopped" in stopped and "State:\tT (stopped)" in stopped
    assert "none: the process did not write them" in without


class Clock:
    """Time that passes only in `sleep`; `events` are called once their time has come."""

    def __init__(self, events: dict[float, Callable[[], object]]) -> None:
        self.now, self.events = 0.0, dict(sorted(events.items()))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and next(iter(self.events)) <= self.now:
            self.events.pop(next(iter(self.events)))()


@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        ({0.01: 0, 0.02: 1}, 0.02),
        ({0.01: 0}, 0.01 + SILENT_SECONDS),
        ({0.01: 0, 0.2: 0, 0.3: 0}, 0.3 + SILENT_SECONDS),
        ({0.01: 0, 0.24: 1}, 0.24),
        ({0.9: 0}, HANG_SECONDS),
        ({}, HANG_SECONDS),
    ],
)
def test_a_rank_that_cannot_answer_is_awaited_shortly_after_the_answers_of_others(
    monkeypatch: pytest.MonkeyPatch, answers: dict[float, int], ends: float
) -> None:
    """`answers` has by time the rank that writes more stacks."""
    files = [evidence_memory() for _ in range(2)]
    clock = Clock({at: partial(os.write, files[rank], b"stack") for at, rank in answers.items()})
    monkeypatch.setattr(evidence, "time", clock)
    evidence._await_answers(files, HANG_SECONDS)
    assert clock.now == pytest.approx(ends, abs=3 * evidence.POLL_SECONDS)


PY_SPY = """#!/bin/sh
grep -q '^State:.T' /proc/$4/status || exec sleep 60
echo "Thread 7 (idle): $*"
"""


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `py-spy` on PATH that answers for a stopped process, and does not end for another one."""
    script = tmp_path / "bin" / "py-spy"
    script.parent.mkdir()
    script.write_text(PY_SPY)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(evidence, "HANG_SECONDS", 60.0)


@pytest.mark.usefixtures("py_spy")
def test_after_a_hang_py_spy_reads_the_stacks_of_a_stopped_rank(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    subject = RankProcess(process.pid, RankState(0), evidence_memory())
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        for hang in (False, True):
            collect([subject], tmp_path / str(hang), tmp_path, hang=hang).join()
    finally:
        process.kill()
        process.wait()
    crash, hang = ((tmp_path / name / "stacks" / "rank-0.txt").read_text() for name in ("False", "True"))
    assert f"== py-spy\nThread 7 (idle): dump --nonblocking --pid {process.pid}\n" in hang
    assert "py-spy" not in crash


@pytest.mark.usefixtures("py_spy")
def test_py_spy_is_killed_at_the_deadline() -> None:
    spy = evidence._spy(os.getpid())
    assert spy is not None
    assert evidence._spy_output(spy, time.monotonic()) == "py-spy did not answer in time\n"
    assert spy.returncode == -signal.SIGKILL


def test_without_py_spy_none_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert evidence._spy(os.getpid()) is None
