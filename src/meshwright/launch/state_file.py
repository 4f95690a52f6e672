"""`RUN/supervision.jsonl`: the states of a supervised job, one line for each change.

Several processes may coordinate a job one after the other. Each writes its lines with a term, a number one higher than
the term of its predecessor. If a predecessor whose lease has ended writes a line late, for example after its file
system hung, that line has a lower term and is ignored.
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
"""Seconds until another attempt to write a state that could not be written."""
AGAIN_SECONDS = 10.0
"""If an event's state could not be written, the event is expected again within this many seconds. Longer than any heartbeat."""
UNWRITABLE_SECONDS = 300.0
"""Seconds for which a job waits for a disk that rejects its state, if it cannot continue without; then it ends."""
GONE_SECONDS = 10.0
"""The same if the run's folder no longer exists. A network file system may hide a folder for a moment."""
LATE_LINES = 8
"""Undamaged lines at the end of the file that are read. Fewer lines than this can have been written late."""


class StateFile:
    """Appends states to the file. While that fails, it tracks whether and how long the job has been waiting for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / STATE_FILE
        self._error: OSError | None = None
        """Why the last state could not be written; None if it was written."""
        self._retry_at = 0.0
        self._held: tuple[float, float] | None = None
        """First and last time at which an event had to wait; None if none waits."""
        self._term: int | None = None
        """The term of this process; None before it has written a line."""

    def append(self, state: State, now: float) -> bool:
        """Append a state, and return whether that succeeded. `now` is a time of any monotonic clock in seconds, also below."""
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
        """Note that the job waits until an event is recorded. The waiting is over if the event does not come again."""
        since, last = self._held or (now, now)
        self._held = since if now - last <= AGAIN_SECONDS else now, now

    def failure(self, now: float) -> MeshwrightError | None:
        """Return the error that ends the job, if the job has waited too long; else None."""
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
        """Write a state as one line. The first line of this process gets a term one higher than the newest line's."""
        if self._term is None:
            newest = _newest_record(self._folder / STATE_FILE)
            self._term = 1 if newest is None else newest[0] + 1
        line = to_sealed_json({"time": time.time(), "term": self._term, **to_plain(state)})
        append_durable(self._path, line.encode() + b"\n")

    def _is_gone(self) -> bool:
        """Whether the run's folder certainly does not exist. Other errors of its file system do not count."""
        try:
            os.stat(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass
        return False


def read_state(folder: Path) -> State | None:
    """Return the last undamaged state in a run's folder; None if there is none.

    A last line that a crash has cut off is ignored; other damage is reported in one line. Raises OSError if the file
    cannot be read.
    """
    newest = _newest_record(folder / STATE_FILE, say_damage=True)
    return None if newest is None else newest[1]


def _newest_record(file: Path, *, say_damage: bool = False) -> tuple[int, State] | None:
    """Return (term, state) of the newest undamaged line; None if there is none.

    Among the last `LATE_LINES` undamaged lines, it is the last one with the highest term.
    """
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
            # Damage before the newest good line does not matter, and a crash may have cut off the last line.
            damaged = number if number < len(lines) and not records else damaged
        if len(records) == LATE_LINES:
            break
    if damaged and say_damage:
        then = "an earlier record counts" if records else "it has no other, so attempts are counted anew"
        write_line(f"meshwright: {file}:{damaged}: this record is damaged; {then}")
    # `records` has the last line first, and max takes the first of equals.
    return max(records, key=lambda record: record[0], default=None)
