"""Times a call with CUDA events or the host's clock: warm-up, many repeats, the median, and of several ranks the
slowest.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from meshwright.profile.team import Team

Call = Callable[[], object]
"""What is timed."""
MIN_BATCH_SECONDS = 1e-3
"""Shortest time of a batch of calls that is timed as a whole; an event itself costs microseconds."""
MIN_BATCHES = 3
"""Minimum number of batches that are timed.

Before them, three calls load kernels, open connections and touch buffers. A call that takes longer than the whole
budget is timed once.
"""
MAX_BATCHES = 200
"""Maximum number of batches that are timed."""
LARGEST_BATCH = 200
"""Maximum number of calls in a batch, because the queue of the device must have space for all launches of a batch."""
IDLE_SECONDS = 0.3
"""Seconds for which the device idles before a burst, so that it cools down and raises its clocks."""
BURST_SECONDS = 0.02
"""Seconds of a burst: less than the time after which a device at its power limit lowers its clocks."""


class TeamClock:
    """Times calls on all ranks of a team at the same time.

    Every method except `rank_seconds` must be called on all ranks.
    """

    def __init__(self, team: Team) -> None:
        self.team = team

    def seconds(self, call: Call, budget: float) -> float:
        """Return the median seconds of `call`.

        It is repeated for about `budget` seconds, of which the first half is warm-up.
        """
        calls_per_batch, batches = _batches_within_budget(self._agreed_seconds(call), budget)
        times = self._batch_means(call, calls_per_batch, batches)
        return self.team.largest(statistics.median(times[len(times) // 2 :]))

    def burst_seconds(self, call: Call) -> float:
        """Return the median seconds of `call` on a device that was idle before, from repeats of a few hundredths of a
        second.
        """
        calls_per_batch, batches = _batches_within_budget(self._agreed_seconds(call), BURST_SECONDS)
        if self.team.cuda:
            self.team.meet()
            time.sleep(IDLE_SECONDS)
        return self.team.largest(statistics.median(self._batch_means(call, calls_per_batch, batches)))

    def rank_seconds(self, call: Call, budget: float) -> float:
        """Return the median seconds of `call` on this rank only; other ranks do not take part."""
        call()
        calls_per_batch, batches = _batches_within_budget(self._batch_means(call, 2, 1)[0], budget)
        return statistics.median(self._batch_means(call, calls_per_batch, batches))

    def keep_busy(self, call: Call, seconds: float) -> None:
        """Run `call` for about `seconds`, so that the clocks of the device settle at the rate that it can sustain."""
        count = max(1, round(seconds / self._agreed_seconds(call)))
        self._batch_means(call, count, 1)

    def _agreed_seconds(self, call: Call) -> float:
        """Return the approximate seconds of a call, equal on every rank, so that all ranks choose the same number of
        repeats.
        """
        call()
        self.team.meet()
        return self.team.largest(self._batch_means(call, 2, 1)[0])

    def _batch_means(self, call: Call, calls_per_batch: int, batches: int) -> list[float]:
        """Return the mean seconds of a call in each batch."""
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
        """Return the mean seconds of a call in each batch.

        All batches are queued on the device before the first one ends, so the host's time is not included.
        """
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
    """Return (calls per batch, number of batches) for calls of `call_seconds` that together take about `budget`
    seconds.
    """
    call_seconds = max(call_seconds, 1e-7)
    calls_per_batch = min(LARGEST_BATCH, max(1, math.ceil(MIN_BATCH_SECONDS / call_seconds)))
    batches = int(budget / (call_seconds * calls_per_batch))
    return calls_per_batch, min(MAX_BATCHES, max(MIN_BATCHES, batches)) if batches else 1
