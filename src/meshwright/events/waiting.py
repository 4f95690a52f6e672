"""Tells a user who waits that a slow operation is still at work. It writes whole lines, so it suits terminals and log files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_SECONDS = 5.0
"""Seconds after which the first line is written. A faster operation writes none."""
EVERY_SECONDS = 10.0
"""Seconds between two lines."""


@contextmanager
def telling(what: str, note: Callable[[str], None]) -> Iterator[None]:
    """A context: while its block runs, `note` receives a line after `FIRST_SECONDS` and then every `EVERY_SECONDS`.

    `what` says what the block does, for example "searching for a plan". `note` is called in another thread, and not after the block.
    """
    done = threading.Event()
    start = time.monotonic()

    def tell() -> None:
        wait = FIRST_SECONDS
        while not done.wait(wait):
            note(f"still {what}, {time.monotonic() - start:.0f} s so far")
            wait = EVERY_SECONDS

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
