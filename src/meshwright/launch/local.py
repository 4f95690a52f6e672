"""The ranks of one host: started, watched, stopped together.

The parent owns a listening socket on 127.0.0.1 that rank 0's store serves, so no port is open beyond loopback. Ranks run in sessions of
their own: Ctrl-C reaches only the parent, which passes it on once and kills at the second. When a rank fails, the parent tells the others
to end, gives them `GRACE_SECONDS` to write their report and close their files, and kills what still runs then. Ranks do not depend on the
parent being scheduled: while it is stopped (SIGSTOP, Ctrl-Z) they train on.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from meshwright.events.messages import CHANNEL, Begin, End, Failure, Message, MessageReader, Step, encode
from meshwright.events.start import BEGAN, process_began
from meshwright.events.terminal import write_line
from meshwright.launch.outcome import STOPPED_WAITING, RankEnd, cause, job_code, outcome_lines
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, CommunicationFailure, Interrupted
from meshwright.spec.folders import compiler_cache
from meshwright.spec.network import network_environment
from meshwright.spec.place import stop_signals

CULPRIT_SECONDS = 2.0
"""After a rank reports that others are gone, how long to wait for the one whose failure caused it."""
STOP_SECONDS = 30.0
"""How long the other ranks may take when one has already ended as asked."""
GRACE_SECONDS = 12.0
"""How long ranks that were told to end may take for it; more than `training.lifecycle.FINISH_SECONDS`."""
POLL_SECONDS = 0.05
Listener = Callable[[int, Message], None]
"""Called with a rank and its message."""


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
    """Run `python -m module arguments…` as the ranks of a cluster of this one host and return the exit code of the job.

    Rank 0 keeps this terminal unless `quiet`; the others write to `logs/rank-NNNNN.log`. Once `enough` says so all ranks are ended, which
    is no failure. The code is 0 when all succeed, else that of the first rank that failed by itself.
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
    """The ranks of `run_ranks`, started, to be finished; those that the block leaves running are killed.

    Without `logs` all ranks write to this terminal until they redirect their output themselves. Ranks start with stop signals blocked, so
    that none is lost before they listen and unblock them.
    """
    ranks = Ranks()
    try:
        with _listening_socket() as listener, _blocked():
            for rank in range(cluster.ranks):
                env = _environment(rank, cluster, listener, threads)
                ranks.add(_start(module, arguments, rank, env, listener, logs if rank or quiet else None))
        yield ranks
    finally:
        ranks.kill()
        ranks.close()


