"""The ranks of one host: started, watched, stopped together.

The parent owns a listening socket on 127.0.0.1 that rank 0's store serves, so no port is open beyond loopback. Ranks run in sessions of
their own: Ctrl-C reaches only the parent, which passes it on once and kills at the second. A rank that fails takes the others with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from meshwright.events.start import BEGAN, process_began
from meshwright.launch.lost import RankLogs
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, Interrupted
from meshwright.spec.folders import compiler_cache
from meshwright.spec.network import network_environment

CULPRIT_SECONDS = 2.0
"""After a rank reports that others are gone, how long to wait for the one whose failure caused it."""
STOP_SECONDS = 30.0
"""How long the other ranks may take when one has already ended as asked."""
POLL_SECONDS = 0.05
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_ranks(
    module: str,
    arguments: list[str],
    *,
    cluster: ClusterSpec,
    logs: Path,
    threads: int,
    quiet: bool = False,
    enough: Callable[[], bool] | None = None,
) -> int:
    """Run `python -m module arguments…` as the ranks of a cluster of this one host and return the exit code of the job.

    Rank 0 keeps this terminal unless `quiet`; the others write to `logs/rank-NNNNN.log`. Once `enough` says so all ranks are ended, which
    is no failure. The code is 0 when all succeed, else that of the first rank that failed by itself.
    """
    with started_ranks(module, arguments, cluster=cluster, threads=threads, logs=logs, quiet=quiet) as ranks:
        return ranks.finish(logs, enough=enough)


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

    Without `logs` all ranks write to this terminal, for as long as they do not turn away from it themselves. Ranks start with SIGINT,
    SIGTERM and SIGUSR1 blocked, so that none is lost before they listen and unblock them.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _listening_socket() as listener, _blocked():
            for rank in range(cluster.ranks):
                env = _environment(rank, cluster, listener, threads)
                place = logs if rank or quiet else None
                processes.append(_start(module, arguments, rank, env, listener, place))
        yield Ranks(processes)
    finally:
        _kill(processes)


class Ranks:
    """Started ranks of one host."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def finish(self, logs: Path, *, told: str = "", enough: Callable[[], bool] | None = None) -> int:
        """Write `told` to every rank's standard input and close it, pass stop signals on, and wait; returns the job's exit code.

        A second Ctrl-C kills the ranks and raises Interrupted.
        """
        said = RankLogs(logs, len(self._processes))
        with _forwarding(self._processes):
            for process in self._processes:
                _tell(process, told)
            codes = _wait(self._processes, enough)
        _kill(self._processes)
        for line in said.of_lost(codes):
            sys.stderr.write(f"meshwright: {line}\n")
        return _job_code(codes)


def _tell(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None, "ranks are started with a pipe"
    with suppress(BrokenPipeError), process.stdin:  # one that is gone already shows in its exit code
        process.stdin.write(text.encode())


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
) -> subprocess.Popen[bytes]:
    command, passed = [sys.executable, "-m", module, *arguments], ()
    if rank == 0:
        passed = (listener.fileno(),)
        env = env | {"MESHWRIGHT_STORE_FD": str(listener.fileno())}
    if logs is None:
        return subprocess.Popen(command, env=env, pass_fds=passed, start_new_session=True, stdin=subprocess.PIPE)
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"rank-{rank:05d}.log").open("ab") as log:
        return subprocess.Popen(
            command, env=env, pass_fds=passed, start_new_session=True, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
        )  # fmt: skip


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
        yield listener


@contextmanager
def _blocked() -> Iterator[None]:
    """Hold stop signals back while ranks are started. The ranks inherit it, and hold them back until they listen."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _forwarding(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass stop signals on to the ranks, whose first says so; the second Ctrl-C kills them and raises Interrupted."""
    interrupts = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            _kill(processes)
            raise Interrupted("ended at once")
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    kept = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]], enough: Callable[[], bool] | None = None) -> list[int | None]:
    """Wait until all ranks ended, one failed or it is `enough`; give a failure's true culprit a moment to show.

    Returns how each rank ended (None: not yet), a death by signal as its negative number.
    """
    failed_at: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        failures = [code for code in codes if code not in (None, EXIT_DONE)]
        if None not in codes:
            return codes
        if failures:
            failed_at = failed_at or time.monotonic()
            stopping = all(code in (EXIT_PREEMPTED, EXIT_INTERRUPTED) for code in failures)
            if time.monotonic() - failed_at > (STOP_SECONDS if stopping else CULPRIT_SECONDS):
                return codes
        elif enough is not None and enough():
            return codes
        time.sleep(POLL_SECONDS)


def _job_code(codes: list[int | None]) -> int:
    """The first rank's own failure; one killed by a signal is a communication failure to the job: its peers lost it."""
    failures = [code for code in codes if code not in (None, EXIT_DONE)]
    own = [code for code in failures if code != EXIT_COMMUNICATION]
    code = (own or failures or [EXIT_DONE])[0]
    return EXIT_COMMUNICATION if code < 0 else code


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.kill()
    for process in running:
        process.wait()
    if running and sys.stderr.isatty():
        sys.stderr.write("\033[?25h\n")  # the cursor, which a live display hides, below it
