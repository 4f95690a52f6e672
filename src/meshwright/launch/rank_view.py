"""What every rank of a run is doing and which rank the others wait for, from `progress.json` or the ranks' spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.diagnosis.culprit import TRAINING, Culprit, RankStatus
from meshwright.launch.incidents import JobSchedule, culprit_of_hang
from meshwright.launch.progress_file import JobProgress, RankSnapshot

STALLED_SECONDS = 4.0
"""Waits are analysed if some rank has made no progress for this many seconds.

Hosts report at most every 3 s. Before that, the positions of ranks that still make progress are from different times,
and would not fit together.
"""


@dataclass(frozen=True)
class RankActivity:
    """A rank's step, phase and action. `seconds` is the time without progress; None if it is unknown."""

    rank: int
    host: str
    step: int
    phase: str
    action: str
    seconds: float | None
    note: str = ""
    """"stopped", "ended", or the communication that the rank waits for; empty if there is nothing to say."""


class RankView:
    """Names the actions and waits of ranks, by the schedule of the run's current attempt."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "assignment.json"
        self._read_at: float | None = None
        self._schedule: JobSchedule | None = None

    def activities(self, progress: JobProgress) -> list[RankActivity]:
        """Return the activity of each rank, in the order of ranks."""
        labels = self._labels(progress)
        return [
            RankActivity(rank.rank, rank.host, rank.step, rank.phase, label, rank.seconds, _note(rank))
            for rank, label in zip(progress.ranks, labels, strict=True)
        ]

    def culprit(self, progress: JobProgress) -> Culprit | None:
        """Return the rank that the others wait for.

        None unless some rank has stalled and others wait for it in training steps.
        """
        ranks = progress.ranks
        stalled = any(rank.seconds >= STALLED_SECONDS and rank.code is None for rank in ranks)
        if not stalled or not any(rank.phase in TRAINING for rank in ranks):
            return None
        found = culprit_of_hang(self._job(), [_status(rank) for rank in ranks])
        return found if found is not None and found.waiting else None

    def _labels(self, progress: JobProgress) -> list[str]:
        """Return the label of each rank's action; empty for ranks outside of training steps."""
        job = self._job()
        if job is None:
            return [""] * len(progress.ranks)
        phases = {rank.phase for rank in progress.ranks}
        schedules = {"train": job.schedule.actions}
        if "compile" in phases:
            schedules["compile"] = job.schedule.in_turns().actions
        labels = []
        for rank in progress.ranks:
            inside = rank.phase in schedules and rank.rank < job.layout.ranks
            actions = schedules[rank.phase][job.layout.coordinates(rank.rank).get("pipeline", 0)] if inside else ()
            labels.append(actions[min(max(0, rank.action), len(actions) - 1)].label if actions else "")
        return labels

    def _job(self) -> JobSchedule | None:
        """Return the schedule of the newest assignment; None if it cannot be read."""
        try:
            changed = self._file.stat().st_mtime
        except OSError:
            return None
        if changed != self._read_at:
            self._read_at = changed
            self._schedule = JobSchedule.read(self._file)
        return self._schedule


def activities_of_spans(last_steps: Sequence[int]) -> list[RankActivity]:
    """Return the activity of ranks for which there is no `progress.json`.

    `last_steps` has the newest complete step of each rank; -1 if it has none.
    """
    return [
        RankActivity(rank, "", step, "step complete", "", None) for rank, step in enumerate(last_steps) if step >= 0
    ]


def _note(rank: RankSnapshot) -> str:
    """Return words about a rank that has ended, is stopped or waits; empty for other ranks."""
    if rank.code is not None:
        return "ended" if rank.code == 0 else f"ended with code {rank.code}"
    if rank.stopped:
        return "stopped"
    if rank.pending is None:
        return ""
    peer = f" with stage {rank.pending.peer}" if rank.pending.peer >= 0 else ""
    return f"waits in {rank.pending.op}{peer}"


def _status(rank: RankSnapshot) -> RankStatus:
    """Return a rank's state as input of `diagnosis.culprit`."""
    return RankStatus(
        rank.rank,
        rank.host,
        rank.phase,
        rank.step,
        max(0, rank.action),
        rank.seconds,
        rank.stopped and rank.code is None,
        rank.code is not None and rank.code != 0,
        rank.pending,
    )
