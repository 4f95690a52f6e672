"""wall_time.jsonl: when steps, starts, saves, validations and rollbacks of a run ended. `observe.goodput` adds them up.

The first rank appends lines and never removes one, so the file also has the steps that a failure or a rollback undid,
whose lines metrics.jsonl loses. Every line has `time` (Unix seconds, when it was written), `kind` and `step`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

FILE = "wall_time.jsonl"
Pause = Literal["save", "validation", "rollback"]
"""Reason for a pause of the loop between two steps; its line has `seconds`."""

log = logging.getLogger("meshwright")


class WallTimeWriter:
    """Appends lines to a run's file. A disk that fails ends the recording with one warning, never the run.

    Times follow the monotonic clock from the writer's creation on, so that a wall clock that is set changes none.
    """

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        began = time.time() - time.monotonic()
        self._path, self._clock, self._failed = path, clock or (lambda: began + time.monotonic()), False

    def start(self, step: int, seconds: float, first_step_seconds: float) -> None:
        """Write that a start after `step` took `seconds`, its first step included."""
        self._append("start", step, {"seconds": seconds, "first_step_seconds": first_step_seconds})

    def step(self, step: int, data_seconds: float, *, skipped: bool) -> None:
        """Write that `step` ended: seconds of its wait for data, and whether its update was left out."""
        self._append("step", step, {"data_seconds": data_seconds, **({"skipped": True} if skipped else {})})

    def pause(self, activity: Pause, step: int, seconds: float) -> None:
        """Write that a pause of `seconds` ended; the run continues after `step`."""
        self._append(activity, step, {"seconds": seconds})

    def end(self, step: int) -> None:
        """Write that the start ended in order."""
        self._append("end", step, {})

    def _append(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if self._failed:
            return
        line = json.dumps({"time": round(self._clock(), 6), "kind": event, "step": step, **values})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self._failed = True
            log.warning("%s is not written any more: %s", self._path, error.strerror or error)
