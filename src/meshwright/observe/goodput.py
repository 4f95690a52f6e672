"""Goodput breakdown: how the wall time of a run divides into productive and other time, from wall_time.jsonl and
incidents.

Every moment, from the beginning of the first start to the last line, counts in exactly one category, so the categories add up to the wall
time. A line with `seconds` describes an interval of that length, which ends at the line's `time`. All other time is counted as part of the
next step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.observe.wall_time import FILE

CATEGORIES: dict[str, str] = {
    "productive": "steps whose update the run kept, and validations",
    "saving": "training waited for a checkpoint",
    "detecting": "from the last line before a failure until supervision noticed it, less the usual time of a step",
    "restarting": "every start up to its first step, waits for hosts, rollbacks to a checkpoint",
    "recomputing": "steps that a failure or a rollback undid, unfinished ones too, and steps with a skipped update",
    "waiting_for_data": "steps waited for their batch",
    "idle": "no job ran, or rank 0 worked after the last step",
}
"""Description of each category."""
PAUSES = {"save": "saving", "validation": "productive", "rollback": "restarting"}
"""For each kind of line that describes a pause, the category of its seconds."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunGoodput:
    """Seconds of a run's wall time by category (`CATEGORIES`); they add up to `wall_seconds`."""

    wall_seconds: float
    seconds: Mapping[str, float]

    @property
    def goodput(self) -> float:
        """Productive share of the wall time."""
        return self.seconds["productive"] / self.wall_seconds if self.wall_seconds else 0.0

    def as_plain(self) -> dict[str, Any]:
        """JSON values."""
        return {"wall_seconds": self.wall_seconds, "goodput": self.goodput, "seconds": dict(self.seconds)}


def run_goodput(folder: Path) -> RunGoodput | None:
    """The breakdown of a run's folder; None if it has no wall_time.jsonl. Raises OSError if that cannot be read."""
    path = folder / FILE
    if not path.exists():
        return None
    lines = [line for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if (line := _parse(text))]
    return goodput(lines, incident_times(folder))


def incident_times(folder: Path) -> list[float]:
    """Unix times at which supervision noticed failures, ascending. Incidents that cannot be read are left out."""
    times = []
    for path in folder.glob("incidents/*/incident.json"):
        try:
            times.append(float(json.loads(path.read_text(encoding="utf-8"))["time"]))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return sorted(times)


def goodput(lines: Sequence[Line], incidents: Sequence[float] = ()) -> RunGoodput | None:
    """The breakdown for the lines of wall_time.jsonl, which may be in any order; None without lines."""
    ordered = sorted(lines, key=lambda line: line["time"])
    if not ordered:
        return None
    sweep = _Sweep(ordered, incidents)
    for line, undone in zip(ordered, _undone(ordered), strict=True):
        sweep.add(line, undone=undone)
    sweep.finish()
    return RunGoodput(sweep.now - sweep.begin, sweep.seconds)


class _Sweep:
    """Goes through the lines in order of time, and assigns all time up to `now` to categories, except for the time in `_of_step`."""

    def __init__(self, lines: Sequence[Line], incidents: Sequence[float]) -> None:
        first = lines[0]
        self.begin = self.now = first["time"] - (first["seconds"] if first["kind"] == "start" else 0.0)
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._incidents = sorted(time for time in incidents if time > self.begin)
        self._median_step = _median_step(lines)
        self._of_step = 0.0
        """Seconds since the last step line that belong to the next step (`_of_step`), and the median seconds of a step."""
        self._ended = self.begin

    def add(self, line: Line, *, undone: bool) -> None:
        """Assign the time up to this line."""
        end = max(line["time"], self.now)
        kind = line["kind"]
        if kind == "start":
            self._start(end, line)
        elif kind in PAUSES:
            begin = min(end, max(self.now, end - line["seconds"]))
            self._of_step += begin - self.now
            self.seconds[PAUSES[kind]] += end - begin
        elif kind == "step":
            self._step(self._of_step + end - self.now, line, lost=undone or bool(line.get("skipped")))
            self._of_step = 0.0
            # Training continued after an incident before this step, so that incident cannot explain a later gap.
            self._incidents = [time for time in self._incidents if time > end]
        else:  # a start has ended; the next lines show whether because of a failure
            self._ended = end
            return
        self.now = end

    def finish(self) -> None:
        """Assign the time from the last step or pause to the end of the last start, or to an incident after it."""
        end = max([self.now, self._ended, *self._incidents])
        self._gap(end, "idle")
        self.now = end

    def _start(self, end: float, line: Line) -> None:
        begin = min(end, max(self.now, end - line["seconds"]))
        self._gap(begin, "restarting")
        first_step = min(end - begin, line["first_step_seconds"], self._median_step)
        self.seconds["restarting"] += end - begin - first_step
        self._of_step = first_step

    def _step(self, total: float, line: Line, *, lost: bool) -> None:
        data = min(total, line["data_seconds"])
        self.seconds["waiting_for_data"] += data
        self.seconds["recomputing" if lost else "productive"] += total - data

    def _gap(self, end: float, after_failure: str) -> None:
        """Assign the time between two starts: idle, or if a failure was noticed then, first detecting and then `after_failure`."""
        noticed = [time for time in self._incidents if time <= end]
        self._incidents = self._incidents[len(noticed) :]
        self.seconds["recomputing" if noticed else "idle"] += (
            self._of_step
        )  # the beginning of a step that was not finished
        self._of_step = 0.0
        if not noticed:
            self.seconds["idle"] += end - self.now
            return
        first = max(self.now, noticed[0])
        unfinished = min(first - self.now, self._median_step)
        self.seconds["recomputing"] += unfinished
        self.seconds["detecting"] += first - self.now - unfinished
        self.seconds[after_failure] += end - first


def _undone(lines: Sequence[Line]) -> list[bool]:
    """For each line, whether it is of a step that was undone: later, the run continued from an earlier step."""
    last_kept = math.inf
    undone = []
    for line in reversed(lines):
        step = line["step"]
        undone.append(line["kind"] == "step" and step > last_kept)
        if line["kind"] in ("start", "rollback"):
            last_kept = min(last_kept, step)
    return undone[::-1]


def _median_step(lines: Sequence[Line]) -> float:
    """Median seconds between the lines of neighbouring steps; the shortest first step if there are none."""
    pairs = pairwise(lines)
    times = [
        after["time"] - before["time"]
        for before, after in pairs
        if before["kind"] == "step" and after["kind"] == "step"
    ]
    return (
        median(times)
        if times
        else min((line["first_step_seconds"] for line in lines if line["kind"] == "start"), default=0.0)
    )


def _parse(text: str) -> dict[str, Any] | None:
    """The line, or None for one that a crash cut off."""
    try:
        line = json.loads(text)
        complete = isinstance(line["time"], float) and isinstance(line["step"], int)
    except (ValueError, TypeError, KeyError):
        return None
    needed = {"start": ("seconds", "first_step_seconds"), "step": ("data_seconds",), "end": ()}
    keys = needed.get(line["kind"], ("seconds",)) if line.get("kind") in (*needed, *PAUSES) else None
    return (
        line if complete and keys is not None and all(isinstance(line.get(key), (int, float)) for key in keys) else None
    )
