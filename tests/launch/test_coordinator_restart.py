"""A coordinator that is started again continues a job from its file, wherever that was cut off."""

from __future__ import annotations

import copy
import itertools
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from meshwright.events.messages import Checkpoint, Message, ProgressMessage, SelfTestResult
from meshwright.launch import hosts as hosts_module
from meshwright.launch.agent import Agent
from meshwright.launch.attempts import finished_state, job_state
from meshwright.launch.control import ControlClient, ControlServer
from meshwright.launch.coordinator import Coordinator
from meshwright.launch.hosts import dismiss_agents
from meshwright.launch.local import Ranks
from meshwright.launch.outcome import RankState
from meshwright.launch.reports import Directive, Report
from meshwright.launch.state_file import STATE_FILE
from meshwright.policies.restart import RestartPolicy, Stop
from meshwright.policies.supervision import Rules, State
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_PREEMPTED
from meshwright.spec.rank_environment import ATTEMPT_VARIABLE

STEPS, CRASH_STEP, CHECKPOINT_EVERY = 12, 5, 4
RULES = Rules(2, 8, RestartPolicy(3))
ROUNDS = 2000
"""Most rounds of reports, 0.1 s each, that a job may take."""


class Clock:
    """Seconds that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def __deepcopy__(self, memo: object) -> Clock:
        return self


class SimulatedRanks(Ranks):
    """One rank of a host without a process: each poll finishes a step. Rank 1 crashes in its first attempt."""

    numbers = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        self.port, self.states = next(self.numbers), [RankState(0)]
        self.processes = [cast("subprocess.Popen[bytes]", None)]  # agents count them
        self._attempt, self._tests = 0, False

    def begin(
        self, assignment: Path, first_rank: int = 0, environments: Sequence[Mapping[str, str]] | None = None
    ) -> None:
        assert environments is not None
        self.states[0].rank, self._attempt = first_rank, int(environments[0][ATTEMPT_VARIABLE])

    def poll(self, listener: Callable[[int, Message], None] | None = None, seconds: float = 0.0) -> None:
        state = self.states[0]
        if self._tests and listener is not None:
            self._tests = False
            listener(0, SelfTestResult("", ""))
        if not self._attempt or state.code is not None:
            return
        step = (state.last_step or 0) + 1
        if self._attempt == 1 and step == CRASH_STEP:
            state.code = -signal.SIGSEGV if state.rank == 1 else None
            return
        state.last_step, state.progress = step, ProgressMessage("train", step)
        state.progress_count += 1
        state.code = 0 if step == STEPS else None
        if step % CHECKPOINT_EVERY == 0 and state.rank == 0 and listener is not None:
            listener(0, Checkpoint(step, f"step-{step}"))

    def request_self_test(self, environments: Sequence[Mapping[str, str]], seconds: float) -> None:
        self._tests = True

    def request_end(self, cause: str) -> None:
        self.kill()

    def collect_evidence(self, folder: Path, logs: Path, *, hang: bool) -> threading.Thread:
        """Collect nothing: there are no processes."""
        return cast("threading.Thread", None)

    def close(self) -> None:
        pass

    def kill(self) -> None:
        if self.states[0].code is None:
            self.states[0].code = EXIT_COMMUNICATION


def continue_job(
    folder: Path, agents: list[Agent], clock: Clock, after_round: Callable[[], object] = lambda: None
) -> tuple[list[int], State]:
    """Coordinate the agents until all have ended; returns their exit codes and the last state."""
    coordinator = Coordinator(
        folder, RULES, 1, lambda state: folder, state=job_state(folder), finished=finished_state(folder), clock=clock
    )
    codes: dict[int, int] = {}
    with closing(coordinator):
        for _ in range(ROUNDS):
            clock.now += 0.1
            for number, agent in enumerate(agents):
                if number in codes:
                    continue
                agent.poll(0.0)
                directive = coordinator.receive(agent.report())
                agent.obey(directive)
                if directive.order == "exit":
                    codes[number] = directive.code
            if coordinator._preparation is not None:
                coordinator._preparation.result()
            coordinator.tick()
            after_round()
            if len(codes) == len(agents):
                return [codes[number] for number in range(len(agents))], coordinator.state
    raise AssertionError(f"the job did not end: {coordinator.state}")


def new_agents(clock: Clock, folder: Path) -> list[Agent]:
    return [Agent(f"host{number}/1", lambda spare: SimulatedRanks(), folder, clock=clock) for number in range(2)]


def test_a_job_goes_on_from_each_record_of_its_file(tmp_path: Path) -> None:
    clock, recorded = Clock(), tmp_path / "recorded"
    agents = new_agents(clock, tmp_path)
    recorded.mkdir()
    file = recorded / STATE_FILE
    snapshots: list[list[Agent]] = []

    def keep_agents() -> None:
        lines = len(file.read_bytes().splitlines()) if file.exists() else 0
        snapshots.extend(copy.deepcopy(agents) for _ in range(lines - len(snapshots)))

    codes, state = continue_job(recorded, agents, clock, keep_agents)
    assert codes == [0, 0] and state.attempt == 2 and state.trained
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(snapshots) > 10
    statuses = set()
    for count in range(len(lines) + 1):
        # The agents as they were at the time of the record, and as they were when the job ended.
        for kept in {max(0, count - 1), len(lines) - 1}:
            folder = tmp_path / f"{count}-{kept}"
            folder.mkdir()
            (folder / STATE_FILE).write_bytes(b"".join(lines[:count]) + b'{"status": "run')
            again = copy.deepcopy(snapshots[kept])
            attempts = [agent.report().attempt for agent in again]
            codes, state = continue_job(folder, again, clock)
            assert codes == [0, 0], f"record {count}, agents of record {kept + 1}"
            statuses.add(state.status)
            last_attempts = [agent.report().attempt for agent in again]
            assert all(last >= first for first, last in zip(attempts, last_attempts, strict=True))
    assert statuses == {"finished", "gathering"}  # the latter if the job was over already


def test_agents_of_a_finished_job_learn_its_end_and_those_of_the_next_do_not(tmp_path: Path) -> None:
    finished = State("finished", attempt=3, stop=Stop(EXIT_PREEMPTED), job="before")
    coordinator = Coordinator(tmp_path, RULES, 1, lambda state: tmp_path, state=State(job="now"), finished=finished)
    answer = coordinator.receive(Report("a/1", attempt=3, job="before"))
    assert answer == Directive("exit", 3, code=EXIT_PREEMPTED, job="before")
    assert coordinator.hosts == ()
    assert coordinator.receive(Report("a/2")).order == "wait"
    assert coordinator.receive(Report("b/2", job="now")) == Directive("wait", job="now", heartbeat=0.2, standby=True)
    assert coordinator.hosts == ("a/2", "b/2")
    coordinator.close()


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_restarted_coordinator_dismisses_agents_and_starts_a_job_for_new_ones_only(
    newcomer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "FAREWELL_SECONDS", 1.0)
    finished = State("finished", attempt=1, stop=Stop(EXIT_PREEMPTED), job="before")
    listener = socket.create_server(("127.0.0.1", 0))
    answers: list[Directive] = []

    def ask() -> None:
        reports = [Report("a/1", attempt=1, job="before"), *([Report("a/2")] if newcomer else [])]
        for report in reports:
            with closing(ControlClient(listener.getsockname(), "a token of sixteen")) as client:
                answers.append(client.report(report))

    handlers: dict[str, Callable[[object], object]] = {}
    with closing(listener), closing(ControlServer(listener, "a token of sixteen", handlers)) as server:
        thread = threading.Thread(target=ask)
        thread.start()
        only_earlier = dismiss_agents(server, handlers, finished, until_another=True)
        for _ in range(20):
            server.serve(0.01)
        thread.join()
    assert only_earlier is not newcomer
    assert [(answer.order, answer.code) for answer in answers] == [("exit", EXIT_PREEMPTED), ("wait", 0)][
        : 1 + newcomer
    ]
