"""Seconds of a call on the slowest rank: CUDA events on a GPU, the processor's clock otherwise; warm-up, many repeats, the median."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from meshwright.profile.team import Team

Call = Callable[[], object]
TICK = 1e-3
"""Seconds of one timed batch at least: an event costs microseconds."""
LEAST, MOST = 3, 200
"""Timed batches, behind three calls that load and choose kernels, make connections and touch buffers. One is enough for a call that
alone takes longer than all that was asked for."""
LARGEST_BATCH = 200
IDLE_SECONDS = 0.3
"""Rest before a burst."""
BURST_SECONDS = 0.02


class Clock:
    """Times calls on all ranks of a team at once; every method but `alone` is collective over them."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def seconds(self, call: Call, budget: float) -> float:
        """Median seconds of `call` in about `budget` seconds of repeats, of which the first half only warms up."""
        inner, batches = _cut(self._known(call), budget)
        times = self._batches(call, inner, batches)
        return self.team.slowest(statistics.median(times[len(times) // 2 :]))

    def burst_seconds(self, call: Call) -> float:
        """The same in a device that was idle for a moment: a few hundredths of a second."""
        inner, batches = _cut(self._known(call), BURST_SECONDS)
        if self.team.cuda:
            self.team.meet()
            time.sleep(IDLE_SECONDS)
        return self.team.slowest(statistics.median(self._batches(call, inner, batches)))

    def alone(self, call: Call, budget: float) -> float:
        """Median seconds on this rank only; the others take no part."""
        call()
        inner, batches = _cut(self._batches(call, 2, 1)[0], budget)
        return statistics.median(self._batches(call, inner, batches))

    def keep_busy(self, call: Call, seconds: float) -> None:
        """Let the device work for about `seconds`, so that its clocks settle where long computing leaves them."""
        count = max(1, round(seconds / self._known(call)))
        self._batches(call, count, 1)

    def _known(self, call: Call) -> float:
        """About how long a call takes, the same on every rank, from which all choose their repeats."""
        call()
        self.team.meet()
        return self.team.slowest(self._batches(call, 2, 1)[0])

    def _batches(self, call: Call, inner: int, batches: int) -> list[float]:
        """Seconds of one call, by batch."""
        if self.team.cuda:
            return self._on_device(call, inner, batches)
        times = []
        for _ in range(batches):
            start = time.perf_counter()
            for _ in range(inner):
                call()
            times.append((time.perf_counter() - start) / inner)
        return times

    def _on_device(self, call: Call, inner: int, batches: int) -> list[float]:
        """Batches stand behind one another in the device's queue: the host is not waited for."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(batches + 1)]
        self.team.finish()
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(inner):
                call()
            mark.record()
        self.team.finish()
        return [marks[i].elapsed_time(marks[i + 1]) / 1e3 / inner for i in range(batches)]


def _cut(each: float, budget: float) -> tuple[int, int]:
    """Calls in a batch, and batches."""
    each = max(each, 1e-7)
    inner = min(LARGEST_BATCH, max(1, math.ceil(TICK / each)))
    wanted = int(budget / (each * inner))
    return inner, min(MOST, max(LEAST, wanted)) if wanted else 1