class Ranks:
    """Started ranks of one host."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[MessageReader] = []
        self._ends: list[RankEnd] = []

    def add(self, started: tuple[subprocess.Popen[bytes], MessageReader]) -> None:
        """Take over a process and the reading end of its channel."""
        self._ends.append(RankEnd(len(self.processes)))
        self.processes.append(started[0])
        self._readers.append(started[1])

    def finish(
        self,
        logs: Path,
        *,
        assignment: Path | None = None,
        enough: Callable[[], bool] | None = None,
        listener: Listener | None = None,
        quiet: bool = False,
    ) -> int:
        """Hand `assignment` to the ranks, pass stop signals on and wait; returns the exit code.

        Unless `quiet`, writes to stderr why ranks failed.

        `listener` is called with the ranks' messages as they arrive; what it raises ends the ranks and is raised. A second Ctrl-C kills
        the ranks and raises Interrupted.
        """
        with self._forwarding():
            if assignment is not None:
                self._send(Begin(str(assignment)))
            self._wait(enough, listener)
        self.kill()
        for line in () if quiet else outcome_lines(self._ends, logs):
            write_line(line if line.startswith("  ") else f"meshwright: {line}")
        return job_code(self._ends)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a stop signal to every running rank: they end together after the running step, with a checkpoint."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """End what still runs."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        if running and sys.stderr.isatty():
            write_line("\033[?25h")  # the cursor, which a live display hides

    def close(self) -> None:
        """Close the pipes of ranks that have ended."""
        for process, reader in zip(self.processes, self._readers, strict=True):
            reader.close()
            assert process.stdin is not None, "ranks are started with a pipe"
            process.stdin.close()

    def _wait(self, enough: Callable[[], bool] | None, listener: Listener | None) -> None:
        """Return when all ranks ended, it is `enough`, or ranks that were told to end did not."""
        failed_at = told_at = None
        while True:
            for end, process in zip(self._ends, self.processes, strict=True):
                end.code = process.poll()
            self._read(listener)  # after the codes: what a rank wrote before it ended is there
            if all(end.code is not None for end in self._ends):
                return
            now = time.monotonic()
            if any(end.failed for end in self._ends):
                failed_at = failed_at or now
                if told_at is None and now - failed_at >= self._patience():
                    told_at = now
                    self._send(End(cause(self._ends)))
                elif told_at is not None and now - told_at > GRACE_SECONDS:
                    return
            elif enough is not None and enough():
                return
            select.select([reader for reader in self._readers if reader.open], [], [], POLL_SECONDS)

    def _patience(self) -> float:
        """Seconds between the first failure and the order to end: time for the others to stop too, or for the culprit to show."""
        codes = [end.exit_code for end in self._ends if end.failed]
        if all(code in (EXIT_PREEMPTED, EXIT_INTERRUPTED) for code in codes):
            return STOP_SECONDS
        return CULPRIT_SECONDS if all(code in STOPPED_WAITING for code in codes) else 0.0

    def _read(self, listener: Listener | None) -> None:
        for end, reader in zip(self._ends, self._readers, strict=True):
            for message in reader.read():
                if isinstance(message, Step):
                    end.last_step = message.step
                elif isinstance(message, Failure):
                    end.failure = message
                if listener is not None:
                    listener(end.rank, message)

    def _send(self, message: Message) -> None:
        """Write a message to every running rank's standard input."""
        for process in self.processes:
            assert process.stdin is not None, "ranks are started with a pipe"
            with suppress(OSError):  # a rank that is gone already shows in its exit code
                os.write(process.stdin.fileno(), encode(message))

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Pass stop signals on to the ranks, whose first says so; the second Ctrl-C kills them and raises Interrupted."""
        interrupts = 0

        def forward(number: int, frame: FrameType | None) -> None:
            nonlocal interrupts
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                self.kill()
                raise Interrupted("ended at once")
            self.stop(number)

        with _handling(forward):
            yield


def _environment(rank: int, cluster: ClusterSpec, listener: socket.socket, threads: int) -> dict[str, str]:
    """One rank's environment: what the cluster says of the network, what the user exported before it, and the rank's place before both.

    Ranks of one host talk over loopback unless somebody says otherwise.
    """
    network = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | network_environment(cluster, rank)
    place = {"RANK": rank, "WORLD_SIZE": cluster.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": cluster.ranks}
    place |= {"MASTER_PORT": listener.getsockname()[1], "MESHWRIGHT_PARENT": os.getpid(), "OMP_NUM_THREADS": threads}
    place |= {BEGAN: process_began()}
    env = {**_torch_defaults(threads), **network, **os.environ, "MASTER_ADDR": "127.0.0.1"}
    return env | {name: str(value) for name, value in place.items()}


def _torch_defaults(threads: int) -> dict[str, str]:
    """What torch reads from the environment, where the user says nothing of it.

    Left alone the compiler starts as many processes as the host has cores, up to 32, for every rank.
    """
    usual = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    cache = compiler_cache()
    return usual | ({"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {})


def _start(
    module: str, arguments: list[str], rank: int, env: dict[str, str], listener: socket.socket, logs: Path | None
) -> tuple[subprocess.Popen[bytes], MessageReader]:
    """Start a rank with a pipe to its standard input and one for its messages; its output goes to `logs` unless that is None."""
    reading, writing = os.pipe()
    try:
        env, passed = env | {CHANNEL: str(writing)}, [writing]
        if rank == 0:
            env, passed = env | {"MESHWRIGHT_STORE_FD": str(listener.fileno())}, [writing, listener.fileno()]
        command = [sys.executable, "-m", module, *arguments]
        with _output(rank, logs) as output:
            process = subprocess.Popen(
                command, env=env, pass_fds=passed, start_new_session=True, stdin=subprocess.PIPE, stdout=output, stderr=output
            )  # fmt: skip
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, MessageReader(reading)


@contextmanager
def _output(rank: int, logs: Path | None) -> Iterator[int | None]:
    if logs is None:
        yield None
        return
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"rank-{rank:05d}.log").open("ab") as log:
        yield log.fileno()


def rank_threads(cluster: ClusterSpec) -> int:
    """Processor threads of one rank: its share of this host, of which a rank that computes on a GPU needs only a few."""
    share = max(1, (os.cpu_count() or 1) // cluster.gpus_per_node)
    return share if cluster.is_cpu else min(8, share)


@contextmanager
def _listening_socket() -> Iterator[socket.socket]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        try:
            with socket.create_connection(listener.getsockname(), timeout=5):
                listener.accept()[0].close()
        except OSError as error:
            raise CommunicationFailure(
                f"ranks of this host meet at 127.0.0.1, which cannot be reached: {error.strerror or error}; bring the loopback interface "
                "up (ip link set lo up)"
            ) from error
        yield listener


@contextmanager
def _blocked() -> Iterator[None]:
    """Hold stop signals back while ranks are started. The ranks inherit it, and hold them back until they listen."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle stop signals for the length of a block; a thread that is not the main one cannot, and leaves them alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)
