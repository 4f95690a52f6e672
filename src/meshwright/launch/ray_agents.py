"""Runs a job on a Ray cluster: one agent on each node, in one placement group.

The program that `meshwright launch --to ray` writes calls `run_on_ray`. Each bundle of the placement group has the
devices of one node, and an actor whose only child process is the agent. The coordinator is in the agent on the node
that Ray placed first. If that node is lost, the coordinator moves to another node.

When a node is lost, Ray places its bundle on another node as soon as one is free, and an agent joins the run from
there. After a failure that ends all agents, all of them are started again.

Agents find the token and the run in a folder that all nodes share. Nothing of the run is in Ray's object store.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.events.parent import COMMAND_LINE, PARENT
from meshwright.events.terminal import write_line
from meshwright.launch.ray_script import CPU, GPU
from meshwright.launch.scheduler_job import AGENT_STARTS, REQUEUE_CODES, STOP_CODES
from meshwright.policies.job_end import STOP_EXIT_CODES
from meshwright.spec.errors import (
    EXIT_BAD_INPUT,
    EXIT_COMMUNICATION,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    BadInput,
    MeshwrightError,
)
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.spec.listen_address import address_text
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE, stop_signals

POLL_SECONDS = 0.5
"""Seconds between two looks at signals and at what actors have answered."""
SAID_SECONDS = 60.0
"""Seconds between two lines that say that nodes are missing."""
SETTLE_SECONDS = 10.0
"""Seconds between an agent's failure and its next start. If the job is over, the other agents end in this time."""
PLACE_SECONDS = 1.0
"""Seconds until a lost actor is created again. The time doubles after each actor in a row that died at once."""
ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Environment variable with the address of the Ray cluster."""


@dataclass(frozen=True)
class RayJob:
    """A run as a job on Ray, with one agent on each of `hosts` nodes."""

    arguments: Sequence[str]
    """Arguments of the command `meshwright` with which an agent starts."""
    hosts: int
    resources: Mapping[str, float]
    """Resources of a node's bundle, by Ray's names: `{"CPU": 8, "GPU": 8}`."""
    restarts: int
    """How often all agents may be started again after failures."""
    stop_seconds: float
    """Seconds that all agents may take to end after a stop request."""


@dataclass
class Agents:
    """The agents of one start of the job, by the number of their bundle: which run, have ended, or start again.

    Times `now` are monotonic seconds.
    """

    # The bundles whose agent runs.
    running: set[int] = field(default_factory=set)
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of agents that have ended and not been started again; negative after a signal."""
    again: dict[int, float] = field(default_factory=dict)
    """Monotonic time in seconds at which an agent will be started again."""
    _starts: Counter[int] = field(default_factory=Counter)

    def placed(self, bundle: int, now: float) -> None:
        """Note that Ray has placed a bundle on a node. Its agent can start now."""
        self.again[bundle] = now

    def due(self, now: float) -> list[int]:
        """Return the bundles whose agents must start now. From now on they count as running."""
        found = [bundle for bundle, at in self.again.items() if at <= now]
        for bundle in found:
            del self.again[bundle]
            self.codes.pop(bundle, None)
            self._starts[bundle] += 1
        self.running |= set(found)
        return found

    def ended(self, bundle: int, code: int, now: float) -> None:
        """Note that an agent has ended.

        If a signal or its own failure ended it, it will start again, up to `AGENT_STARTS` times.
        """
        self.running.discard(bundle)
        self.codes[bundle] = code
        if code not in (EXIT_DONE, *STOP_CODES, *REQUEUE_CODES) and self._starts[bundle] < AGENT_STARTS:
            self.again[bundle] = now + (0.0 if code < 0 else SETTLE_SECONDS)

    def lost(self, bundle: int) -> None:
        """Note that the node of a bundle, or its actor, is lost."""
        self.running.discard(bundle)
        self.again.pop(bundle, None)
        self._starts[bundle] = 0

    def is_over(self, now: float) -> bool:
        """Whether the job is over: agents have ended, none runs, and none starts right now.

        `now` is a monotonic time in seconds.
        """
        return bool(self.codes) and not self.running and not any(at <= now for at in self.again.values())

    @property
    def code(self) -> int:
        """The exit code of the job, chosen from those of its agents. Usually all agents have the same code."""
        codes = list(self.codes.values())
        for wanted in ((EXIT_DONE,), STOP_CODES, REQUEUE_CODES):
            found = [code for code in codes if code in wanted]
            if found:
                return found[0]
        return next((code for code in codes if code > 0), EXIT_COMMUNICATION)


