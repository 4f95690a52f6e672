"""`RUN/progress.json`: the progress of every rank of a supervised job, written once a second while the job runs.

The coordinator's process writes it in a thread, so that a hanging file system delays neither supervision nor training.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.durable.writes import write_replacing
from meshwright.events.progress import PendingWait
from meshwright.launch.outcome import RankState

FILE = "progress.json"
SECONDS = 1.0
"""Seconds between two versions of the file."""
CLOSE_SECONDS = 2.0
"""Seconds for which the end of a job waits until the last version is written."""


@dataclass(frozen=True)
class RankSnapshot:
    """The progress of one rank.

    `action` is the index of its last action in the schedule; -1 before the first. `seconds` is the time without
    progress.
    """

    rank: int
    host: str
    phase: str
    step: int
    action: int
    seconds: float
    stopped: bool = False
    code: int | None = None
    """Exit code of the rank; None while it runs."""
    pending: PendingWait | None = None
    """The communication that its host thread is waiting for. Its `since_ns` is not stored in the file."""


@dataclass(frozen=True)
class JobProgress:
    """The progress of a job: its attempt, the status of supervision (`policies.supervision`), and the ranks that have begun."""

    job: str
    attempt: int
    status: str
    ranks: tuple[RankSnapshot, ...] = ()
    time: float = 0.0
    """Unix time in seconds at which the file was written."""


def rank_snapshot(state: RankState, host: str, seconds: float) -> RankSnapshot:
    """Return the snapshot of a rank that has made no progress for `seconds`."""
    phase = "start"
    step = 0
    action = -1
    if (progress := state.progress) is not None:
        phase = progress.phase
        step = progress.step
        action = progress.action
    return RankSnapshot(state.rank, host, phase, step, action, seconds, state.stopped, state.code, state.pending)


class ProgressFile:
    """Writes what the function `progress` returns into the file."""

    def __init__(
        self, folder: Path, progress: Callable[[], JobProgress], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`folder` is the run's folder. `progress` returns the present progress, and `clock` monotonic seconds."""
        self._path = folder / FILE
        self._progress = progress
        self._clock = clock
        self._due = clock()
        self._latest: JobProgress | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._write_changes, name="progress file", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Give the current progress to the writing thread if a new version is due. Call this several times a second."""
        if self._clock() >= self._due:
            self._due = self._clock() + SECONDS
            self._hand_over()

    def close(self) -> None:
        """Write the last version and end the thread; wait at most `CLOSE_SECONDS`."""
        self._closing = True
        self._hand_over()
        self._thread.join(CLOSE_SECONDS)

    def _hand_over(self) -> None:
        progress = self._progress()
        with self._changed:
            self._latest = progress
            self._changed.notify()

    def _write_changes(self) -> None:
        """Run by the thread: write each new version of the progress, until `close` has given it the last one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None)
                latest = self._latest
                self._latest = None
            assert latest is not None, "the wait ends when there is one"
            text = json.dumps(_to_columns(latest), separators=(",", ":"))
            with suppress(OSError):  # a full or missing disk is reported by those who write more important files
                write_replacing(self._path, text.encode())
            if self._closing and self._latest is None:
                return


def read_progress(folder: Path) -> JobProgress | None:
    """Return the last progress of a run's ranks; None if the file is missing or cannot be read."""
    try:
        data = json.loads((folder / FILE).read_bytes())
        return _from_columns(data)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def _to_columns(progress: JobProgress) -> dict[str, Any]:
    """Return the JSON object of the file, with one list for each field of the ranks."""
    hosts = list(dict.fromkeys(rank.host for rank in progress.ranks))
    places = {host: place for place, host in enumerate(hosts)}
    ranks = progress.ranks
    return {
        "time": time.time(),
        "job": progress.job,
        "attempt": progress.attempt,
        "status": progress.status,
        "hosts": hosts,
        "rank": [rank.rank for rank in ranks],
        "host": [places[rank.host] for rank in ranks],
        "phase": [rank.phase for rank in ranks],
        "step": [rank.step for rank in ranks],
        "action": [rank.action for rank in ranks],
        "seconds": [round(rank.seconds, 2) for rank in ranks],
        "stopped": [rank.stopped for rank in ranks],
        "code": [rank.code for rank in ranks],
        "pending": [_wait_values(rank.pending) for rank in ranks],
    }


def _wait_values(wait: PendingWait | None) -> Sequence[Any] | None:
    return None if wait is None else (wait.op, wait.stage, wait.micro_batch, wait.unit, wait.peer)


def _from_columns(data: Any) -> JobProgress:
    """Return the progress that `_to_columns` has written."""
    hosts = data["hosts"]
    names = ("rank", "host", "phase", "step", "action", "seconds", "stopped", "code", "pending")
    ranks = tuple(
        RankSnapshot(
            rank,
            hosts[host],
            phase,
            step,
            action,
            seconds,
            stopped,
            code,
            None if pending is None else PendingWait(*pending, since_ns=0),
        )
        for rank, host, phase, step, action, seconds, stopped, code, pending in zip(
            *(data[name] for name in names), strict=True
        )
    )
    return JobProgress(data["job"], data["attempt"], data["status"], ranks, data["time"])
