"""A supervised run on several hosts: the process of the coordinator, and the agent process of each host.

Agents find the coordinator at `MESHWRIGHT_COORDINATOR`. If nothing listens there and the address is this host's, an
agent starts the coordinator in a process of its own, which survives the agent, and starts it again if it dies. The hosts
share the folder of the run.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.snapshot_transport import SERVER_VARIABLE
from meshwright.connections.limits import raise_file_limit
from meshwright.connections.proof import WrongProof
from meshwright.events.terminal import write_line
from meshwright.launch.agent import Agent, starts_spares
from meshwright.launch.control import (
    ControlClient,
    ControlServer,
    Handler,
    coordinator_address,
    listen,
)
from meshwright.launch.coordinator import Coordinator, exit_directive
from meshwright.launch.folder import folder_lock
from meshwright.launch.local import POLL_SECONDS, empty_arenas, forward_signals, rank_starter
from meshwright.launch.machine import check_devices
from meshwright.launch.metrics_endpoint import metrics_endpoint
from meshwright.launch.orphans import end_orphans
from meshwright.launch.outcome import RankState
from meshwright.launch.progress_file import ProgressFile
from meshwright.launch.reports import Directive, Report
from meshwright.launch.snapshot_server import snapshot_server
from meshwright.policies.restart import Stop
from meshwright.policies.supervision import State
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, BadInput, MeshwrightError
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job_token import TOKEN_VARIABLE, job_token
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE, HOST_VARIABLE
from meshwright.spec.run import RunSpec
from meshwright.spec.secrets import without_own_keys

if TYPE_CHECKING:
    from meshwright.launch.prepare import Note, Prepared

LISTEN_DESCRIPTOR = "MESHWRIGHT_LISTEN_FD"
"""Environment variable with the listening socket that an agent passes to the coordinator that it starts."""
FAREWELL_SECONDS = 8.0
"""How long a coordinator answers after the end of the job, so that all agents learn of it."""
ABANDONED_SECONDS, GIVE_UP_SECONDS = 300.0, 300.0
"""Seconds without any agent after which a coordinator ends, and without a coordinator after which an agent does."""
LONGEST_BACK_OFF = 3.0
"""Most seconds between two attempts to reach the coordinator, before a random factor of 0.5 to 1."""


def run_coordinator(
    run: RunSpec, runs: Path, address: tuple[str, int], note: Note, announce: Callable[[Prepared], None]
) -> int:
    """Prepare the run and coordinate its agents until it is over; returns the exit code.

    In the folder of a run whose job is not over it continues that job: agents connect again. If only agents of a job
    that is over connect, they learn its exit code.
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
    descriptor = os.environ.pop(LISTEN_DESCRIPTOR, None)
    listener = listen(address) if descriptor is None else socket.socket(fileno=int(descriptor))
    folder = runs / run.name
    handlers: dict[str, Handler] = {}
    server = ControlServer(listener, token, handlers, run.name)
    with closing(server), folder_lock(folder):
        try:
            finished = finished_state(folder)
            if finished is not None and dismiss_agents(server, handlers, finished, until_another=True):
                return exit_directive(finished).code
            state = job_state(folder)
            prepared = prepared_before(run, folder, note) if state.attempt else None
            if prepared is None and not state.attempt:
                prepared = prepare_run(run, runs, profile=None, note=note)
                if prepared is None:
                    dismiss_agents(server, handlers, State("finished", stop=Stop(EXIT_DONE)))
                    return EXIT_DONE
        except (MeshwrightError, OSError) as error:  # another coordinator would meet it too
            failure = as_meshwright_error(error)
            dismiss_agents(server, handlers, State("finished", stop=Stop(failure.exit_code, str(failure))))
            raise
        if prepared is not None:
            announce(prepared)
        coordinator = Coordinator(
            folder, rules_of(run), run.cluster.gpus_per_node,
            partial(write_attempt, prepared or partial(prepare_run, run, runs, profile=None, note=note)),
            state=state, finished=finished, hang_seconds=hang_seconds(run),
        )  # fmt: skip
        handlers["POST /report"] = lambda value: to_plain(coordinator.receive(checked_report(value)))
        handlers["GET /state"] = lambda _: to_plain(coordinator.state)
        progress = ProgressFile(folder, coordinator.progress)
        with closing(coordinator), closing(progress), forward_signals(coordinator.request_stop, lambda: None):
            _coordinate(coordinator, server, progress)
    for line in coordinator.outcome(folder / "logs"):
        write_line(line if line.startswith("  ") else f"meshwright: {line}")
    return EXIT_COMMUNICATION if coordinator.code is None else coordinator.code


