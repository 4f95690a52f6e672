"""A supervised job in one thread: real coordinator, real agents, simulated ranks, and a journal in memory that can fail."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.launch.test_coordinator_restart import CHECKPOINT_EVERY, STEPS, Clock, SimulatedRanks

from meshwright.events.messages import Checkpoint, Message, ProgressMessage, SelfTestResult
from meshwright.launch import agent as agent_module
from meshwright.launch import attempts, state_file
from meshwright.launch import coordinator as coordinator_module
from meshwright.launch.agent import Agent
from meshwright.launch.attempts import job_state
from meshwright.launch.coordinator import Coordinator, NoPlanForHosts
from meshwright.launch.reports import Directive, Report
from meshwright.launch.state_file import StateFile
from meshwright.policies import hang, supervision
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.supervision import Rules, State

FOLDER = Path("run")
HANG_SECONDS = 5.0
UNWRITABLE_SECONDS = 30.0
"""In place of five minutes, so that fewer rounds end a job."""
QUICK_ROUNDS, SLOW_ROUNDS = 30, 200
"""Rounds of 0.4 s, and then of 1.9 s, after the last fault in which a job has to end."""


class _Preparations:
    """The thread of a coordinator: prepares at once, or when `finish` is called if it is `slow`."""

    def __init__(self) -> None:
        self.slow = False
        self.error: Exception | None = None
        """What the next preparation raises."""
        self._waiting: list[tuple[Future[Any], Callable[[State], Path], State]] = []

    def submit(self, prepare: Callable[[State], Path], state: State) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, prepare, state))
        if not self.slow:
            self.finish()
        return future

    def finish(self) -> None:
        for future, prepare, state in self._waiting:
            error, self.error = self.error, None
            if error is None:
                future.set_result(prepare(state))
            else:
                future.set_exception(error)
        self._waiting = []

    def shutdown(self) -> None:
        pass


class _NoIncidents:
    """Takes incidents and writes nothing."""

    def record(self, *arguments: Any) -> Path:
        return FOLDER / "incidents" / "0001-0"

    def blame_host(self, host: str, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Journal(StateFile):
    """The states of the job in memory; writing fails while `error` is a number. `gone` is the answer to whether the folder is."""

    def __init__(self) -> None:
        super().__init__(FOLDER)
        self.states: list[State] = []
        self.begun: set[int] = set()
        self.error = 0
        self.gone = False

    def _append(self, state: State) -> None:
        if self.error:
            raise OSError(self.error, "the disk fails", str(FOLDER))
        self.states.append(state)
        if state.status == "running":
            self.begun.add(state.attempt)

    def _is_gone(self) -> bool:
        return self.gone


class Ranks(SimulatedRanks):
    """Simulated ranks that obey stop signals, can fail and hang; others of the job do not wait for them."""

    hung = False

    def poll(self, listener: Callable[[int, Message], None] | None = None, seconds: float = 0.0) -> None:
        if self._tests and listener is not None:
            self._tests = False
            listener(0, SelfTestResult("", ""))
        state = self.states[0]
        if not self._attempt or state.code is not None or self.hung:
            return
        step = (state.last_step or 0) + 1
        state.last_step, state.progress = step, ProgressMessage("train", step)
        state.progress_count += 1
        state.code = 0 if step == STEPS else None
        if step % CHECKPOINT_EVERY == 0 and state.rank == 0 and listener is not None:
            listener(0, Checkpoint(step, f"step-{step}"))

    def stop(self, number: int = signal.SIGTERM) -> None:
        if not self.hung:
            self.end(130 if number == signal.SIGINT else 75)

    def end(self, code: int) -> None:
        if self._attempt and self.states[0].code is None:
            self.states[0].code = code


class World:
    """Hosts, their agents and the coordinator; every method is a step that a real job can take."""

    def __init__(self, hosts: int) -> None:
        self.clock, self.journal = Clock(), _Journal()
        self.rules = Rules(hosts, 8, RestartPolicy(3))
        self.agents = [self._agent(number) for number in range(hosts)]
        self.codes: dict[int, int] = {}
        self.stop_code = 0
        self._pids = 0
        self._last: dict[int, Report] = {}
        self.coordinator = self._coordinator()

    def _agent(self, number: int, pid: int = 0) -> Agent:
        return Agent(f"host{number}/{pid}", lambda spare: Ranks(), FOLDER, clock=self.clock)

    def _coordinator(self) -> Coordinator:
        state = job_state(FOLDER) if self.journal.states else State(job="job")
        made = Coordinator(
            FOLDER, self.rules, 1, lambda state: FOLDER, state=state, hang_seconds=HANG_SECONDS, clock=self.clock
        )
        self.preparations = _Preparations()
        made._thread, made._incidents, made._file = self.preparations, _NoIncidents(), self.journal  # type: ignore[assignment]
        return made

    def written(self) -> State | None:
        """The newest state of the journal."""
        return self.journal.states[-1] if self.journal.states else None

    def report(self, number: int, *, lost: bool = False, repeated: bool = False) -> None:
        """An agent reports and obeys; the answer is `lost`, or the report before arrives once more first (`repeated`)."""
        if number in self.codes:
            return
        agent = self.agents[number]
        agent.poll(0.0)
        if repeated and number in self._last:
            self.coordinator.receive(self._last[number])
        report = agent.report()
        self._last[number] = replace(report, ranks=tuple(replace(rank) for rank in report.ranks))
        directive = self.coordinator.receive(report)
        self._check(directive)
        if lost:
            return
        agent.obey(directive)
        if directive.order == "exit":
            self.codes[number] = directive.code

    def _check(self, directive: Directive) -> None:
        """What an agent is told to begin has been written: a coordinator that is started again knows of it."""
        if directive.order == "run":
            assert directive.attempt in self.journal.begun

    def tick(self, seconds: float = 0.1) -> None:
        self.clock.now += seconds
        self.coordinator.tick()

    def toggle_disk(self, error: int = errno.ENOSPC) -> None:
        self.journal.error = 0 if self.journal.error else error

    def restart_coordinator(self) -> None:
        if self.coordinator.code is None:
            self.coordinator = self._coordinator()

    def toggle_preparations(self) -> None:
        self.preparations.slow = not self.preparations.slow
        if not self.preparations.slow:
            self.preparations.finish()

    def fail_preparation(self, error: Exception) -> None:
        """Let the next preparation fail; that of all hosts is possible, as it was before the job."""
        members = len(self.coordinator.state.members)
        if not isinstance(error, NoPlanForHosts) or 0 < members < self.rules.hosts:
            self.preparations.error = error

    def end_rank(self, number: int, code: int = -signal.SIGKILL) -> None:
        if isinstance(running := self.agents[number]._running, Ranks):
            running.end(code)

    def hang_rank(self, number: int) -> None:
        if isinstance(running := self.agents[number]._running, Ranks):
            running.hung = True

    def replace_agent(self, number: int) -> None:
        """An agent and its ranks die; another one is started on the host."""
        if number not in self.codes:
            self._pids += 1
            self.agents[number] = self._agent(number, self._pids)
            self._last.pop(number, None)

    def stop_agent(self, number: int) -> None:
        if number not in self.codes:
            self.stop_code = 75
            self.agents[number].stop(signal.SIGTERM)

    def end(self, *, disk_fails: bool) -> int:
        """Let the job go on without faults but that of the disk; returns its exit code. Fails if the job does not end."""
        self.journal.error = errno.ENOSPC if disk_fails else 0
        self.preparations.slow, self.preparations.error = False, None
        self.preparations.finish()
        for count in range(QUICK_ROUNDS + SLOW_ROUNDS):
            for number in range(len(self.agents)):
                self.report(number)
            self.tick(0.4 if count < QUICK_ROUNDS else 1.9)
            if len(self.codes) == len(self.agents):
                break
        assert len(self.codes) == len(self.agents), f"the job does not end: {self.coordinator.state}"
        assert len(set(self.codes.values())) == 1, self.codes
        return self.codes[0]


@contextmanager
def world(hosts: int, *, unwritable_seconds: float = UNWRITABLE_SECONDS) -> Iterator[World]:
    """A new job of `hosts` hosts, without disk and output, and with short limits."""
    with pytest.MonkeyPatch.context() as patch:
        made = World.__new__(World)
        patch.setattr(coordinator_module, "write_line", lambda text: None)
        patch.setattr(state_file, "write_line", lambda text: None)
        patch.setattr(state_file, "UNWRITABLE_SECONDS", unwritable_seconds)
        patch.setattr(coordinator_module, "present_steps", lambda folder: ())
        patch.setattr(attempts, "present_steps", lambda folder: ())
        patch.setattr(attempts, "recorded_skips", lambda folder: ())
        patch.setattr(attempts, "read_state", lambda folder: made.written())
        patch.setattr(agent_module.time, "sleep", lambda seconds: None)
        patch.setattr(supervision, "RETURN_SECONDS", 60.0)
        patch.setattr(hang, "PHASE_SECONDS", dict.fromkeys(hang.PHASE_SECONDS, 20.0))
        made.__init__(hosts)  # type: ignore[misc]
        yield made
