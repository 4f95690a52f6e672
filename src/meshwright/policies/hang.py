"""Detects a hung rank, which is a rank without progress. Time limits are learned from the run's own steps; other phases have fixed limits.

The module reads no clock: the caller passes the time in seconds with each report of progress.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

STEPS_WITHOUT_PROGRESS = 3.0
EXTRA_SECONDS = 5.0
"""A training rank is hung after STEPS_WITHOUT_PROGRESS typical step times plus EXTRA_SECONDS without progress."""
GPU_SECONDS = 30.0
CPU_SECONDS = 5.0
"""Lower bounds of a training rank's limit, on GPUs and on CPUs."""
PHASE_SECONDS = {"start": 1800.0, "compile": 1800.0, "validate": 600.0, "save": 1800.0, "end": 600.0}
"""Limits for the other phases, in seconds. A run cannot learn their duration before they occur."""
COUNTED_STEPS = 64
"""The typical step time is the median of at most this many step times, over all ranks."""
FEWEST_STEPS = 3
"""With fewer step times than this, the typical step time is not known."""


@dataclass
class RankProgress:
    """The last known progress of a rank."""

    phase: str
    step: int
    action: int
    count: int
    """Number of progress marks so far. It changes whenever the rank makes progress."""
    changed: float
    """Time of the last change."""
    step_began: float | None = None
    """Time at which the rank was first seen in its current step; None if this is the first step seen of it."""
    stopped: float | None = None
    """Time since when the process has been stopped by a signal; None if it is not stopped."""


class HangWatch:
    """Progress of the ranks of one attempt."""

    def __init__(self, least_seconds: float) -> None:
        self._least = least_seconds
        self._ranks: dict[int, RankProgress] = {}
        self._steps: deque[float] = deque(maxlen=COUNTED_STEPS)
        self._first: float | None = None
        self._phases: set[str] = set()

    def update(
        self, rank: int, phase: str, step: int, action: int, count: int, now: float, *, stopped: bool = False
    ) -> None:
        """Record the progress of a rank; `stopped` says whether a signal has stopped its process."""
        last = self._ranks.get(rank)
        if last is None or phase != last.phase:
            self._phases.add(phase)
        if last is None:
            self._ranks[rank] = RankProgress(phase, step, action, count, now)
        elif count != last.count or phase != last.phase:
            began = last.step_began
            if step != last.step or phase != last.phase:
                if began is not None and step > last.step and phase == "train":
                    self._learn(last.phase, (now - began) / (step - last.step))
                began = now
            self._ranks[rank] = RankProgress(phase, step, action, count, now, began)
        since = last.stopped if last is not None else None
        begin = now if since is None else since
        self._ranks[rank].stopped = begin if stopped else None

    def _learn(self, phase: str, seconds: float) -> None:
        """Record the duration of a step. A step with compilation is slower, and is used only until other steps are known."""
        if phase == "train":
            self._steps.append(seconds)
        elif phase == "compile":
            self._first = max(self._first or 0.0, seconds)

    def forget(self, rank: int) -> None:
        """Remove a rank that has ended."""
        self._ranks.pop(rank, None)

    def resume(self, now: float) -> None:
        """Count every rank's time without progress from `now`. The process of the watch was stopped and has not seen their progress."""
        for progress in self._ranks.values():
            progress.changed = now
            progress.step_began = None
            progress.stopped = None if progress.stopped is None else now

    def seconds(self, now: float) -> dict[int, float]:
        """Seconds without progress, for each rank."""
        return {rank: now - last.changed for rank, last in self._ranks.items()}

    def limit(self, phase: str) -> float:
        """Seconds without progress after which a rank in `phase` is hung."""
        if phase != "train":
            return max(PHASE_SECONDS.get(phase, 0.0), self._least)
        typical = statistics.median(self._steps) if len(self._steps) >= FEWEST_STEPS else self._first
        if typical is None:
            return PHASE_SECONDS["compile"]
        return max(STEPS_WITHOUT_PROGRESS * typical + EXTRA_SECONDS, self._least)

    def hung(self, now: float) -> tuple[int, float] | None:
        """The rank that holds up the others, and its seconds without progress; None if no rank is hung.

        Ranks that wait for the hung rank make no progress either. If a signal has stopped any rank, that rank is returned. It may be
        further than others, or have made progress later, because collectives are asynchronous. Otherwise, the first rank in the order of
        step and action is returned. A stopped rank does not continue by itself, so the limit of its phase is not used for it.
        """
        limits = {phase: self.limit(phase) for phase in self._phases}
        stalled = [
            rank
            for rank, last in self._ranks.items()
            if now - last.changed > limits[last.phase]
            or (last.stopped is not None and now - last.stopped > self._least + EXTRA_SECONDS)
        ]
        if not stalled:
            return None
        ranks = self._ranks
        stopped = [rank for rank, last in ranks.items() if last.stopped is not None]
        rank = min(stopped or stalled, key=lambda rank: (ranks[rank].step, ranks[rank].action, rank))
        return rank, now - ranks[rank].changed
