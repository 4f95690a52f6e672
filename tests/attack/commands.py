"""Running commands, their processes, and clients that attack them."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

MARKS = [pytest.mark.attack, pytest.mark.slow, pytest.mark.timeout(1800)]
"""Of the tests of this folder; the time is for a machine that does other work too."""
LONGEST_SECONDS = 600
"""Time for what ends by itself, such as a run."""
HARD_LIMIT = 256
"""Open files that an attacked process may have."""


class Command:
    """A running `meshwright` command whose output goes to a file."""

    def __init__(
        self,
        *words: object,
        output: Path,
        environment: Mapping[str, str] | None = None,
        files: int | None = None,
        module: str = "meshwright",
    ) -> None:
        """`files`: the hard limit of open files of the command and its children; `module` runs with the words."""
        self.file = output

        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 128), files))

        with output.open("ab") as opened:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, words)],
                stdout=opened,
                stderr=opened,
                env={**os.environ, **(environment or {})},
                preexec_fn=limit,
            )

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def wait_for(self, done: Callable[[], object], seconds: float = LONGEST_SECONDS) -> None:
        """Wait until `done` is true, while the command runs."""
        deadline = time.monotonic() + seconds
        while not done():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def port_after(self, text: str) -> int:
        """The port of the URL in the line with `text`."""
        self.wait_for(lambda: text in self.output)
        line = next(line for line in self.output.splitlines() if text in line)
        return int(line.rpartition(":")[2].split("/")[0])

    def wait(self) -> int:
        """The exit code, once the command has ended by itself."""
        return self.process.wait(LONGEST_SECONDS)

    def end(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


@contextmanager
def running(*words: object, **options: object) -> Iterator[Command]:
    command = Command(*words, **options)  # type: ignore[arg-type]
    try:
        yield command
    finally:
        command.end()


@contextmanager
def flood(port: int, sent: bytes = b"", count: int = 300) -> Iterator[None]:
    """Within the block, so many connections are open all the time: one that is closed is opened again."""
    stop = threading.Event()

    def attack() -> None:
        with ExitStack() as stack:
            open_ones: list[socket.socket] = []
            while not stop.is_set():
                for _ in range(min(20, count - len(open_ones))):
                    with contextlib.suppress(OSError):
                        end = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                        end.sendall(sent)
                        end.setblocking(False)
                        open_ones.append(end)
                for end in list(open_ones):
                    with contextlib.suppress(BlockingIOError):
                        try:
                            closed = not end.recv(1 << 16)
                        except ConnectionError:
                            closed = True
                        if closed:
                            open_ones.remove(end)
                            end.close()
                stop.wait(0.05)

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def ask(port: int, request: bytes, until: bytes = b"", seconds: float = 20) -> bytes:
    """An answer up to the bytes `until`; asks again for so long if the connection is closed before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as end:
            end.sendall(request)
            answer = b""
            while data := end.recv(1 << 16):
                answer += data
                if until in answer:
                    return answer
        time.sleep(0.05)
    raise AssertionError("no answer")


def descendants(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def listening_ports(pid: int, module: str) -> list[int]:
    """The ports at which those of a process's descendants listen that run `module`."""
    listening = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A":  # the state of sockets that listen
            listening[f"socket:[{columns[9]}]"] = int(columns[1].partition(":")[2], 16)
    ports: list[int] = []
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            if module in Path(f"/proc/{each}/cmdline").read_text().split("\0"):
                links = [os.readlink(path) for path in Path(f"/proc/{each}/fd").iterdir()]
                ports += [listening[link] for link in links if link in listening]
    return ports


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
