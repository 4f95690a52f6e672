"""wall_time.jsonl: when steps, starts, saves, validations and rollbacks of a run ended. `observe.goodput` adds them up.

Rank 0 appends lines and never removes any. So the file also has steps that a failure or a rollback has undone, while
metrics.jsonl loses those lines. Every line has `kind`, `step`, and `time`, the Unix time in seconds at which it was
written.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal

FILE = "wall_time.jsonl"
KEPT_LINES = 100_000
"""Most lines that are kept in memory while the disk rejects them, about 10 MB."""
Pause = Literal["save", "validation", "rollback"]
"""Why the training loop paused between two steps. The line of a pause has its `seconds`."""

log = logging.getLogger("meshwright")


class WallTimeWriter:
    """Appends lines to a run's file. A disk that fails never ends the run.

    Lines that the disk rejects are written later, at most `KEPT_LINES`; the log says so once. Times follow the
    monotonic clock from the writer's creation on, so a change of the wall clock does not affect them.
    """

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        began = time.time() - time.monotonic()
        self._path = path
        self._clock = clock or (lambda: began + time.monotonic())
        self._unwritten: deque[bytes] = deque(maxlen=KEPT_LINES)

    def start(self, step: int, seconds: float, first_step_seconds: float) -> None:
        """Write that a start after `step` took `seconds`, including the `first_step_seconds` of its first step."""
        self._append("start", step, {"seconds": seconds, "first_step_seconds": first_step_seconds})

    def step(self, step: int, data_seconds: float, *, skipped: bool) -> None:
        """Write that `step` ended, how many seconds it waited for data, and whether its update was skipped."""
        self._append("step", step, {"data_seconds": data_seconds, **({"skipped": True} if skipped else {})})

    def pause(self, activity: Pause, step: int, seconds: float) -> None:
        """Write that a pause of `seconds` ended. The run continues after `step`."""
        self._append(activity, step, {"seconds": seconds})

    def end(self, step: int) -> None:
        """Write that this start of the run ended normally."""
        self._append("end", step, {})

    def _append(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line, after the lines that could not be written before. If the disk rejects it, keep it in memory."""
        failed = bool(self._unwritten)
        line = json.dumps({"time": round(self._clock(), 6), "kind": event, "step": step, **values})
        self._unwritten.append(f"{line}\n".encode())
        try:
            with self._path.open("ab", buffering=0) as file:
                _write_whole(file, b"".join(self._unwritten))
        except OSError as error:
            if not failed:
                log.warning("%s: %s; its lines are written once that is possible", self._path, error.strerror or error)
            return
        self._unwritten.clear()


def _write_whole(file: FileIO, content: bytes) -> None:
    """Append all of `content`. If that raises OSError, nothing is appended."""
    end = file.seek(0, os.SEEK_END)
    try:
        while content:
            content = content[file.write(content) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise
