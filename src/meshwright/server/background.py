"""The guard of tasks that run beside requests: none ends without a line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

log = logging.getLogger("meshwright.server")
FIRST_PAUSE = 1.0
"""Seconds before a task that failed begins again. They double with each failure."""
LONGEST_PAUSE = 30.0
"""Longest of these pauses, seconds."""
HEALTHY_SECONDS = 60.0
"""A task that ran for so long had recovered: the pauses begin with the first again."""


async def guarded(
    name: str,
    work: Callable[[], Awaitable[object]],
    failures: Counter[str],
    *,
    fatal: Callable[[str], object] | None = None,
) -> None:
    """Run `work` until it returns or is cancelled; what it raises is logged and counted, and it begins again.

    With `fatal` it does not: `fatal` is called with the reason, and ends the server.
    """
    pause = FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except Exception as error:  # of any kind: without this line the task would end in silence
            failures[name] += 1
            reason = f"{name}: {type(error).__name__}: {error}"
            if fatal is not None:
                log.exception("%s; the server ends", reason)
                fatal(reason)
                return
            if time.monotonic() - began > HEALTHY_SECONDS:
                pause = FIRST_PAUSE
            log.warning("%s; it begins again in %g s", reason, pause, exc_info=not isinstance(error, OSError))
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
