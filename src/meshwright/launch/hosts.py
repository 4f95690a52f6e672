"""A supervised run on several hosts: the coordinator process, and the agent process of each host.

Agents look for the coordinator at `MESHWRIGHT_COORDINATOR`. If nothing listens there and the address belongs to this host, the agent starts
the coordinator as a separate process, which survives the agent. The coordinator holds a lease (`policies.coordinator_lease`). If the
coordinator or its host is lost, agents start new candidates; one of them takes the lease, and agents find its address there. All hosts
share the run's folder.
"""

from __future__ import annotations

import errno
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import astuple, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshwright.checkpoint.memory.transport import SERVER_VARIABLE
from meshwright.connections.accept import listen_at
from meshwright.connections.limits import raise_file_limit
from meshwright.connections.proof import WrongProof
from meshwright.durable.lock import break_lock, this_process
from meshwright.events.terminal import write_line
from meshwright.launch.agent import Agent, starts_spares
from meshwright.launch.control import (
    ControlClient,
    ControlServer,
    Handler,
    NoCoordinator,
    coordinator_address,
)
from meshwright.launch.coordinator import SILENT_SECONDS, Coordinator, exit_directive
from meshwright.launch.coordinator_lease import (
    SEEN_VARIABLE,
    CoordinatorWatch,
    HeldLease,
    LeaseTaken,
    StartedProcess,
    lease_clock,
    own_machine,
    take_coordinator_lease,
)
from meshwright.launch.defect_report import DefectReporter
from meshwright.launch.folder import folder_lock
from meshwright.launch.health_monitor import health_monitor
from meshwright.launch.lease_store import lease_store
from meshwright.launch.local import POLL_SECONDS, empty_snapshot_buffers, forward_signals, rank_starter
from meshwright.launch.machine import check_devices
from meshwright.launch.metrics_endpoint import metrics_endpoint
from meshwright.launch.orphans import end_orphans
from meshwright.launch.outcome import RankState
from meshwright.launch.progress_file import ProgressFile
from meshwright.launch.reports import Directive, Report
from meshwright.launch.snapshot_server import snapshot_server
from meshwright.launch.state_file import STATE_FILE
from meshwright.policies.coordinator_lease import LEASE_SECONDS, CoordinatorLease
from meshwright.policies.host_health import HealthFinding, is_rule
from meshwright.policies.restart import Stop
from meshwright.policies.supervision import State
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, BadInput, MeshwrightError
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job_token import TOKEN_VARIABLE, job_token
from meshwright.spec.listen_address import address_text
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE
from meshwright.spec.run import RunSpec
from meshwright.spec.secrets import without_own_keys

if TYPE_CHECKING:
    from meshwright.launch.prepare import Note, PreparedRun

T = TypeVar("T")
LISTEN_DESCRIPTOR = "MESHWRIGHT_LISTEN_FD"
"""Environment variable with the listening socket that an agent passes to a coordinator that it starts."""
FAREWELL_SECONDS = 8.0
"""How long a coordinator continues to answer after the end of the job, so that all agents learn of it."""
LOCK_SECONDS = 30.0
"""How long a coordinator tries to lock the run's folder. An earlier coordinator may still be answering there, or the disk may be full."""
LOCK_RETRY_SECONDS = 0.5
"""Seconds between two attempts to lock the folder."""
ABANDONED_SECONDS = 300.0
"""A coordinator ends if no agent has reported for this many seconds."""
GIVE_UP_SECONDS = 300.0
"""An agent ends if it has found no coordinator for this many seconds."""
UNANSWERED_SECONDS = 25.0
STILL_SECONDS = 10.0
"""An agent ends after UNANSWERED_SECONDS without an answer if its ranks have made no progress for STILL_SECONDS.

Then the coordinator's host is lost. A network that is cut for 20 s does not cause this.
"""
LONGEST_LOOK = 15.0
"""Seconds between two checks that count at most for these limits. If more time has passed, this process was stopped."""
SAID_SECONDS = 5.0
"""An agent that starts prints a message after this many seconds without a coordinator."""
MOST_FINDINGS = 1000
"""Findings about one host in a report, at most: more than rules times GPUs and ports."""
COORDINATOR_BACKLOG = 1024
"""Connections that may wait to be accepted by the coordinator. All agents start at the same time."""
LONGEST_BACK_OFF = 1.0
"""Longest wait between two attempts to reach the coordinator, in seconds, before it is multiplied by a random factor of 0.5 to 1."""