class NodeAgent:
    """The actor of a bundle.

    It runs the agent in a child process. It is asynchronous, so that `stop` works while `run` waits.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def place(self, folder: str) -> tuple[str, int, str]:
        """Return this node's address, a free port, and why an agent cannot run in `folder`; an empty text if it can."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address = ray.util.get_node_ip_address()
        if not os.path.isdir(folder):
            return (
                address,
                port,
                f"node {address} has no folder {folder}; start the job in a folder that all nodes share",
            )
        return address, port, ""

    async def run(self, arguments: Sequence[str], folder: str, environment: Mapping[str, str]) -> int:
        """Run an agent until it ends, and return its exit code; negative after a signal."""
        inherited = dict(os.environ)
        if inherited.get("OMP_NUM_THREADS") in _threads_of_ray():
            del inherited["OMP_NUM_THREADS"]  # Ray has set it; ranks choose their own number of threads
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                COMMAND_LINE,
                *arguments,
                cwd=folder,
                env={**inherited, PARENT: str(os.getpid()), **environment},
                stdin=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            failure = as_meshwright_error(error)
            write_line(f"meshwright: the agent cannot be started: {failure}")
            return failure.exit_code
        # Ray lowers the priority of its workers. Try to give the agent a normal priority; not every system permits
        # that.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        return await self._process.wait()

    async def stop(self, number: int) -> None:
        """Send a stop signal to the agent."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def _threads_of_ray() -> list[str]:
    """Return the values of OMP_NUM_THREADS that Ray may have set in this worker: the number of CPUs of the actor."""
    import ray

    cpus = ray.get_runtime_context().get_assigned_resources().get(CPU, 0)
    return [str(max(int(cpus), 1))]


def run_on_ray(job: RayJob, folder: Path) -> int:
    """Run the job in a folder that all nodes share. Return its exit code, as in docs/reference/exit-codes.md."""
    try:
        import ray
    except ImportError as error:
        write_line(f"meshwright: --to ray needs ray ({error}): pip install 'meshwright[ray]'")
        return EXIT_BAD_INPUT
    address = os.environ.get(ADDRESS_VARIABLE, "auto")
    try:
        ray.init(address=address, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        write_line(f"meshwright: no Ray cluster answers at {address}: {error}")
        return EXIT_BAD_INPUT
    try:
        with _Stop() as stop, _token_file(folder) as token:
            return _Driver(ray, job, folder, token, stop).run()
    except (MeshwrightError, OSError) as error:
        failure = as_meshwright_error(error)
        write_line(f"meshwright: {failure}")
        return failure.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # the agents end when this process does
    finally:
        ray.shutdown()


class _Stop:
    """Context that remembers the first stop signal of this process: its `number` and monotonic time `at`; 0 before.

    The driver sends it to all agents. A second Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.number = 0
        self.at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        self._before = {number: signal.signal(number, self._take) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: object) -> None:
        """Handle a stop signal: remember the first one. A second Ctrl-C raises KeyboardInterrupt."""
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.number:
            self.number = number
            self.at = time.monotonic()


@contextmanager
def _token_file(folder: Path) -> Iterator[str]:
    """Create a file with a random token for the job that only this user can read, and remove it at the end. Yields its path."""
    path = folder / f".meshwright-token.{secrets.token_hex(8)}"
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


