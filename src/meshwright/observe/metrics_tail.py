"""Follows files of JSON lines, and the metrics in them, while a run writes them. This module imports no torch."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.observe.expert_load_table import MOST_STEPS

RECENT_STEPS = 50
"""The mean duration of this many newest steps predicts the remaining time."""


class LineTail:
    """Reads the objects that are added to a file of JSON lines.

    Incomplete lines, and lines that are no objects, are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return (objects since the last call, whether these are all objects of a new file).

        The second value is true on the first call and if the file was replaced or became shorter. Returns no objects if
        the file does not exist.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                anew = identity != self._file or status.st_size < self._offset
                if anew:
                    self._file = identity
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return [], False
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [value for line in whole.splitlines() if (value := _object(line)) is not None], anew


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class MetricsTail:
    """Keeps the newest step of `metrics.jsonl`, the mean duration of the newest steps, and the last validation loss."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)
        self._clear()

    def update(self) -> None:
        """Read the lines that were added."""
        records, anew = self._lines.read()
        if anew:
            self._clear()
        for record in records:
            kind = record.get("kind", "step")
            if kind == "step" and isinstance(record.get("step"), int):
                self._add_step(record)
            elif kind == "validation":
                self.validation_loss = _number(record.get("loss"))

    @property
    def recent_step_seconds(self) -> float | None:
        """Mean seconds of the newest steps; None before the first step."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def recent_steps(self) -> int:
        """Number of steps of which `recent_step_seconds` is the mean."""
        return len(self._recent)

    def number(self, key: str) -> float | None:
        """Return a value of the newest step if it is a finite number, else None."""
        return _number(self.newest.get(key))

    def _clear(self) -> None:
        self.newest: Mapping[str, Any] = {}
        """The record of the newest step; empty before the first."""
        self.validation_loss: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.with_loads: deque[Mapping[str, Any]] = deque(maxlen=MOST_STEPS)
        """The newest steps whose records have the loads of experts."""

    def _add_step(self, record: Mapping[str, Any]) -> None:
        self.newest = record
        self._recent.append(_number(record.get("step_seconds")) or 0.0)
        if "expert_loads" in record:
            self.with_loads.append(record)


def _number(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if number and abs(value) < float("inf") else None
