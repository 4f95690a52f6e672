"""Starts, monitors and stops the ranks of one host.

The parent process creates the listening socket for rank 0's store on 127.0.0.1, so no port is open to other hosts.

Ranks run in sessions of their own, so Ctrl-C reaches only the parent. The parent passes the first Ctrl-C on to the ranks, and kills them at
the second. If a rank fails, the parent asks the other ranks to end, gives them some seconds (`policies.job_end`) to write their reports and
close their files, and kills those that are still running then.

Ranks do not need the parent to be running: while it is stopped (SIGSTOP, Ctrl-Z), they continue to train.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType

from meshwright.checkpoint.memory.snapshot_buffer import BUFFER_VARIABLE, empty_memory
from meshwright.connections.accept import listen_at
from meshwright.events.messages import (
    CHANNEL,
    BeginMessage,
    CollectivesRequest,
    EndMessage,
    FailureMessage,
    Message,
    RankMessageReader,
    SelfTest,
    StepMessage,
    encode,
)
from meshwright.events.progress import PROGRESS, ProgressPage
from meshwright.events.stacks import STACKS, evidence_memory
from meshwright.events.start import START_TIME_VARIABLE, process_start_time
from meshwright.events.terminal import write_line
from meshwright.launch.evidence import RankProcess, collect, is_stopped
from meshwright.launch.machine import rank_threads
from meshwright.launch.outcome import RankState, cause, exit_codes, outcome_lines
from meshwright.policies.job_end import culprit, job_code, next_action
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import CommunicationFailure, Interrupted
from meshwright.spec.folders import compiler_cache
from meshwright.spec.network import network_environment
from meshwright.spec.rank_environment import STORE_SOCKET, stop_signals
from meshwright.spec.secrets import without_own_keys
from meshwright.training.idle_priority import end_idle_priority

RUN_VARIABLE = "MESHWRIGHT_RUN"
"""Environment variable of ranks that contains the folder of their run."""
LOOPBACK = "127.0.0.1"
KILL_SECONDS = 30.0
"""Longest time in which a killed process should have ended."""
POLL_SECONDS = 0.05
"""Seconds between two checks of the ranks."""
WRITER_SECONDS = 60.0
"""How long the launcher waits for processes that are still writing a checkpoint after their ranks have ended."""
Listener = Callable[[int, Message], None]
"""A function that is called with the number of a rank and a message from it."""


def run_ranks(
    module: str,
    arguments: list[str],
    *,
    cluster: ClusterSpec,
    logs: Path,
    threads: int,
    quiet: bool = False,
    assignment: Path | None = None,
    enough: Callable[[], bool] | None = None,
    listener: Listener | None = None,
) -> int:
    """Run `python -m module arguments…` as the ranks of a cluster that is this host. Returns the job's exit code.

    Rank 0 writes to this terminal unless `quiet`; other ranks write to `logs/rank-NNNNN.log`. When `enough` returns true, all ranks are
    ended, and this does not count as a failure. The code is 0 if all ranks succeed, else the code of the first rank that failed by itself.
    """
    with started_ranks(module, arguments, cluster=cluster, threads=threads, logs=logs, quiet=quiet) as ranks:
        return ranks.finish(logs, assignment=assignment, enough=enough, listener=listener, quiet=quiet)


@contextmanager
def started_ranks(
    module: str,
    arguments: list[str],
    *,
    cluster: ClusterSpec,
    threads: int,
    logs: Path | None = None,
    quiet: bool = False,
) -> Iterator[Ranks]:
    """Start the ranks of `run_ranks` and yield them. At the end of the block, kill those that are still running."""
    ranks = start_ranks(module, arguments, cluster=cluster, threads=threads, logs=logs, quiet=quiet)
    try:
        yield ranks
    finally:
        ranks.discard()


def start_ranks(
    module: str,
    arguments: list[str],
    *,
    cluster: ClusterSpec,
    threads: int,
    logs: Path | None = None,
    quiet: bool = False,
    address: str = LOOPBACK,
    variables: Sequence[Mapping[str, str]] = (),
) -> Ranks:
    """Start one process for each device of a host. A store socket is opened at `address`, in case rank 0 is one of them.

    Without `logs`, all ranks write to this terminal until they redirect their output. Ranks start with stop signals blocked, so that no
    signal is lost before they have installed their handlers. `variables` are added to the environment of each rank.
    """
    ranks = Ranks()
    try:
        with listening_socket(address) as listener, _blocked():
            ranks.port = listener.getsockname()[1]
            for rank in range(cluster.gpus_per_node):
                env = _environment(rank, cluster, listener, threads) | dict(variables[rank] if variables else {})
                page = ProgressPage.create()
                env[PROGRESS] = page.path
                stacks = evidence_memory()
                env[STACKS] = f"/proc/{os.getpid()}/fd/{stacks}"
                started = _start(module, arguments, rank, env, listener, logs if rank or quiet else None)
                ranks.add(*started, page, stacks)
    except BaseException:
        ranks.discard()
        raise
    return ranks


def empty_snapshot_buffers(count: int) -> list[str]:
    """Paths of new memory files without pages. This process keeps them open."""
    return [f"/proc/{os.getpid()}/fd/{empty_memory()}" for _ in range(count)]


def rank_starter(
    cluster: ClusterSpec,
    folder: Path,
    address: str = LOOPBACK,
    buffers: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[bool], Ranks]:
    """A function that starts this host's processes for a run in `folder`. Its argument says whether they are spares.

    Ranks store snapshots of their state in the memory files `buffers` (new ones if empty). This process keeps them open, so that the next
    attempt finds them. `environment` is added to that of each rank.
    """
    device = "cpu" if cluster.is_cpu else "cuda"
    shared = {**environment, RUN_VARIABLE: os.path.abspath(folder)}
    variables = [
        {**shared, BUFFER_VARIABLE: buffer} for buffer in buffers or empty_snapshot_buffers(cluster.gpus_per_node)
    ]
    return lambda spare: start_ranks(
        "meshwright.training.rank",
        [device, "spare"] if spare else [device],
        cluster=cluster,
        threads=rank_threads(cluster),
        address=address,
        variables=variables,
    )


class Ranks:
    """The processes of this host for the ranks of one attempt. Until `begin`, they wait as warm spares."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.states: list[RankState] = []
        self.port = 0
        """Port of the store socket, which the first process has open."""
        self._readers: list[RankMessageReader] = []
        self._pages: list[ProgressPage] = []
        self._stacks: list[int] = []
        self._answers: list[int] = []

    def add(self, process: subprocess.Popen[bytes], reader: RankMessageReader, page: ProgressPage, stacks: int) -> None:
        """Add a process, with the reader of its messages, and the memory in which it writes its progress and its stacks."""
        self.states.append(RankState(len(self.processes)))
        self.processes.append(process)
        self._readers.append(reader)
        self._pages.append(page)
        self._stacks.append(stacks)

    @property
    def ended(self) -> bool:
        """Whether all processes had ended at the time of the last `poll`."""
        return all(state.code is not None for state in self.states)

    def finish(
        self,
        logs: Path,
        *,
        assignment: Path | None = None,
        enough: Callable[[], bool] | None = None,
        listener: Listener | None = None,
        quiet: bool = False,
    ) -> int:
        """Send `assignment` to the ranks, pass on stop signals, and wait. Returns the job's exit code.

        Unless `quiet`, the reasons of failures are written to stderr. `listener` is called with each message of a rank when it arrives;
        exceptions that it raises are raised here. A second Ctrl-C kills the ranks and raises Interrupted.
        """
        with forward_signals(self.stop, self.kill_at_once):
            if assignment is not None:
                self.begin(assignment)
            self._wait(enough, listener)
        self.close_attempt(listener)
        for line in () if quiet else outcome_lines(self.states, logs):
            write_line(line if line.startswith("  ") else f"meshwright: {line}")
        return job_code(exit_codes(self.states))

    def begin(
        self, assignment: Path, first_rank: int = 0, environments: Sequence[Mapping[str, str]] | None = None
    ) -> None:
        """Let the ranks train the run of an assignment file. `environments` has variables for each rank."""
        environments = environments or [{}] * len(self.processes)
        for state, process, environment in zip(self.states, self.processes, environments, strict=True):
            state.rank += first_rank
            _send(process, BeginMessage(str(assignment), environment))
            end_idle_priority(process.pid)

    def request_self_test(self, environments: Sequence[Mapping[str, str]], seconds: float) -> None:
        """Let waiting processes run the self-test. Each answers with a message `SelfTestResult`."""
        for process, environment in zip(self.processes, environments, strict=True):
            _send(process, SelfTest(environment, seconds))
            end_idle_priority(process.pid)

    def request_end(self, cause: str) -> None:
        """Ask the ranks to close their files and end, because another rank has failed. `cause` is the reason."""
        for process in self.processes:
            _send(process, EndMessage(cause))

    def collect_evidence(self, folder: Path, logs: Path, *, hang: bool) -> threading.Thread:
        """Collect stacks, collectives and process states of all ranks. Returns the thread that writes them to `folder`."""
        self.poll()
        ranks = zip(self.processes, self.states, self._stacks, strict=True)
        return collect([self._subject(*rank) for rank in ranks], folder, logs, hang=hang)

    def _subject(self, process: subprocess.Popen[bytes], state: RankState, stacks: int) -> RankProcess:
        """A rank as input for `collect`. The memory file for its collectives stays open until the rank has ended."""
        self._answers.append(collectives := evidence_memory())
        request = CollectivesRequest(f"/proc/{os.getpid()}/fd/{collectives}")
        return RankProcess(process.pid, state, stacks, collectives, partial(_send, process, request))

    def close_attempt(self, listener: Listener | None = None) -> None:
        """Kill ranks that are still running, read their last messages, and wait for checkpoint writers."""
        self.kill()
        self._read(listener)
        self._await_writers(listener)

    def discard(self) -> None:
        """Kill ranks that are still running, and close their pipes."""
        try:
            self.kill()
        finally:
            self.close()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a stop signal to every running rank. They write a checkpoint after the current step and end together."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """Kill every running rank and the processes that it has started, and wait until they have ended."""
        running = [process for process in self.processes if process.poll() is None]
        self.kill_at_once()
        for process in running:
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                write_line(
                    f"meshwright: process {process.pid} does not end after SIGKILL; it waits for a device or disk"
                )
        if running and sys.stdout is not None and sys.stdout.isatty():
            write_line("\033[?25h", sys.stdout)  # show the cursor again, because rank 0's live display hides it

    def kill_at_once(self) -> None:
        """Send SIGKILL to the process group of every running rank without waiting. This is safe in a signal handler."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes, pages and memory files of ranks that have ended."""
        for answer in self._answers:
            os.close(answer)
        for process, reader, page, stacks in zip(self.processes, self._readers, self._pages, self._stacks, strict=True):
            reader.close()
            page.close()
            os.close(stacks)
            assert process.stdin is not None, "ranks are started with a pipe"
            process.stdin.close()

    def poll(self, listener: Listener | None = None, seconds: float = 0.0) -> None:
        """Wait up to `seconds` for a message, then update exit codes and read messages."""
        if seconds:
            self._await_message(seconds)
        for state, process in zip(self.states, self.processes, strict=True):
            state.code = process.poll()
        self._read(listener)  # after the exit codes, so that no message is missed that was written before the end

    def _wait(self, enough: Callable[[], bool] | None, listener: Listener | None) -> None:
        """Wait until all ranks have ended, `enough` returns true, or ranks have not ended in time after a request."""
        failed_at = requested_at = None
        while True:
            self.poll(listener)
            if self.ended:
                return
            now = time.monotonic()
            if any(state.failed for state in self.states):
                failed_at = failed_at or now
                codes = exit_codes(self.states)
                action = next_action(codes, now - failed_at, None if requested_at is None else now - requested_at)
                if action == "kill":
                    return
                if action == "request end":
                    requested_at = now
                    first = culprit(codes)
                    assert first is not None, "a rank has failed"
                    self.request_end(cause(self.states[first]))
            elif enough is not None and enough():
                return
            self._await_message(POLL_SECONDS)

    def _await_writers(self, listener: Listener | None) -> None:
        """Wait up to `WRITER_SECONDS` for the checkpoint writers of ranks that have ended. A writer keeps its rank's pipe open."""
        deadline = time.monotonic() + WRITER_SECONDS
        while any(reader.open for reader in self._readers):
            if time.monotonic() > deadline:
                write_line("meshwright: a checkpoint is still being written; it becomes visible once it is complete")
                return
            self._await_message(POLL_SECONDS)
            self._read(listener)

    def _await_message(self, seconds: float) -> None:
        """Wait until a rank has written a message, at most `seconds`."""
        poll = select.poll()  # select() does not support descriptors above 1023
        for reader in self._readers:
            if reader.open:
                poll.register(reader, select.POLLIN)
        poll.poll(seconds * 1000)

    def _read(self, listener: Listener | None) -> None:
        ranks = zip(self.states, self.processes, self._readers, self._pages, strict=True)
        for state, process, reader, page in ranks:
            if page.count == state.progress_count:
                state.stopped = is_stopped(process.pid)
            state.progress = page.read()
            state.progress_count = page.count
            state.pending = page.pending_wait
            for message in reader.read():
                if isinstance(message, StepMessage):
                    state.last_step = message.step
                elif isinstance(message, FailureMessage):
                    state.failure = message
                if listener is not None:
                    listener(state.rank, message)


