"""Seconds that every rank spent computing in every step, read from the spans of a run that may still be in progress.

Compute is forward, backward and weight gradient, without waiting for collectives. For a step without such spans, the whole step counts.
Ranks that wait for each other have equal step times; compute times show which of them is slow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshwright.diagnosis.run_spans import COMPUTE_PHASES
from meshwright.events.span import SPAN_PHASES
from meshwright.events.span_ring import starts_with_spans
from meshwright.events.span_tail import STEP, SpanBatch, SpanTail

KEPT_STEPS = 1000
"""Number of newest steps whose times are kept."""
COMPUTE = [SPAN_PHASES.index(name) for name in COMPUTE_PHASES]
WAIT = SPAN_PHASES.index("collective_wait")


class ComputeTimes:
    """Compute times of a run's newest start. `seconds` is `(ranks, KEPT_STEPS)`, NaN if unknown; `steps` has the step of each column."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail: SpanTail | None = None
        self._clear(0)

    @property
    def complete(self) -> bool:
        """Whether the last `update` has read all records."""
        return self._tail is None or self._tail.complete

    @property
    def known(self) -> tuple[np.ndarray, np.ndarray]:
        """The steps for which a time is known, ascending, and the times `(ranks, steps)` in seconds."""
        columns = np.flatnonzero(self.steps >= 0)
        columns = columns[np.argsort(self.steps[columns])]
        return self.steps[columns], self.seconds[:, columns]

    def update(self, most_bytes: int) -> None:
        """Read about `most_bytes` from the files of the newest start, the newest records first."""
        starts = starts_with_spans(self._folder)
        if not starts:
            return
        if self._tail is None or self._tail.start != starts[-1]:
            self._tail = SpanTail(starts[-1])
            self._clear(0)
        batch = self._tail.read(most_bytes)
        if len(self.seconds) != self._tail.ranks:
            self._clear(self._tail.ranks)
        if len(batch.records):
            self._take(batch)

    def _clear(self, ranks: int) -> None:
        self.seconds = np.full((ranks, KEPT_STEPS), np.nan, dtype=np.float32)
        self.steps = np.full(KEPT_STEPS, -1, dtype=np.int64)
        self.last_step = np.full(ranks, -1, dtype=np.int64)
        """For each rank, its newest complete step."""

    def _take(self, batch: SpanBatch) -> None:
        """Enter the step times of a batch of spans, and drop times of steps that a rollback has undone."""
        ends, seconds = step_seconds(batch)
        rank = batch.rank[ends]
        step = batch.records["step"][ends].astype(np.int64)
        newest = batch.newest[ends]
        inside = rank < len(self.seconds)
        rank = rank[inside]
        step = step[inside]
        newest = newest[inside]
        seconds = seconds[inside]
        if newest.any():
            self.last_step[rank[newest]] = step[newest]  # for repeated ranks, the last assignment wins: the newest step
            self.steps[self.steps > max(self.last_step.max(), 0)] = -1  # a rollback has undone these steps
        for number in np.unique(step).tolist():
            column = number % KEPT_STEPS
            if number > self.steps[column]:
                self.steps[column] = number
                self.seconds[:, column] = np.nan
        column = step % KEPT_STEPS
        kept = self.steps[column] == step
        self.seconds[rank[kept], column[kept]] = seconds[kept]


def step_seconds(batch: SpanBatch) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the step records in a batch, and the seconds of compute in each of these steps.

    A rank writes the records of a step before the record of the step itself, and a wait before the compute span that contains it.
    """
    records = batch.records
    phase = records["phase"]
    start = records["start_ns"]
    duration = records["duration_ns"]
    ends = np.flatnonzero(phase == STEP)
    if not len(ends):
        return ends, np.zeros(0)
    waits = np.flatnonzero((phase == WAIT) & (records["stage"] >= 0))
    compute = np.flatnonzero(np.isin(phase, COMPUTE))
    window, known = _windows(batch, compute, ends)
    totals = np.bincount(window[known], duration[compute[known]], len(ends))
    if len(compute) and len(waits):
        container = compute[np.minimum(np.searchsorted(compute, waits), len(compute) - 1)]
        inside = (start[container] <= start[waits]) & (start[waits] < start[container] + duration[container])
        inside &= batch.segment[container] == batch.segment[waits]
        waits = waits[inside]
        window, known = _windows(batch, waits, ends)
        waited = duration[waits[known]] * np.maximum(records["count"][waits[known]], 1).astype(np.int64)
        totals -= np.bincount(window[known], waited, len(ends))
    return ends, np.where(totals > 0, totals, duration[ends]) / 1e9


def _windows(batch: SpanBatch, indices: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each record in `indices`, the position in `ends` of its step, and whether its step is in the batch."""
    window = np.minimum(np.searchsorted(ends, indices), len(ends) - 1)
    end = ends[window]
    known = (end > indices) & (batch.segment[end] == batch.segment[indices])
    known &= batch.records["step"][end] == batch.records["step"][indices]
    return window, known
