"""Gives a rank access to its loader processes: requests wait in a queue by priority, and each free process does the next one."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from types import TracebackType
from typing import Any

from meshwright.data.streams.process import Settings
from meshwright.spec.errors import ERROR_CLASS_BY_EXIT_CODE, MeshwrightError, OutOfResources

PROGRAM = "meshwright.data.streams.process"
"""Module that a loader process runs."""
ATTEMPTS = 3
"""Times that a request is tried. A request that ends its process each time is given up."""
NOW = 0
"""Priority of a request whose answer is needed now."""
SOON = 1
"""Priority of a request whose answer is needed later."""
log = logging.getLogger("meshwright")


@dataclass
class _Task:
    """A request that is not answered yet."""

    message: str
    """The request as one line of JSON."""
    result: Future[dict[str, Any]] = field(default_factory=Future)
    """Receives the answer."""
    taken: bool = False
    """Whether a process works on it."""


class Loaders:
    """Starts `processes` loader processes and passes requests to them.

    Close it after use, or use it in a `with` block. The processes also end when this process ends.
    """

    def __init__(self, settings: Settings, processes: int) -> None:
        self._settings = settings
        self._tasks: dict[str, _Task] = {}
        self._waiting: queue.PriorityQueue[tuple[int, int, str | None]] = queue.PriorityQueue()
        self._numbers = count()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._serve, name="loader", daemon=True) for _ in range(processes)]
        for thread in self._threads:
            thread.start()

    def request(self, message: Mapping[str, Any], priority: int = NOW) -> Future[dict[str, Any]]:
        """Queue a request and return the future of its answer.

        If an equal request is still waiting, its future is returned, and `priority` NOW moves the request to the front.
        """
        key = json.dumps(message)
        with self._lock:
            task = self._tasks.get(key)
            if task is None:
                task = self._tasks[key] = _Task(key)
                self._waiting.put((priority, next(self._numbers), key))
            elif priority == NOW and not task.taken:
                self._waiting.put((priority, next(self._numbers), key))
        return task.result

    def close(self) -> None:
        """End the processes. Each first finishes the request on which it works."""
        for _ in self._threads:
            self._waiting.put((-1, next(self._numbers), None))
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Loaders:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """The loop of one thread: start a loader process of its own, and pass requests to it one at a time."""
        process: subprocess.Popen[str] | None = None
        while (key := self._waiting.get()[2]) is not None:
            with self._lock:
                task = self._tasks.get(key)
                if task is None or task.taken:
                    continue
                task.taken = True
            answer: dict[str, Any] | MeshwrightError = MeshwrightError("no loader process")
            for _ in range(ATTEMPTS):
                try:
                    process = process or self._start()
                    answer = _asked(process, task.message)
                except OSError as error:  # There is no memory for a process, or the limit of processes is reached.
                    answer = OutOfResources(f"a loader process cannot be started: {error.strerror or error}")
                if isinstance(answer, dict):
                    break
                log.warning("%s", answer)
                process = None
            with self._lock:
                del self._tasks[key]
            _settle(task.result, answer)
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            process.wait()

    def _start(self) -> subprocess.Popen[str]:
        """Start a loader process and send it the settings."""
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(OSError):  # The process has died; the first request will report that.
            process.stdin.write(json.dumps(asdict(self._settings)) + "\n")
        return process


def _asked(process: subprocess.Popen[str], message: str) -> dict[str, Any] | MeshwrightError:
    """Send a request to a process and wait for the answer. If the process has ended, returns an error that says so."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(message + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())
    except (OSError, ValueError):
        process.kill()
        return MeshwrightError(f"a loader process ended with code {process.wait()}")


def _settle(result: Future[dict[str, Any]], answer: dict[str, Any] | MeshwrightError) -> None:
    """Set the result of a request, or the error that the answer describes."""
    if isinstance(answer, MeshwrightError):
        result.set_exception(answer)
    elif "error" in answer:
        error_class = ERROR_CLASS_BY_EXIT_CODE.get(answer["code"], MeshwrightError)
        result.set_exception(error_class(answer["error"]))
    else:
        result.set_result(answer)
