"""The state of a run as `meshwright monitor` shows it, read repeatedly from the files in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.diagnosis.compute_times import ComputeTimes
from meshwright.diagnosis.culprit import Culprit
from meshwright.diagnosis.heat_map import HeatMap, heat_map
from meshwright.launch.incidents import FILE, FOLDER, read_incidents
from meshwright.launch.rank_view import RankActivity, RankView, activities_of_spans
from meshwright.launch.run_figures import RunFigureReader, RunFigures
from meshwright.observe.expert_load_table import ExpertLoadTable

READ_BYTES = 24 << 20
"""Most bytes of spans that one refresh reads. The spans of a large job need several refreshes; the newest are read first."""


@dataclass(frozen=True, eq=False)
class RunSnapshot:
    """The state of a run at one time.

    `seconds` `(ranks, steps)` are times of computation, in seconds, and `steps` `(steps,)` the numbers of their steps.
    """

    figures: RunFigures
    ranks: Sequence[RankActivity]
    progress_seconds: float | None
    """Age of the ranks' progress in seconds; None if the job is over or not supervised."""
    culprit: Culprit | None
    incidents: Sequence[Mapping[str, Any]]
    steps: np.ndarray
    seconds: np.ndarray
    expert_loads: ExpertLoadTable | None = None

    def heat_map(self, lines: int, columns: int) -> HeatMap:
        """Return the compute times relative to the median rank, reduced to at most `lines` × `columns` cells."""
        return heat_map(self.steps, self.seconds, lines, columns)


class SnapshotReader:
    """Reads snapshots of the run in a folder. The run may have just begun, with files still missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._figures = RunFigureReader(folder)
        self._times = ComputeTimes(folder)
        self._view = RankView(folder)
        self._incidents: tuple[object, Sequence[Mapping[str, Any]]] = (None, ())

    @property
    def complete(self) -> bool:
        """Whether the last snapshot includes all spans in the files."""
        return self._times.complete

    def read(self, *, complete: bool = False) -> RunSnapshot:
        """Return the present state of the run. With `complete`, read all spans of the newest start first."""
        figures = self._figures.read()
        self._times.update(READ_BYTES)
        while complete and not self.complete:
            self._times.update(READ_BYTES)
        steps, seconds = self._times.known
        loads = self._figures.expert_loads
        progress = self._figures.progress
        if progress is None or not figures.running:
            ranks = activities_of_spans(self._times.last_step.tolist())
            return RunSnapshot(figures, ranks, None, None, self._read_incidents(), steps, seconds, loads)
        age = max(0.0, time.time() - progress.time)
        ranks = self._view.activities(progress)
        culprit = self._view.culprit(progress)
        return RunSnapshot(figures, ranks, age, culprit, self._read_incidents(), steps, seconds, loads)

    def _read_incidents(self) -> Sequence[Mapping[str, Any]]:
        """Return the incidents. Their files are read again only if one was added, removed or changed."""
        found = sorted((str(path), _modified_ns(path)) for path in (self._folder / FOLDER).glob(f"*/{FILE}"))
        if found != self._incidents[0]:
            self._incidents = found, read_incidents(self._folder)
        return self._incidents[1]


def _modified_ns(path: Path) -> int:
    """Return the modification time of a file, in ns; 0 if it has been removed."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def snapshot_as_plain(snapshot: RunSnapshot, lines: int, columns: int) -> dict[str, Any]:
    """Return a snapshot as JSON values.

    The heat map has at most `lines` × `columns` cells, with null where no time is known.
    """
    figures = snapshot.figures
    heat = snapshot.heat_map(lines, columns)
    ratio = [[round(value, 4) if np.isfinite(value) else None for value in row] for row in heat.ratio.tolist()]
    culprit = snapshot.culprit
    return {
        **vars(figures),
        "ranks": [vars(rank) for rank in snapshot.ranks],
        "progress_seconds": snapshot.progress_seconds,
        "waiting": None if culprit is None else {**vars(culprit), "waiting": [vars(wait) for wait in culprit.waiting]},
        "heat_map": {"ranks": heat.ranks, "steps": heat.steps, "ratio": ratio},
        "expert_loads": None if snapshot.expert_loads is None else vars(snapshot.expert_loads),
        "incident_records": list(snapshot.incidents),
    }
