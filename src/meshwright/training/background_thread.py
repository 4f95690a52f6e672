"""A thread for work in parallel to the training loop. The process can end without waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundThread:
    """Runs calls one after another in a daemon thread. (The threads of an executor would be joined when the interpreter ends.)"""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call `function` after all calls submitted earlier. The future gets its result or its error."""
        future: Future[T] = Future()
        self._calls.put((future, function, arguments))
        return future

    def wait(self) -> None:
        """Wait until all calls submitted so far have ended."""
        self.submit(int).result()

    def _run(self) -> None:
        while True:
            future, function, arguments = self._calls.get()
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # raised where the caller reads the result
                future.set_exception(error)