def dismiss_agents(
    server: ControlServer, handlers: dict[str, Handler], state: State, *, until_another: bool = False
) -> bool:
    """Tell agents the exit code of the job of `state`, until none has asked for `FAREWELL_SECONDS`.

    With `until_another` only agents of this job are told, and an agent of another job ends the wait at once. Returns
    whether there were agents, all of them of this job.
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
    asked, deadline = 0, time.monotonic() + FAREWELL_SECONDS
    while time.monotonic() < deadline and not others:
        server.serve(POLL_SECONDS)
        if len(dismissed) > asked:
            asked, deadline = len(dismissed), time.monotonic() + FAREWELL_SECONDS
    return bool(dismissed) and not others


def _coordinate(coordinator: Coordinator, server: ControlServer, progress: ProgressFile) -> None:
    """Serve agents until the job is over and they know it, or until there are none."""
    last_report = ticked = time.monotonic()
    while coordinator.code is None:
        server.serve(POLL_SECONDS)
        if time.monotonic() - ticked < POLL_SECONDS:  # reports arrive more often in a large job
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
    while coordinator.uninformed and time.monotonic() < deadline:
        server.serve(POLL_SECONDS)


def checked_report(value: object) -> Report:
    """A report from JSON. Raises ValueError or TypeError for values that an agent does not send."""
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    report = from_plain(Report, value)
    numbers = (report.port, report.attempt, report.stop, *report.checkpoints, *chain(*report.skipped))
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
    if not all(type(rank.rank) is int and (rank.code is None or type(rank.code) is int) for rank in report.ranks):
        raise ValueError("expected ranks")
    return report


def run_agent(run: RunSpec, words: Sequence[str], runs: Path) -> int:
    """Be the agent of this host until the job is over; returns its exit code.

    `words` are run file and overrides, for a coordinator that this agent starts.
    """
    address, token = coordinator_address(os.environ.get(COORDINATOR_VARIABLE)), job_token()
    raise_file_limit()
    check_devices(run.cluster)
    end_orphans(runs / run.name)
    coordinator = partial(_start_coordinator, address, [*words, "--runs", str(runs)])
    own_address = _reach(address, coordinator)
    arenas = empty_arenas(run.cluster.gpus_per_node)
    endpoint_of_host = metrics_endpoint(run.observe.prometheus, runs / run.name)
    with endpoint_of_host as endpoint, snapshot_server(run, own_address, arenas) as server:
        variables = {} if server is None else {SERVER_VARIABLE: server.address}
        start = rank_starter(run.cluster, runs / run.name, own_address, arenas, variables)
        machine = os.environ.get(HOST_VARIABLE) or socket.gethostname()
        host = f"{machine.replace('/', '-')[:200]}/{os.getpid()}"
        agent = Agent(host, start, runs / run.name, address=own_address, spares=starts_spares(run))
        client = ControlClient(address, token, run.name)
        with closing(agent), closing(client), forward_signals(agent.stop, agent.kill_at_once):
            revive = server.revive if server else lambda: None
            return _Link(agent, client, coordinator, revive=revive, observe=endpoint.update).follow()


class _Link:
    """The exchange of reports and directives between an agent and its coordinator."""

    def __init__(
        self,
        agent: Agent,
        client: ControlClient,
        start_coordinator: Callable[[], object],
        revive: Callable[[], object],
        observe: Callable[[Sequence[RankState]], object] = lambda ranks: None,
    ) -> None:
        """`revive` is called regularly: it starts processes beside the agent again that have died.

        `observe` receives the states of this host's ranks as often.
        """
        self._agent, self._client, self._start_coordinator, self._revive = agent, client, start_coordinator, revive
        self._observe = observe
        self._sent: Report | None = None
        self._due = 0.0
        self._failures = 0
        self._answered = time.monotonic()

    def follow(self) -> int:
        """Report until the coordinator says that the job is over; returns its exit code."""
        while True:
            self._agent.poll(POLL_SECONDS)
            self._revive()
            report, now = self._agent.report(), time.monotonic()
            self._observe(report.ranks)
            urgent = self._sent is None or report.urgency != self._sent.urgency
            if now < self._due and not (urgent and not self._failures):
                continue
            directive = self._exchange(report, now)
            if directive is None:
                if now - self._answered > GIVE_UP_SECONDS:
                    write_line(f"meshwright: no coordinator has answered for {GIVE_UP_SECONDS:g} s; this agent ends")
                    return EXIT_COMMUNICATION
                continue
            self._agent.obey(directive)
            if directive.order == "exit":
                if directive.cause:
                    write_line(f"meshwright: {directive.cause}")
                self._agent.close_attempt()
                return directive.code

    def _exchange(self, report: Report, now: float) -> Directive | None:
        """The answer to a report; None if there is none, and the next try has to wait."""
        try:
            directive = self._client.report(report)
        except OSError as error:
            if isinstance(error, WrongProof) and self._sent is None:  # later it may be somebody who took its place
                raise BadInput(
                    f"{COORDINATOR_VARIABLE}: {error}; {TOKEN_VARIABLE} needs the same token on all hosts"
                ) from None
            self._failures += 1
            if self._failures == 1:
                write_line(f"meshwright: the coordinator does not answer ({error}); its ranks train on")
            if isinstance(error, ConnectionRefusedError):
                self._start_coordinator()
            self._due = now + min(LONGEST_BACK_OFF, 0.1 * 2**self._failures) * random.uniform(0.5, 1.0)
            return None
        if self._failures:
            write_line("meshwright: the coordinator answers again")
        self._sent, self._failures, self._answered = report, 0, now
        self._due = now + directive.heartbeat
        return directive


def _reach(address: tuple[str, int], start_coordinator: Callable[[], object]) -> str:
    """This host's address as the coordinator's host sees it.

    Waits until a coordinator listens, and starts it if its address is this host's.
    """
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while True:
        try:
            with socket.create_connection(address, timeout=5) as connection:
                return connection.getsockname()[0]
        except OSError as error:
            if time.monotonic() > deadline:
                raise BadInput(
                    f"{COORDINATOR_VARIABLE}: {address[0]}:{address[1]} cannot be reached: {error}"
                ) from None
            if not start_coordinator():
                time.sleep(random.uniform(0.2, 0.5))


def _start_coordinator(address: tuple[str, int], words: Sequence[str]) -> bool:
    """Start a coordinator if the address is this host's and free; whether one was started."""
    with suppress(OSError), listen(address) as listener:
        descriptor = listener.fileno()
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", "coordinate", *words],
            env={**without_own_keys(), LISTEN_DESCRIPTOR: str(descriptor)},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, ()),
        )
        return True
    return False