def run_coordinator(
    run: RunSpec, runs: Path, address: tuple[str, int], note: Note, announce: Callable[[PreparedRun], None]
) -> int:
    """Prepare the run and coordinate its agents until it is over. Returns the exit code.

    If the folder belongs to a job that is not over, this process continues that job, and its agents connect again. If only agents of a
    finished job connect, they are told its exit code.
    """
    from meshwright.launch.attempts import (
        finished_state,
        hang_seconds,
        job_state,
        prepared_before,
        rules_of,
        write_attempt,
    )
    from meshwright.launch.prepare import prepare_run

    raise_file_limit()
    token = job_token()
    folder = runs / run.name
    descriptor = os.environ.pop(LISTEN_DESCRIPTOR, None)
    listener = listen_at(address, COORDINATOR_BACKLOG) if descriptor is None else socket.socket(fileno=int(descriptor))
    reachable = socket.gethostname() if address[0] in ("", "0.0.0.0", "::") else address[0]
    own_address = address_text(reachable, listener.getsockname()[1])
    handlers: dict[str, Handler] = {}
    server = ControlServer(listener, token, handlers, run.name)
    with closing(server), ExitStack() as stack:
        lost: CoordinatorLease | None = None
        try:
            take_lease = partial(
                take_coordinator_lease, lease_store(run.supervision.lease, run.name, folder), own_address
            )
            lease = stack.enter_context(closing(_while_agents_wait(server, handlers, take_lease)))
            if (lost := lease.lost) is not None:
                write_line(
                    f"meshwright: {lost.process} has not renewed the coordinator's lease for {LEASE_SECONDS:g} s; "
                    f"{this_process()} coordinates, at {own_address}, by the journal {folder / STATE_FILE}"
                )
                break_lock(folder, lost.process)
            _lock_folder(folder, stack, server, handlers)
            finished = finished_state(folder)
            if finished is not None and dismiss_agents(server, handlers, finished, until_another=True):
                return exit_directive(finished).code
            state = job_state(folder)
            prepared = prepared_before(run, folder, note) if state.attempt else None
            if prepared is None and not state.attempt:
                prepare = partial(prepare_run, run, runs, profile=None, note=note)
                prepared = _while_agents_wait(server, handlers, prepare)
                if prepared is None:
                    dismiss_agents(server, handlers, State("finished", stop=Stop(EXIT_DONE)))
                    return EXIT_DONE
        except LeaseTaken:
            if descriptor is None:
                raise
            return EXIT_DONE  # another process coordinates, and agents find it
        except (MeshwrightError, OSError) as error:  # another coordinator would have the same error
            failure = as_meshwright_error(error)
            dismiss_agents(server, handlers, State("finished", stop=Stop(failure.exit_code, str(failure))))
            raise
        if prepared is not None:
            announce(prepared)
        coordinator = Coordinator(
            folder,
            rules_of(run),
            run.cluster.gpus_per_node,
            partial(write_attempt, prepared or partial(prepare_run, run, runs, profile=None, note=note)),
            state=state,
            finished=finished,
            lost_machine="" if lost is None or lost.host == own_machine() else lost.host,
            hang_seconds=hang_seconds(run),
        )

        def answer(value: object) -> object:
            report = checked_report(value)
            return to_plain(coordinator.receive(report) if lease.acts else Directive("wait", heartbeat=0.5))

        handlers["POST /report"] = answer
        handlers["GET /state"] = lambda _: to_plain(coordinator.state)
        progress = ProgressFile(folder, coordinator.progress)
        with closing(coordinator), closing(progress), forward_signals(coordinator.request_stop, lambda: None):
            _coordinate(coordinator, server, progress, lease)
    if lease.taken is not None:
        write_line(f"meshwright: {lease.taken.process}, at {lease.taken.address}, coordinates now; this process ends")
        return EXIT_COMMUNICATION
    for line in coordinator.outcome(folder / "logs"):
        write_line(line if line.startswith("  ") else f"meshwright: {line}")
    return EXIT_COMMUNICATION if coordinator.code is None else coordinator.code


def _lock_folder(folder: Path, stack: ExitStack, server: ControlServer, handlers: dict[str, Handler]) -> None:
    """Lock the run's folder until `stack` ends.

    For up to `LOCK_SECONDS` this is repeated, while agents wait and their ranks continue to train.
    """
    deadline = time.monotonic() + LOCK_SECONDS

    def try_again() -> None:
        while True:
            time.sleep(LOCK_RETRY_SECONDS)
            try:
                stack.enter_context(folder_lock(folder))
                return
            except (MeshwrightError, OSError):
                if time.monotonic() > deadline:
                    raise

    try:
        stack.enter_context(folder_lock(folder))
    except (MeshwrightError, OSError) as error:
        write_line(f"meshwright: {as_meshwright_error(error)}; the coordinator tries it for {LOCK_SECONDS:g} s")
        _while_agents_wait(server, handlers, try_again)


