"""The agent of a host. It starts the host's ranks, reports their progress, and does what the coordinator's directives say.

The agent keeps one set of warm spares: processes that have imported everything and wait for an attempt to begin. If all ranks restart, the
spares take over at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.events.messages import Checkpoint, Corruption, Message, SelfTestResult, SkippedSamplesMessage
from meshwright.launch.health_monitor import HealthMonitor
from meshwright.launch.local import Listener, Ranks
from meshwright.launch.reports import Directive, Evidence, HostTest, Report
from meshwright.policies.job_end import STOP_EXIT_CODES
from meshwright.policies.skipped_samples import SampleRange
from meshwright.policies.supervision import LISTED_CHECKPOINTS
from meshwright.spec.errors import EXIT_INTERRUPTED, BadInput
from meshwright.spec.rank_environment import ATTEMPT_VARIABLE, PROGRAM_STOP
from meshwright.spec.run import RunSpec

SPARE_SECONDS = 3.0
"""Spares start after this many seconds of training.

A short run does not need spares, and starting processes takes processor time from the ranks.
"""

EVIDENCE_SECONDS = 5.0
"""The end of a job waits at most this long for the files of the last evidence to be written."""

DEAD_SPARES = 2
"""How many successive sets of spares the agent replaces because they ended while they waited.