def _send(process: subprocess.Popen[bytes], message: Message) -> None:
    """Write a message to a rank's standard input."""
    assert process.stdin is not None, "ranks are started with a pipe"
    with suppress(OSError):  # the rank has ended, as its exit code will show
        os.write(process.stdin.fileno(), encode(message))


@contextmanager
def forward_signals(stop: Callable[[int], None], kill: Callable[[], None]) -> Iterator[None]:
    """Within a `with` block, call `stop` with each stop signal. The second Ctrl-C calls `kill` and raises Interrupted.

    Rank 0 prints that the job stops.
    """
    interrupts = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            kill()
            raise Interrupted("ended at once")
        stop(number)

    with _handling(forward):
        yield


def _environment(rank: int, cluster: ClusterSpec, listener: socket.socket, threads: int) -> dict[str, str]:
    """The environment variables of one rank.

    The rank's own variables override the user's, and the user's override those in the cluster file. If the store is on the loopback
    interface, ranks use this interface by default.
    """
    address = listener.getsockname()[0]
    local = (
        {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if address == "::1" or address.startswith("127.")
        else {}
    )
    network = local | network_environment(cluster, rank)
    rank_variables = {"RANK": rank, "WORLD_SIZE": cluster.gpus_per_node, "LOCAL_RANK": rank}
    rank_variables |= {"LOCAL_WORLD_SIZE": cluster.gpus_per_node}
    rank_variables |= {
        "MASTER_PORT": listener.getsockname()[1],
        "MESHWRIGHT_PARENT": os.getpid(),
    }
    rank_variables |= {START_TIME_VARIABLE: process_start_time()}
    env = {**_torch_defaults(threads), **network, **without_own_keys(), "MASTER_ADDR": address}
    return env | {name: str(value) for name, value in rank_variables.items()}


def _torch_defaults(threads: int) -> dict[str, str]:
    """Defaults for environment variables that torch and CUDA read.

    Without them, every rank would compute with one thread for each core of the host, and its compiler would use one process for each core.
    CUDA would number different GPUs by their speed, while nvidia-smi and NVML number them by their position.
    """
    defaults = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    defaults |= {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    cache = compiler_cache()
    return defaults | ({"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {})


def _start(
    module: str, arguments: list[str], rank: int, env: dict[str, str], listener: socket.socket, logs: Path | None
) -> tuple[subprocess.Popen[bytes], RankMessageReader]:
    """Start a rank with pipes for its standard input and its messages. Its output goes to `logs`, or to this terminal if that is None."""
    reading, writing = os.pipe()
    try:
        env = env | {CHANNEL: str(writing)}
        passed = [writing]
        if rank == 0:
            env = env | {STORE_SOCKET: str(listener.fileno())}
            passed = [writing, listener.fileno()]
        command = [sys.executable, "-m", module, *arguments]
        with _output(rank, logs) as output:
            process = subprocess.Popen(
                command,
                env=env,
                pass_fds=passed,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, RankMessageReader(reading)


@contextmanager
def _output(rank: int, logs: Path | None) -> Iterator[int | None]:
    if logs is None:
        yield None
        return
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"rank-{rank:05d}.log").open("ab") as log:
        yield log.fileno()


@contextmanager
def listening_socket(address: str = LOOPBACK) -> Iterator[socket.socket]:
    """A socket on a free port of an address of this host, for a `with` block. Raises CommunicationFailure if this is not possible."""
    with listen_at((address, 0)) as listener:
        try:
            with socket.create_connection(listener.getsockname()[:2], timeout=5):
                listener.accept()[0].close()
        except OSError as error:
            raise CommunicationFailure(
                f"ranks of this host meet at {address}, which cannot be reached: {error.strerror or error}; bring its interface "
                "up (ip link set lo up)"
            ) from error
        yield listener


@contextmanager
def _blocked() -> Iterator[None]:
    """Block stop signals while ranks are started. Ranks inherit this, and unblock the signals once their handlers are installed."""
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler of stop signals for a block; does nothing outside the main thread, where Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers_before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler_before in handlers_before.items():
            signal.signal(
                number, signal.SIG_DFL if handler_before is None else handler_before
            )  # None: a handler that Python did not install
