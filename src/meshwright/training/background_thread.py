"""A thread for work beside the training loop, for which the end of the process does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundThread:
    """Runs calls in their order in a daemon thread; an executor's threads are joined when the interpreter ends."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call `function` after all calls before; the future gets its result or its error."""
        future: Future[T] = Future()
        self._calls.put((future, function, arguments))
        return future

    def wait(self) -> None:
        """Wait for all calls."""
        self.submit(int).result()

    def _run(self) -> None:
        while True:
            future, function, arguments = self._calls.get()
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # raised where the caller reads the result
                future.set_exception(error)