def _while_agents_wait(server: ControlServer, handlers: dict[str, Handler], work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result. Agents that report in the meantime are told to wait."""

    def answer(value: object) -> object:
        checked_report(value)
        return to_plain(Directive("wait", heartbeat=0.5))

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    handlers["POST /report"] = answer
    done: Future[T] = Future()
    threading.Thread(target=run, name="prepare", daemon=True).start()
    while not done.done():
        server.serve(POLL_SECONDS)
    return done.result()


def dismiss_agents(
    server: ControlServer, handlers: dict[str, Handler], state: State, *, until_another: bool = False
) -> bool:
    """Tell agents the exit code of the finished job of `state`, until none has asked for `FAREWELL_SECONDS`.

    With `until_another`, only agents of this job are told, and a report from an agent of another job ends the wait at once. Returns whether
    there were agents and all of them belonged to this job.
    """
    dismissed: set[str] = set()
    others: set[str] = set()

    def answer(value: object) -> object:
        report = checked_report(value)
        if until_another and report.job != state.job:
            others.add(report.host)
            return to_plain(Directive("wait", heartbeat=0.2))
        dismissed.add(report.host)
        return to_plain(exit_directive(state))

    handlers["POST /report"] = answer
    asked = 0
    deadline = time.monotonic() + FAREWELL_SECONDS
    while time.monotonic() < deadline and not others:
        server.serve(POLL_SECONDS)
        if len(dismissed) > asked:
            asked = len(dismissed)
            deadline = time.monotonic() + FAREWELL_SECONDS
    return bool(dismissed) and not others


def _coordinate(coordinator: Coordinator, server: ControlServer, progress: ProgressFile, lease: HeldLease) -> None:
    """Serve agents while the lease is held.

    Ends when the job is over and all agents know it, when no agents are left, or when the lease is lost.
    """
    last_report = ticked = time.monotonic()
    while coordinator.code is None and lease.taken is None:
        if not lease.acts:
            time.sleep(POLL_SECONDS)
            continue
        server.serve(POLL_SECONDS)
        if time.monotonic() - ticked < POLL_SECONDS:  # in a large job, reports arrive more often than that
            continue
        ticked = time.monotonic()
        coordinator.tick()
        progress.update()
        if coordinator.hosts:
            last_report = time.monotonic()
        if time.monotonic() - last_report > ABANDONED_SECONDS:
            write_line(f"meshwright: no agent has answered for {ABANDONED_SECONDS:g} s; the coordinator ends")
            return
    deadline = time.monotonic() + FAREWELL_SECONDS
    while coordinator.uninformed and lease.acts and time.monotonic() < deadline:
        server.serve(POLL_SECONDS)


def checked_report(value: object) -> Report:
    """A report from JSON. Raises ValueError or TypeError for values that an agent never sends."""
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    report = from_plain(Report, value)
    numbers = (report.port, report.attempt, report.stop, report.number, *report.checkpoints, *chain(*report.skipped))
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("expected numbers")
    if not all(first < end for first, end in report.skipped):
        raise ValueError("expected ranges of samples")
    if not all(isinstance(text, str) and 0 < len(text) <= 300 for text in (report.host, report.address)):
        raise ValueError("expected names of host and address")
    if not isinstance(report.job, str) or len(report.job) > 300:
        raise ValueError("expected the identity of a job")
    texts = (report.test.failure, report.test.exchange) if report.test is not None else ()
    if report.test is not None and type(report.test.attempt) is not int:
        raise ValueError("expected an attempt")
    if not all(isinstance(text, str) and len(text) <= 1000 for text in texts):
        raise ValueError("expected results of a self-test")
    if len(report.findings) > MOST_FINDINGS or not all(
        isinstance(text, str) and len(text) <= 1000 for finding in report.findings for text in astuple(finding)
    ):
        raise ValueError("expected findings about the host")
    if not all(is_rule(finding.rule) for finding in report.findings):
        raise ValueError("expected findings of known rules; all hosts need the same release")
    if not all(type(rank.rank) is int and (rank.code is None or type(rank.code) is int) for rank in report.ranks):
        raise ValueError("expected ranks")
    return report


def run_agent(run: RunSpec, arguments: Sequence[str], runs: Path) -> int:
    """Run the agent of this host until the job is over. Returns its exit code.

    `arguments` are the run file and overrides, with which this agent can start a coordinator.
    """
    address = coordinator_address(os.environ.get(COORDINATOR_VARIABLE))
    token = job_token()
    raise_file_limit()
    check_devices(run.cluster)
    end_orphans(runs / run.name)
    arguments = [*arguments, "--runs", str(runs)]
    folder = runs / run.name
    client = ControlClient(address, token, run.name)
    with (
        closing(client),
        closing(CoordinatorWatch(lease_store(run.supervision.lease, run.name, folder), client)) as watch,
    ):
        own_address = _reach(lambda: client.address, partial(_start_coordinator, address, arguments))
        watch.start = partial(_start_coordinator, (own_address, 0), arguments)
        return _follow_coordinator(run, arguments, folder, own_address, client, watch)


def _follow_coordinator(
    run: RunSpec,
    arguments: Sequence[str],
    folder: Path,
    own_address: str,
    client: ControlClient,
    watch: CoordinatorWatch,
) -> int:
    """Start the agent's processes and let them do what the coordinator says. Returns the exit code."""
    buffers = empty_snapshot_buffers(run.cluster.gpus_per_node)
    endpoint_of_host = metrics_endpoint(run.observe.prometheus, folder)
    with (
        endpoint_of_host as endpoint,
        snapshot_server(run, own_address, buffers) as server,
        health_monitor(run) as health,
        closing(DefectReporter(run)) as report_defect,
    ):
        variables = {} if server is None else {SERVER_VARIABLE: server.address}
        start = rank_starter(run.cluster, folder, own_address, buffers, variables)
        agent = Agent(
            f"{own_machine()}/{os.getpid()}",
            start,
            folder,
            address=own_address,
            spares=starts_spares(run),
            health=health,
            report_defect=report_defect,
        )
        with closing(agent), forward_signals(agent.stop, agent.kill_at_once):
            revive = server.revive if server else lambda: None
            command = shlex.join(["meshwright", "train", *arguments, "--agent"])
            return _Link(agent, client, watch, command, revive, endpoint.update).follow()


class _Link:
    """Exchanges reports and directives between an agent and its coordinator."""

    def __init__(
        self,
        agent: Agent,
        client: ControlClient,
        watch: CoordinatorWatch,
        command: str,
        revive: Callable[[], object],
        observe: Callable[[Sequence[RankState], Sequence[HealthFinding]], object] = lambda ranks, findings: None,
    ) -> None:
        """`watch` moves the client to another coordinator. `command` is the command that starts an agent, for messages.

        `revive` is called regularly, and restarts other processes of the agent that have died. `observe` is called as often, with the
        states of this host's ranks and the findings about the host's health.
        """
        self._agent = agent
        self._client = client
        self._watch = watch
        self._revive = revive
        self._first_address = client.address
        self._command = command
        self._observe = observe
        self._sent: Report | None = None
        self._number = 0
        self._due = 0.0
        self._failures = 0
        self._error: OSError | None = None
        self._looked = self._answered = time.monotonic()
        self._silent = self._still = 0.0
        """Seconds since the last answer, and since the last progress of any rank of this host."""
        self._progress: list[tuple[int, int]] = []

    def follow(self) -> int:
        """Report until the coordinator says that the job is over. Returns the exit code."""
        while True:
            self._agent.poll(POLL_SECONDS)
            self._revive()
            report = self._agent.report()
            now = time.monotonic()
            self._observe(report.ranks, report.findings)
            self._look(report, now)
            if min(self._silent, self._still) > SILENT_SECONDS:
                self._agent.prepare_restart()
            if (reason := self._reason_to_end(now)) is not None:
                write_line(f"meshwright: {reason}")
                return EXIT_COMMUNICATION
            urgent = self._sent is None or report.urgency != self._sent.urgency
            if now < self._due and not (urgent and not self._failures):
                continue
            directive = self._exchange(report, now)
            if directive is None:
                continue
            self._agent.obey(directive)
            if directive.order == "exit":
                if directive.cause:
                    write_line(f"meshwright: {directive.cause}")
                self._agent.close_attempt()
                return directive.code

    def _look(self, report: Report, now: float) -> None:
        """Update the seconds without an answer and without progress of the ranks."""
        seconds = min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        progress = [(rank.rank, rank.progress_count) for rank in report.ranks]
        self._silent += seconds
        self._still = self._still + seconds if progress == self._progress else 0.0
        self._progress = progress

    def _reason_to_end(self, now: float) -> str | None:
        """The reason why this agent ends without being told so by a coordinator; None while it should continue."""
        if not self._failures:
            return None
        patience = GIVE_UP_SECONDS if self._sent is None else UNANSWERED_SECONDS
        if self._silent <= patience or self._still <= STILL_SECONDS:
            return None
        still = "" if self._sent is None else ", and no rank of this host makes progress"
        return (
            f"the coordinator at {address_text(*self._client.address)} has not answered for {now - self._answered:.0f} s "
            f"({self._error}), and no other host has taken its place{still}; this agent ends. To continue from the newest "
            f"checkpoint, start `{self._command}` on all hosts, {self._first_address[0]} too; if it is lost, with "
            f"{COORDINATOR_VARIABLE} naming another of them"
        )

    def _exchange(self, report: Report, now: float) -> Directive | None:
        """Send a report and return the directive. None if there is no answer and the next attempt has to wait."""
        address = self._client.address
        try:
            self._number += 1
            self._watch.asked = lease_clock()
            directive = self._client.report(replace(report, number=self._number))
        except OSError as error:
            first = self._sent is None and address == self._first_address
            if (
                isinstance(error, WrongProof | NoCoordinator) and first
            ):  # later, another program may use the coordinator's address
                hint = f"{TOKEN_VARIABLE} needs the same token on all hosts" if isinstance(error, WrongProof) else ""
                raise BadInput(f"{COORDINATOR_VARIABLE}: {error}; {hint or 'choose another port'}") from None
            self._failures = self._failures + 1
            self._error = error
            if self._failures == 1:
                then = "this agent waits" if self._sent is None else "its ranks train on"
                write_line(f"meshwright: the coordinator at {address_text(*address)} does not answer ({error}); {then}")
            self._watch.unanswered = True
            if self._client.address == address:  # the watch has not moved it in the meantime
                self._client.move(self._first_address)
            self._due = now + min(LONGEST_BACK_OFF, 0.1 * 2 ** min(self._failures, 5)) * random.uniform(0.5, 1.0)
            return None
        finally:
            self._watch.asked = None
        if self._failures:
            where = "" if address == self._first_address else f", at {address_text(*address)}"
            write_line(f"meshwright: the coordinator answers again{where}")
        self._sent = report
        self._failures = 0
        self._answered = now
        self._silent = 0.0
        self._watch.unanswered = False
        self._watch.standby = directive.standby
        self._due = now + directive.heartbeat
        return directive


def _reach(place: Callable[[], tuple[str, int]], start_coordinator: Callable[[], object]) -> str:
    """Wait until a coordinator listens, and return this host's address as the coordinator's host sees it.

    `place` returns the address where the coordinator may be. If this address belongs to this host, the coordinator is started.
    """
    began = time.monotonic()
    said = False
    while True:
        address = place()
        try:
            with socket.create_connection(address, timeout=SAID_SECONDS) as connection:
                return connection.getsockname()[0]
        except OSError as error:
            try:
                start_coordinator()
                continue
            except OSError as failure:
                obstacle = failure
            seconds = time.monotonic() - began
            text = f"{COORDINATOR_VARIABLE}: {address_text(*address)} cannot be reached: {error}"
            if not _is_elsewhere(obstacle):
                text = f"{text}; no coordinator can be started here: {obstacle}"
            if seconds > GIVE_UP_SECONDS:
                raise BadInput(text) from None
            if seconds > SAID_SECONDS and not said:
                said = True
                write_line(f"meshwright: {text}; this agent tries for {GIVE_UP_SECONDS:g} s")
            time.sleep(random.uniform(0.2, 0.5))


def _is_elsewhere(error: OSError) -> bool:
    """Whether an error of `listen` means that the address does not belong to this host."""
    return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL


def _start_coordinator(address: tuple[str, int], arguments: Sequence[str], seen: str = "") -> StartedProcess:
    """Start a coordinator at an address of this host. Port 0 means any free port. `seen` is the value for `SEEN_VARIABLE`.

    Raises OSError if it cannot listen there.
    """
    with listen_at(address, COORDINATOR_BACKLOG) as listener:
        descriptor = listener.fileno()
        port = listener.getsockname()[1]
        place = {COORDINATOR_VARIABLE: address_text(address[0], port), LISTEN_DESCRIPTOR: str(descriptor)}
        return subprocess.Popen(
            [sys.executable, "-m", "meshwright", "coordinate", *arguments],
            env={**without_own_keys(), **place, SEEN_VARIABLE: seen},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, ()),
        )
