"""Runs work at idle priority: it uses processor time that other processes leave, and delays none of them.

A spare process needs some seconds of processor time for imports while ranks train. At usual priority it would slow the ranks it shares
cores with, and a step ends only when its slowest rank does. Linux sets the scheduling policy of each thread, and a process without
privileges cannot leave `SCHED_IDLE` again. Therefore the work gets a thread of its own. Linux may also divide processor time between
sessions first (sched(7), autogroup). The policy then counts only within this session, so the weight of the session is lowered too.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from meshwright.training.background_thread import BackgroundThread

T = TypeVar("T")

LEAST_WEIGHT = "19"
"""Nice value of a session with the least weight."""
USUAL_WEIGHT = "0"
"""Nice value of a new session."""
RETRY_SECONDS = 2.0
"""Linux accepts ten new weights per second from all processes without privileges together; a change is tried again for this long."""
POLL_SECONDS = 0.05


def run_at_idle_priority(work: Callable[[], T], urgent: threading.Event) -> T:
    """Call `work` in a thread at idle priority, and return its result or raise its exception.

    When `urgent` is set, the rest of the work runs at usual priority, if the system lets a thread leave idle priority.
    """
    with _least_weight() as restore:
        thread = BackgroundThread("idle priority")
        thread.submit(_idle)
        result = thread.submit(work)
        while not result.done():
            if urgent.wait(POLL_SECONDS):
                restore()
                _raise_threads(os.getpid())
                break
        value = result.result()
    _raise_threads(os.getpid())  # threads that native libraries created meanwhile have inherited the policy
    return value


def end_idle_priority(process: int) -> None:
    """Let another process of this user continue at usual priority, if the system permits it.

    A process that gets no processor time cannot leave idle priority by itself: its threads wait for Python's lock, and for their session's
    turn.
    """
    with suppress(OSError, ValueError):
        group = _autogroup(process)
        if os.getsid(process) == process and _weight(group) == LEAST_WEIGHT:
            group.write_text(USUAL_WEIGHT, encoding="ascii")
    _raise_threads(process)


def _autogroup(process: int) -> Path:
    return Path(f"/proc/{process}/autogroup")


def _weight(group: Path) -> str:
    """Return the nice value of a session. Raises OSError or ValueError if Linux does not group processes by session."""
    return str(int(group.read_text(encoding="ascii").rpartition("nice")[2]))


def _idle() -> None:
    with suppress(OSError):  # some sandboxes refuse it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _raise_threads(process: int) -> None:
    """Give the idle threads of a process the usual policy, as far as this process is permitted to."""
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:  # it has ended
        return
    for thread in map(int, threads):
        with suppress(OSError):  # it has ended, or this process has no privilege
            if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def _least_weight() -> Iterator[Callable[[], None]]:
    """Give this session the least weight. Yields a function that restores the weight; it is also called at the end of the block.

    The weight changes only if this process alone is the session, and only if Linux groups processes by session.
    """
    before = None
    if os.getsid(0) == os.getpid():
        with suppress(OSError, ValueError):  # ValueError: the file is empty where this process belongs to no group
            before = _weight(_autogroup(os.getpid()))

    def restore() -> None:
        if before is not None:
            _set_weight(before)

    if before is not None:
        _set_weight(LEAST_WEIGHT)
    try:
        yield restore
    finally:
        restore()


def _set_weight(nice: str) -> None:
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            _autogroup(os.getpid()).write_text(nice, encoding="ascii")
        except OSError as error:
            if error.errno == errno.EAGAIN and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                continue
        return