class _Driver:
    """Starts the agents of a job, and starts them again when that is necessary."""

    def __init__(self, ray: Any, job: RayJob, folder: Path, token: str, stop: _Stop) -> None:
        self._ray = ray
        self._job = job
        self._folder = str(folder)
        self._stop = stop
        self._environment = {TOKEN_VARIABLE: token}
        self._agents = Agents()
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, tuple[str, int]] = {}
        """Calls that actors have not answered: the method and the bundle."""
        self._unplaced: Counter[int] = Counter()
        """For each bundle, how many of its actors in a row have died before they answered."""
        self._place_at: dict[int, float] = {}
        """Monotonic time at which the actor of a lost bundle is created again."""
        self._told: set[int] = set()
        """Bundles whose agents have been told of the stop request."""

    def run(self) -> int:
        """Start all agents, again and again, until the job is over or has failed too often. Return its exit code."""
        self._group = self._place_group()
        if self._group is None:
            return STOP_EXIT_CODES[self._stop.number]
        failures = 0
        while True:
            agents = self._start()
            code = agents.code
            if self._stop.number and not agents.codes:
                return STOP_EXIT_CODES[self._stop.number]
            if self._stop.number or code == EXIT_DONE or code in STOP_CODES:
                return code
            failures += code not in REQUEUE_CODES
            if failures > self._job.restarts:
                return code
            write_line(f"meshwright: the agents ended with code {code}; all of them start again")

    def _place_group(self) -> Any:
        """Return the placement group once Ray has found nodes for it; None if the job is stopped before that."""
        group = self._ray.util.placement_group([dict(self._job.resources)] * self._job.hosts, strategy="STRICT_SPREAD")
        said = time.monotonic()
        while not group.wait(POLL_SECONDS):
            if self._stop.number:
                return None
            if time.monotonic() - said > SAID_SECONDS:
                said = time.monotonic()
                write_line(
                    f"meshwright: waits until Ray has {self._job.hosts} nodes, each with free resources {dict(self._job.resources)}"
                )
        return group

    def _start(self) -> Agents:
        """Run agents on all bundles until the job is over, and return their records."""
        self._agents = Agents()
        self._told = set()
        self._environment.pop(COORDINATOR_VARIABLE, None)
        try:
            for bundle in range(self._job.hosts):
                self._place(bundle)
            while not self._agents.is_over(time.monotonic()):
                self._take_answers()
                self._pass_stop_on()
                if self._stop.number and self._is_stopped():
                    break
                now = time.monotonic()
                for bundle in [bundle for bundle, at in self._place_at.items() if at <= now]:
                    self._place(bundle)
                for bundle in () if self._stop.number else self._agents.due(now):
                    self._run_agent(bundle)
            return self._agents
        finally:
            for actor in self._actors.values():
                self._ray.kill(actor)
            for kept in (self._actors, self._pending, self._place_at, self._unplaced):
                kept.clear()

    def _is_stopped(self) -> bool:
        """Whether a stop request is complete: no agent runs, or the time for stopping is over."""
        return not self._agents.running or time.monotonic() - self._stop.at > self._job.stop_seconds

    def _place(self, bundle: int) -> None:
        """Create the actor of a bundle. It answers when Ray has placed the bundle on a node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._place_at.pop(bundle, None)
        options = {"num_cpus": self._job.resources.get(CPU, 0), "num_gpus": self._job.resources.get(GPU, 0)}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor = self._ray.remote(NodeAgent).options(scheduling_strategy=strategy, **options).remote()
        self._actors[bundle] = actor
        self._pending[actor.place.remote(self._folder)] = ("place", bundle)

    def _take_answers(self) -> None:
        """Handle the answers of actors. Waits at most `POLL_SECONDS` for them."""
        if not self._pending:
            time.sleep(POLL_SECONDS)  # no actor exists: all will be created later
            return
        done, _ = self._ray.wait(list(self._pending), timeout=POLL_SECONDS)
        for answer in done:
            self._take(answer, *self._pending.pop(answer))

    def _take(self, answer: Any, method: str, bundle: int) -> None:
        """Handle one answer of an actor, or the actor's loss."""
        now = time.monotonic()
        try:
            result = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError:
            raise  # an error in NodeAgent itself
        except self._ray.exceptions.RayError as error:
            self._lose(bundle, method, str(error))
            return
        if method == "run":
            self._agents.ended(bundle, result, now)
            return
        address, port, obstacle = result
        if obstacle:
            raise BadInput(obstacle)
        self._unplaced[bundle] = 0
        self._environment.setdefault(COORDINATOR_VARIABLE, address_text(address, port))
        self._agents.placed(bundle, now)

    def _lose(self, bundle: int, method: str, text: str) -> None:
        """Let a lost actor be created again.

        Raise BadInput if a bundle's actors die again and again before they answer.

        Ray needs some seconds to notice that a node is lost, and until then places actors on that node.
        """
        self._ray.kill(self._actors.pop(bundle))  # it may still run, if Ray has only lost the connection to it
        if method == "run":
            write_line(f"meshwright: the agent of bundle {bundle} is lost with its node; Ray places it on another one")
        else:
            self._unplaced[bundle] += 1
        if self._unplaced[bundle] > AGENT_STARTS:
            raise BadInput(f"Ray cannot start an agent: {text}")
        self._agents.lost(bundle)
        self._place_at[bundle] = time.monotonic() + PLACE_SECONDS * 2 ** self._unplaced[bundle]

    def _run_agent(self, bundle: int) -> None:
        answer = self._actors[bundle].run.remote(self._job.arguments, self._folder, self._environment)
        self._pending[answer] = ("run", bundle)

    def _pass_stop_on(self) -> None:
        """Tell each running agent once that the job must stop."""
        if not self._stop.number:
            return
        for bundle in self._agents.running - self._told:
            self._actors[bundle].stop.remote(int(self._stop.number))
            self._told.add(bundle)
