"""Times a call on the slowest rank, by CUDA events or the host's clock: warm-up, many repeats, the median."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from meshwright.profile.team import Team

Call = Callable[[], object]
MIN_BATCH_SECONDS = 1e-3
"""Shortest timed batch in seconds; an event costs microseconds."""
MIN_BATCHES = 3
MAX_BATCHES = 200
"""Minimum and maximum of timed batches, after three calls that load kernels, open connections and touch buffers.
A call that takes longer than the whole budget is timed once."""
LARGEST_BATCH = 200
"""Most calls in a batch: the device's queue must hold all launches of a batch."""
IDLE_SECONDS = 0.3
"""Idle time before a burst, in which the device cools and raises its clocks."""
BURST_SECONDS = 0.02
"""Duration of a burst: shorter than the time after which a device at its power limit lowers its clocks."""


class TeamClock:
    """Times calls on all ranks of a team at once; every method but `rank_seconds` is collective over them."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def seconds(self, call: Call, budget: float) -> float:
        """Median seconds of `call`, from about `budget` seconds of repeats whose first half is warm-up."""
        calls_per_batch, batches = _batches_within_budget(self._agreed_seconds(call), budget)
        times = self._batch_means(call, calls_per_batch, batches)
        return self.team.largest(statistics.median(times[len(times) // 2 :]))

    def burst_seconds(self, call: Call) -> float:
        """Median seconds of `call` on a device that was idle before, from a few hundredths of a second of repeats."""
        calls_per_batch, batches = _batches_within_budget(self._agreed_seconds(call), BURST_SECONDS)
        if self.team.cuda:
            self.team.meet()
            time.sleep(IDLE_SECONDS)
        return self.team.largest(statistics.median(self._batch_means(call, calls_per_batch, batches)))

    def rank_seconds(self, call: Call, budget: float) -> float:
        """Median seconds of `call` on this rank only; not collective."""
        call()
        calls_per_batch, batches = _batches_within_budget(self._batch_means(call, 2, 1)[0], budget)
        return statistics.median(self._batch_means(call, calls_per_batch, batches))

    def keep_busy(self, call: Call, seconds: float) -> None:
        """Keep the device busy for about `seconds`, so that its clocks settle at their sustained rate."""
        count = max(1, round(seconds / self._agreed_seconds(call)))
        self._batch_means(call, count, 1)

    def _agreed_seconds(self, call: Call) -> float:
        """Approximate seconds of a call, equal on every rank, so that all ranks choose the same number of repeats."""
        call()
        self.team.meet()
        return self.team.largest(self._batch_means(call, 2, 1)[0])

    def _batch_means(self, call: Call, calls_per_batch: int, batches: int) -> list[float]:
        """Mean seconds of a call in each batch."""
        if self.team.cuda:
            return self._device_batch_means(call, calls_per_batch, batches)
        times = []
        for _ in range(batches):
            start = time.perf_counter()
            for _ in range(calls_per_batch):
                call()
            times.append((time.perf_counter() - start) / calls_per_batch)
        return times

    def _device_batch_means(self, call: Call, calls_per_batch: int, batches: int) -> list[float]:
        """Mean seconds of a call in each batch, all queued on the device before the first ends, so that the host adds nothing."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(batches + 1)]
        self.team.finish()
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(calls_per_batch):
                call()
            mark.record()
        self.team.finish()
        return [marks[index].elapsed_time(marks[index + 1]) / 1e3 / calls_per_batch for index in range(batches)]


def _batches_within_budget(call_seconds: float, budget: float) -> tuple[int, int]:
    """(calls per batch, batches) for calls of `call_seconds` within `budget` seconds."""
    call_seconds = max(call_seconds, 1e-7)
    calls_per_batch = min(LARGEST_BATCH, max(1, math.ceil(MIN_BATCH_SECONDS / call_seconds)))
    batches = int(budget / (call_seconds * calls_per_batch))
    return calls_per_batch, min(MAX_BATCHES, max(MIN_BATCHES, batches)) if batches else 1
