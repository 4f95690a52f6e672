"""Runs a command of meshwright in which chosen calls of the operating system fail, for `tests/attack/test_injected.py`.

    python -m tests.attack.injected LOG KIND ERRORS FIRST COUNT PART RANKS WORD…

KIND is `write` (opening files to write, flushing, renaming, making folders) or `accept`. The calls of that kind with
numbers FIRST to FIRST + COUNT - 1, from 1, fail with ERRORS, such as `ENOSPC` or `ENOSPC,EIO` in turn. LOG gets a line
for each call. PART is the process whose calls fail, the `command` itself or the `coordinator` that it starts. RANKS is
`own`, or `standin` for ranks without torch. Coordinators and stand-in ranks are forked, which takes milliseconds.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from meshwright.spec.rank_environment import stop_signals
from tests.attack import standin_rank

LIMITS = {
    "FAREWELL_SECONDS": 4.0, "ABANDONED_SECONDS": 20.0, "UNANSWERED_SECONDS": 4.0, "STILL_SECONDS": 1.0, "LOCK_SECONDS": 1.0,
    "GIVE_UP_SECONDS": 10.0,
}  # fmt: skip
"""Shorter times of `launch.hosts`; agents report every 3 s while their ranks run, so a farewell takes longer."""
UNWRITABLE_SECONDS = 2.0


class Injector:
    """Counts the calls of patched functions, in this process and those forked from it, and lets some of them fail."""

    def __init__(self, log: str, errors: str, first: int, count: int) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._errors = [getattr(errno, error) for error in errors.split(",")]
        self._first, self._failing = first, range(first, first + count)
        self._calls, self._lock = mmap.mmap(-1, 8), threading.Lock()
        self.active = True

    @property
    def descriptor(self) -> int:
        return self._log

    def patch(self, owner: Any, name: str, applies: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Replace a function of a module or class by one that may fail in calls that it `applies` to."""
        original = getattr(owner, name)

        @wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if self.active and applies(*arguments, **options):
                self._check(name, arguments)
            return original(*arguments, **options)

        setattr(owner, name, call)

    def _check(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            number = int.from_bytes(self._calls[:], "little") + 1
            self._calls[:] = number.to_bytes(8, "little")
            fails = number in self._failing
            os.write(self._log, f"{number} {name} {arguments[:2]}{' FAILS' if fails else ''}\n".encode())
        if fails:
            error = self._errors[(number - self._first) % len(self._errors)]
            named = [str(each) for each in arguments[:1] if isinstance(each, (str, Path))]
            raise OSError(error, os.strerror(error), *named)


class Forked:
    """Stands in for `subprocess.Popen`: runs `work` in a fork of this process, with a pipe as standard input."""

    def __init__(
        self,
        work: Callable[[], object],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        output: int | None = None,
    ) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(reading)
            self.stdin = os.fdopen(writing, "wb")
            return
        code = 1
        try:
            os.setsid()
            os.dup2(reading, 0)
            for each in (1, 2) if output is not None else ():
                os.dup2(output, each)  # type: ignore[arg-type]
            nothing = os.open(os.devnull, os.O_RDWR)
            for each in map(int, os.listdir("/proc/self/fd")):
                if each > 2 and each not in descriptors:
                    os.dup2(nothing, each)  # closed by the objects that this process has inherited
            for number in stop_signals():
                signal.signal(number, signal.SIG_DFL)
            sys.stdin = os.fdopen(0, closefd=False)
            os.environ.clear()
            os.environ.update(environment)
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def writes(path: Path, mode: str = "r", *_: Any, **__: Any) -> bool:
    """Whether `Path.open` opens a regular file to write."""
    return any(letter in mode for letter in "wax+") and not str(path).startswith(("/dev", "/proc"))


def fork_ranks(injector: Injector) -> None:
    """Fork stand-in ranks in place of starting ranks, and wait for less time for what does not come."""
    from meshwright.launch import hosts, local, state_file

    def run_rank() -> None:
        injector.active = False
        standin_rank.main()

    def start_rank(
        command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], stdout: int | None, **_: Any
    ) -> Forked:
        assert "meshwright.training.rank" in command
        return Forked(run_rank, env, [*pass_fds, injector.descriptor], stdout)

    local.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=start_rank, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    state_file.UNWRITABLE_SECONDS = UNWRITABLE_SECONDS
    for name, seconds in LIMITS.items():
        setattr(hosts, name, seconds)


def fork_coordinators(injector: Injector, part: str) -> None:
    """Fork coordinators in place of starting them; their calls fail if `part` says so."""
    from meshwright.launch import hosts

    def coordinate(words: Sequence[str]) -> None:
        injector.active = part == "coordinator"
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        run_command(["coordinate", *words])

    def start_coordinator(address: tuple[str, int], words: Sequence[str], seen: str = "") -> Forked:
        with hosts.listen_at(address, hosts.COORDINATOR_BACKLOG) as listener:
            place = {
                hosts.COORDINATOR_VARIABLE: f"{address[0]}:{listener.getsockname()[1]}",
                hosts.LISTEN_DESCRIPTOR: str(listener.fileno()),
                hosts.SEEN_VARIABLE: seen,
            }
            return Forked(partial(coordinate, words), {**os.environ, **place}, [listener.fileno(), injector.descriptor])

    hosts._start_coordinator = start_coordinator


def run_command(words: Sequence[str]) -> None:
    """Run a command of meshwright; ends the process with its code."""
    from meshwright.cli.main import main as command

    sys.argv = ["meshwright", *words]
    command()


def run(log: str, kind: str, errors: str, first: str, count: str, part: str, ranks: str, *words: str) -> None:
    """Run the command with the failing calls; ends the process with its code."""
    injector = Injector(log, errors, int(first), int(count))
    injector.active = part == "command"
    if ranks == "standin":
        fork_ranks(injector)
    if "--agent" in words:
        fork_coordinators(injector, part)
    if kind == "write":
        injector.patch(Path, "open", writes)
        for name in ("fsync", "replace", "rename", "mkdir"):
            injector.patch(os, name)
    else:
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # it accepts without Python
        injector.patch(socket.socket, "accept")
    run_command(words)


def run_forked(output: str, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    """`run` in a process that was forked for it, with its output in a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for each in (1, 2):
        os.dup2(descriptor, each)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.update(environment)
    try:
        run(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    run(*sys.argv[1:])
