"""Runs a command of meshwright in which chosen calls of the operating system fail, for `tests/attack/test_injected.py`.

    python -m tests.attack.injected LOG KIND ERROR FIRST COUNT RANKS WORD…

KIND is `write` (opening files to write, flushing, renaming, making folders) or `accept`. The calls of that kind with
numbers FIRST to FIRST + COUNT - 1, from 1, fail with ERROR, such as ENOSPC. LOG gets a line for each call. RANKS is `own`, or `standin`
for ranks without torch.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

STANDIN = "tests.attack.standin_rank"


class Injector:
    """Counts the calls of patched functions and lets some of them fail."""

    def __init__(self, log: str, error: str, first: int, count: int) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._error, self._failing = getattr(errno, error), range(first, first + count)
        self._calls, self._lock = 0, threading.Lock()

    def patch(self, owner: Any, name: str, applies: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Replace a function of a module or class by one that may fail in calls that it `applies` to."""
        original = getattr(owner, name)

        @wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if applies(*arguments, **options):
                self._check(name, arguments)
            return original(*arguments, **options)

        setattr(owner, name, call)

    def _check(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            self._calls += 1
            fails = self._calls in self._failing
            os.write(self._log, f"{self._calls} {name} {arguments[:2]}{' FAILS' if fails else ''}\n".encode())
        if fails:
            raise OSError(self._error, os.strerror(self._error))


def writes(path: Path, mode: str = "r", *_: Any, **__: Any) -> bool:
    """Whether `Path.open` opens a regular file to write."""
    return any(letter in mode for letter in "wax+") and not str(path).startswith(("/dev", "/proc"))


def run(log: str, kind: str, error: str, first: str, count: str, ranks: str, *words: str) -> None:
    """Run the command; ends the process with its code."""
    injector = Injector(log, error, int(first), int(count))
    if ranks == "standin":
        from meshwright.launch import local

        start_ranks = local.start_ranks
        local.start_ranks = lambda module, *rest, **options: start_ranks(STANDIN, *rest, **options)  # type: ignore[assignment]
    from meshwright.cli.main import main as command

    if kind == "write":
        injector.patch(Path, "open", writes)
        for name in ("fsync", "replace", "rename", "mkdir"):
            injector.patch(os, name)
    else:
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # it accepts without Python
        injector.patch(socket.socket, "accept")
    sys.argv = ["meshwright", *words]
    command()


if __name__ == "__main__":
    run(*sys.argv[1:])
