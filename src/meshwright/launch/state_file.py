"""`RUN/supervision.jsonl`: the states of a supervised job, one line for each change.

Each process that coordinates writes a term one above that of the processes before. A line that a process whose lease has
ended writes late, as from a storage that hung, is of an earlier term, and does not count.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from meshwright.durable.writes import append_durable
from meshwright.events.terminal import write_line
from meshwright.policies.supervision import State
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.failures import MISSING_PATH_ERRNOS, as_meshwright_error, missing_path_error
from meshwright.spec.fields import from_checked_plain, from_sealed_json, to_plain, to_sealed_json

STATE_FILE = "supervision.jsonl"
RETRY_SECONDS = 1.0
"""Seconds after which a state that could not be written is written again."""
AGAIN_SECONDS = 10.0
"""Seconds within which an event whose state could not be written comes again; longer than any heartbeat."""
UNWRITABLE_SECONDS = 300.0
"""Seconds that a job which cannot go on before waits for a disk that does not take its state; then it ends."""
GONE_SECONDS = 10.0
"""The same for a folder that no longer exists; a network file system may not show it for a moment."""
LATE_LINES = 8
"""Last undamaged lines that are read: more than processes can have written late."""


class StateFile:
    """Appends states. While that is not possible, it knows whether and for how long the job waits for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / STATE_FILE
        self._error: OSError | None = None
        """Why the last state could not be written."""
        self._retry_at = 0.0
        self._held: tuple[float, float] | None = None
        """First and last time at which an event was held up."""
        self._term: int | None = None
        """The term of this process; None before its first record."""

    def append(self, state: State, now: float) -> bool:
        """Append a state; False if that is not possible now. `now` is in seconds of any monotonic clock, here and below."""
        if self._error is not None and now < self._retry_at:
            return False
        try:
            self._append(state)
        except OSError as error:
            if self._error is None:
                write_line(
                    f"meshwright: {self._path}: {error.strerror or error}; ranks that run train on, a restart waits "
                    "until it can be written"
                )
            self._error = error
            self._retry_at = now + RETRY_SECONDS
            return False
        if self._error is not None:
            write_line(f"meshwright: {self._path} can be written again")
        self._error = self._held = None
        return True

    def hold(self, now: float) -> None:
        """Note that the job waits for the record of an event; that is over once the event does not come again."""
        since, last = self._held or (now, now)
        self._held = since if now - last <= AGAIN_SECONDS else now, now

    def failure(self, now: float) -> MeshwrightError | None:
        """The error that ends the job, if it has waited for too long."""
        if self._error is None or self._held is None or now - self._held[1] > AGAIN_SECONDS:
            return None
        waited = now - self._held[0]
        if waited >= GONE_SECONDS and self._is_gone():
            return missing_path_error(self._folder)
        if waited < UNWRITABLE_SECONDS:
            return None
        if self._error.errno in MISSING_PATH_ERRNOS:
            return missing_path_error(self._path)
        return as_meshwright_error(
            self._error, f"the job cannot go on, as its state could not be written for {waited:,.0f} s"
        )

    def _append(self, state: State) -> None:
        if self._term is None:
            newest = _newest_record(self._folder / STATE_FILE)
            self._term = 1 if newest is None else newest[0] + 1
        line = to_sealed_json({"time": time.time(), "term": self._term, **to_plain(state)})
        append_durable(self._path, line.encode() + b"\n")

    def _is_gone(self) -> bool:
        """Whether the run's folder does not exist; an error of its file system does not say so."""
        try:
            os.stat(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass
        return False


def read_state(folder: Path) -> State | None:
    """The last undamaged state in a run's folder; None without one.

    A last line that a crash cut off is ignored; other damage is said in one line. Raises OSError if the file cannot be read.
    """
    newest = _newest_record(folder / STATE_FILE, say_damage=True)
    return None if newest is None else newest[1]


def _newest_record(file: Path, *, say_damage: bool = False) -> tuple[int, State] | None:
    """Term and state of the last undamaged line of the highest term among the last `LATE_LINES`; None without one."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return None
    records: list[tuple[int, State]] = []
    damaged = 0
    for number in range(len(lines), 0, -1):
        if not lines[number - 1].strip():
            continue
        try:
            record = from_sealed_json(lines[number - 1])
            record.pop("time", None)
            term = record.pop("term")
            records.append((term, from_checked_plain(State, record)))
        except (ValueError, TypeError, KeyError):
            damaged = number if number < len(lines) and not records else damaged
        if len(records) == LATE_LINES:
            break
    if damaged and say_damage:
        then = "an earlier record counts" if records else "it has no other, so attempts are counted anew"
        write_line(f"meshwright: {file}:{damaged}: this record is damaged; {then}")
    return max(records, key=lambda record: record[0], default=None)  # of equal terms the first, which is the last line