After that, it keeps a set even if it has ended. Its processes become the ranks of the next attempt, and so report why they ended.
"""


def starts_spares(run: RunSpec) -> bool:
    """Whether spares start while ranks train.

    They do not if CPU ranks use all cores: even work at idle priority can delay the ranks' messages.
    """
    return run.supervision.restarts > 0 and not (run.cluster.is_cpu and run.train.keep_cores)


class _RunningTest:
    """A self-test of the waiting processes. It lasts until all have answered or its time is over."""

    def __init__(self, ranks: Ranks, attempt: int, deadline: float) -> None:
        self.attempt = attempt
        self._ranks = ranks
        self._deadline = deadline
        self._results: dict[int, SelfTestResult] = {}

    def poll(self, now: float) -> HostTest | None:
        """The result, once the test has ended; None before."""
        self._ranks.poll(self._take)
        states = self._ranks.states
        answered = {state.rank for state in states} <= self._results.keys()
        ended = [state for state in states if state.code is not None and state.rank not in self._results]
        if not answered and not ended and now < self._deadline:
            return None
        failures = [f"device {rank}: {result.failure}" for rank, result in self._results.items() if result.failure]
        exchanges = [f"device {rank}: {result.exchange}" for rank, result in self._results.items() if result.exchange]
        failures += [f"the process of device {state.rank} ended with exit code {state.code}" for state in ended]
        if not answered and not ended:
            exchanges.append("it did not answer in time")
        complete = answered and all(result.exchanged for result in self._results.values())
        return HostTest(self.attempt, "; ".join(failures)[:300], "; ".join(exchanges)[:300], complete)

    def _take(self, rank: int, message: Message) -> None:
        if isinstance(message, SelfTestResult):
            self._results[rank] = message


class Agent:
    """The ranks of this host: running ranks, and waiting processes."""

    def __init__(
        self,
        host: str,
        start: Callable[[bool], Ranks],
        folder: Path,
        *,
        address: str = "127.0.0.1",
        listener: Listener | None = None,
        spares: bool = True,
        health: HealthMonitor | None = None,
        report_defect: Callable[[str, str], object] = lambda host, cause: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start(spare)` starts waiting processes. If they are not spares, they open the device at once.

        No directive can make the agent read or write a file outside of the run's `folder`.

        Without `spares`, the processes for a restart start only when all ranks have ended. After a stop signal, no processes start. With
        `health`, the host counts as ready only after its health was read. If the host is excluded, `report_defect` is called once with host
        and cause.
        """
        self._host = host
        self._address = address
        self._start = start
        self._spares = spares
        self._folder = folder
        self._listener = listener
        self._clock = clock
        self._health = health
        self._running: Ranks | None = None
        self._waiting: Ranks | None = start(False)
        self._attempt = 0
        self._job = ""
        self._checkpoints: list[int] = []
        self._skipped: list[SampleRange] = []
        self._corruptions: list[Corruption] = []
        self._trained_at: float | None = None
        self._kill_at: float | None = None
        self._stop = self._dead_spares = 0
        self._drained = self._idles = False
        self._report_defect = report_defect
        self._test: _RunningTest | None = None
        self._tested: HostTest | None = None
        self._evidence: threading.Thread | None = None
        self._collected = Evidence()

    def poll(self, seconds: float) -> None:
        """Wait up to `seconds` for a message of a rank, and process the messages that have arrived."""
        if self._test is not None:
            self._poll_test(self._test)
        if self._running is None:
            time.sleep(seconds)
            return
        self._running.poll(self._listen, seconds)
        if self._trained_at is None and all(state.last_step for state in self._running.states):
            self._trained_at = self._clock()
        if self._kill_at is not None and self._clock() > self._kill_at:
            self._running.kill()
            self._running.poll(self._listen)

    def report(self) -> Report:
        """The state of this host, for the coordinator."""
        running = self._running
        self._drop_dead_spares()
        findings = self._health.findings() if self._health else ()
        known = self._health is None or self._health.known
        return Report(
            host=self._host,
            address=self._address,
            port=self._waiting.port if self._waiting and self._test is None and known else 0,
            attempt=self._attempt,
            ended=running is None or running.ended,
            ranks=tuple(running.states) if running else (),
            checkpoints=tuple(self._checkpoints),
            skipped=tuple(self._skipped),
            corruptions=tuple(self._corruptions),
            stop=self._stop,
            test=self._tested,
            findings=findings,
            job=self._job,
        )

    def obey(self, directive: Directive) -> None:
        """Carry out a directive of the coordinator."""
        self._job = directive.job
        self._collect(directive.evidence)
        if self._test is not None and (directive.order, directive.attempt) != ("test", self._test.attempt):
            self._test = None
            self._discard_waiting()  # they may be waiting for a peer that does not answer
        if directive.order == "test":
            self._begin_test(directive)
        if directive.order == "run" and directive.attempt > self._attempt:
            self._begin(directive)
        if directive.stop and not self._stop:
            self.stop(directive.stop)
        if directive.drain and directive.attempt == self._attempt and self._running is not None and not self._drained:
            self._drained = True
            self._running.stop(PROGRAM_STOP)
        if directive.order == "end" and directive.attempt == self._attempt:
            self._end(directive)
        if directive.order == "idle":
            self._discard_waiting()
            if not self._idles:
                self._idles = True
                self._report_defect(self._host, directive.cause)
        elif directive.order == "wait" or (directive.order == "end" and self._may_restart()) or self._wants_spares():
            self._waiting = self._waiting or self._start(True)

    def stop(self, number: int) -> None:
        """Pass a stop signal on to the ranks: at once, or as soon as they begin."""
        self._stop = STOP_EXIT_CODES[number]
        if self._running is not None:
            self._running.stop(number)

    def prepare_restart(self) -> None:
        """Start processes for the next attempt. The coordinator counts this host as lost, and its ranks make no progress."""
        if self._running is not None and not self._stop and not self._idles:
            self._waiting = self._waiting or self._start(True)

    def kill_at_once(self) -> None:
        """Send SIGKILL to all ranks without waiting. This is safe in a signal handler."""
        for ranks in (self._running, self._waiting):
            if ranks is not None:
                ranks.kill_at_once()

    def close_attempt(self) -> None:
        """End the last attempt: read its last messages and wait for its checkpoint writers."""
        if self._running is not None:
            self._running.close_attempt(self._listen)
        if self._evidence is not None:
            self._evidence.join(EVIDENCE_SECONDS)

    def close(self) -> None:
        """Kill all processes of this host."""
        for ranks in (self._running, self._waiting):
            if ranks is not None:
                ranks.discard()

    def _begin_test(self, directive: Directive) -> None:
        """Let the waiting processes run the self-test of an attempt, once."""
        if self._test is not None or (self._tested is not None and self._tested.attempt == directive.attempt):
            return
        self._waiting = self._waiting or self._start(True)
        self._test = _RunningTest(self._waiting, directive.attempt, self._clock() + directive.grace)
        self._waiting.request_self_test(self._variables(self._waiting, directive), directive.grace)

    def _poll_test(self, test: _RunningTest) -> None:
        result = test.poll(self._clock())
        if result is None:
            return
        self._test = None
        self._tested = result
        if result.failure or result.exchange:
            self._discard_waiting()

    def _discard_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.discard()
            self._waiting = None

    def _drop_dead_spares(self) -> None:
        """Discard spares that have ended while they waited. After `DEAD_SPARES` sets, the next set is kept and shows why it ended."""
        if self._waiting is None or self._test or not self._attempt or self._dead_spares >= DEAD_SPARES:
            return
        self._waiting.poll()
        if any(state.code is not None for state in self._waiting.states):
            self._waiting.discard()
            self._waiting = None
            self._dead_spares = self._dead_spares + 1

    def _begin(self, directive: Directive) -> None:
        """Let the waiting processes begin an attempt. They replace the processes of the attempt before."""
        assignment = self._inside(directive.assignment)
        if self._running is not None:
            self._running.discard()
        self._running = self._waiting or self._start(False)
        self._dead_spares = 0
        self._drained = False
        self._waiting = None
        self._trained_at = None
        self._kill_at = None
        self._attempt = directive.attempt
        self._checkpoints = []
        self._skipped = []
        self._corruptions = []
        variables = self._variables(self._running, directive)
        self._running.begin(assignment, directive.first_rank, variables)
        if self._stop:  # the signal arrived while no ranks were running
            self._running.stop(signal.SIGINT if self._stop == EXIT_INTERRUPTED else signal.SIGTERM)

    def _variables(self, ranks: Ranks, directive: Directive) -> list[dict[str, str]]:
        """For each process, the environment variables with which it becomes a rank of the attempt or self-test."""
        count = len(ranks.processes)
        job = {"WORLD_SIZE": directive.ranks, "LOCAL_WORLD_SIZE": count, ATTEMPT_VARIABLE: directive.attempt}
        job |= {"MASTER_ADDR": directive.address, "MASTER_PORT": directive.port}
        return [
            {
                name: str(value)
                for name, value in (job | {"RANK": directive.first_rank + local, "LOCAL_RANK": local}).items()
            }
            for local in range(count)
        ]

    def _end(self, directive: Directive) -> None:
        if self._kill_at is None and self._running is not None:
            self._kill_at = self._clock() + directive.grace
            self._running.request_end(directive.cause)

    def _collect(self, evidence: Evidence) -> None:
        """Collect the evidence of the attempt's ranks, once. Of ranks that have ended, there are logs and messages."""
        if self._running is None or not evidence.folder or evidence.attempt != self._attempt:
            return
        if evidence != self._collected:
            self._collected, folder = evidence, self._inside(evidence.folder)
            self._evidence = self._running.collect_evidence(folder, self._folder / "logs", hang=evidence.hang)

    def _inside(self, path: str) -> Path:
        """A path from a directive. Raises BadInput if it is outside of the run's folder, also if it leads there by a link."""
        own = os.path.realpath(self._folder)
        if "\0" in path or os.path.commonpath([own, os.path.realpath(path)]) != own:
            raise BadInput(
                f"the coordinator names {path[:300]!r}, which is not in the run's folder {own}; every host needs the same "
                "folder at the same path"
            )
        return Path(path)

    def _may_restart(self) -> bool:
        """Whether processes start when an attempt ends: not after a stop signal, and not if ranks of this host have no spares."""
        ended = self._running is None or self._running.ended
        return not self._stop and (self._spares or ended)

    def _wants_spares(self) -> bool:
        """Whether the attempt has trained long enough to start spares."""
        if self._running is None or self._running.ended or not self._spares:
            return False
        return self._trained_at is not None and self._clock() - self._trained_at > SPARE_SECONDS

    def _listen(self, rank: int, message: Message) -> None:
        if isinstance(message, Checkpoint):
            self._checkpoints = [*self._checkpoints, message.step][-LISTED_CHECKPOINTS:]
        if isinstance(message, SkippedSamplesMessage):
            self._skipped.append((message.first, message.end))
        if isinstance(message, Corruption):
            self._corruptions.append(message)
        if self._listener is not None:
            self._listener(rank, message)
