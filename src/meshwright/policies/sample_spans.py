"""Chooses ranks and order for the samples that need several ranks each.

All ranks of such a sample work on it at the same time. A segment is a group of consecutive ranks that are busy until the same time. A
sample takes a whole segment or cuts one in two, so that no rank waits for another. Samples are placed in order, those that need the most
ranks first.

- Without pipelines, a sample takes the segment that is free first. At any time, all ranks then have samples of similar length.
- A pipeline with p stages ends (p − 1) times its longest slot after its work. Long samples are therefore put one after another on the
  busiest segment that can still end in time, and other pipelines get short samples only.
- A sample that would end too late gets more ranks than it needs: a whole segment, or several neighbouring segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

MOST_SEARCHED = 16
"""With more segments than this, no additional ranks are searched for a late sample: single samples then matter little for the pool."""
LATE = 1.005
"""A sample is late if it ends after this multiple of the target time."""


@dataclass(frozen=True)
class SpanLimits:
    """Sizes and times by which placements of a sample are compared."""

    ranks: int
    heads: int
    """Key/value heads. Ranks that exchange tokens for heads divide them."""
    fixed: float
    """Seconds that a slot takes in addition to its share of the sample's work."""
    stages: int
    end: float
    """Time by which ranks should end, in seconds."""
    always_exchange: bool = False
    """Whether ranks exchange tokens for heads whenever possible (`sample_time.SampleTime`)."""

    def ends(self, busy: float, longest: float, seconds: float) -> float:
        """Time at which a rank ends that is `busy`, has `longest` as its longest slot, and gets one more slot of `seconds`."""
        return busy + seconds + (self.stages - 1) * max(longest, seconds)


@dataclass(frozen=True)
class Spans:
    """The samples that are divided, in the order in which they were placed, and how long they keep each rank busy."""

    samples: list[int]
    first: list[int]
    """First rank of each sample."""
    ranks: list[int]
    busy: np.ndarray
    """Time until which each rank is busy with divided samples, in seconds, `(ranks,)`."""
    longest: np.ndarray
    """Longest slot with a divided sample on each rank, in seconds, `(ranks,)`."""


class LongSample(NamedTuple):
    """A sample to divide: its number, and at least and at most how many ranks it may have."""

    number: int
    least: int
    most: int
    shared: float
    """Seconds of work that the ranks share."""
    attention: float
    """The part of `shared` that is attention; a ring transfer overlaps it."""
    ring: float
    """Seconds in which keys and values go round a ring."""
    exchange: float
    """Seconds of exchanging tokens for heads, which the ranks share."""

    def seconds(self, ranks: int, limits: SpanLimits) -> float:
        """Seconds of a slot with a part of this sample, if it is on `ranks` ranks. The same formula as `SampleTime.parts`."""
        seconds = self.shared / ranks + max(self.ring - self.attention / ranks, 0.0)
        if limits.heads % ranks == 0:
            exchanged = (self.shared + self.exchange) / ranks
            seconds = exchanged if limits.always_exchange else min(seconds, exchanged)
        return seconds + limits.fixed


class RankSegment(NamedTuple):
    """Consecutive ranks from `start` on that are busy until the same time. `longest` is their longest slot so far."""

    start: int
    width: int
    busy: float
    longest: float


def place_spans(samples: Sequence[LongSample], limits: SpanLimits) -> Spans:
    """Place `samples` in the given order, which must be by descending `least`."""
    segments = _Segments(limits)
    indices = []
    first = []
    ranks = []
    for sample in samples:
        start, number = segments.take(sample)
        indices.append(sample.number)
        first.append(start)
        ranks.append(number)
    last = segments.in_order()
    widths = [segment.width for segment in last]
    busy, longest = (np.repeat([getattr(segment, name) for segment in last], widths) for name in ("busy", "longest"))
    return Spans(indices, first, ranks, busy, longest)


class _Segments:
    """All segments, in three heaps: usable segments, segments too narrow for the current sample, and segments where it would end too late.

    As samples get smaller, segments return from the second and third heap to the first.
    """

    def __init__(self, limits: SpanLimits) -> None:
        self.limits = limits
        self._open: list[tuple[float, RankSegment]] = []
        self._narrow: list[tuple[int, RankSegment]] = []
        self._late: list[tuple[float, RankSegment]] = []
        self._add(RankSegment(0, limits.ranks, 0.0, 0.0))

    def in_order(self) -> list[RankSegment]:
        """The segments sorted by their first rank."""
        return sorted(segment for heap in (self._open, self._narrow, self._late) for _, segment in heap)

    def take(self, sample: LongSample) -> tuple[int, int]:
        """Choose ranks for a sample, and mark them as busy with it. Returns the first rank and the number of ranks."""
        limits = self.limits
        least = sample.least
        seconds = sample.seconds(sample.least, self.limits)
        while self._narrow and -self._narrow[0][0] >= least:
            self._add(heappop(self._narrow)[1])
        while self._late and -self._late[0][0] >= seconds:
            self._add(heappop(self._late)[1])
        while self._open:
            segment = self._open[0][1]
            if segment.width < least:
                heappush(self._narrow, (-segment.width, heappop(self._open)[1]))
                continue
            slack = limits.end * LATE - limits.ends(segment.busy, segment.longest, 0.0)
            late = slack < seconds or limits.ends(0.0, 0.0, seconds) + segment.busy > limits.end * LATE
            if not late:
                return self._give(heappop(self._open)[1], least, seconds)
            if limits.stages == 1:
                break  # the other segments are busy even longer
            heappush(self._late, (-slack, heappop(self._open)[1]))
        first_free = self._open or self._late
        if first_free and len(self._open) + len(self._late) + len(self._narrow) > MOST_SEARCHED:
            return self._give(heappop(first_free)[1], least, seconds)
        return self._take_late(sample)

    def _add(self, segment: RankSegment) -> None:
        """Put a segment into the heap of usable segments."""
        heappush(self._open, (segment.busy if self.limits.stages == 1 else -segment.busy, segment))

    def _give(self, segment: RankSegment, ranks: int, seconds: float) -> tuple[int, int]:
        """Add a slot of `seconds` to the first `ranks` ranks of a segment that is in no heap."""
        start, width, busy, longest = segment
        if ranks < width:
            self._add(RankSegment(start + ranks, width - ranks, busy, longest))
        self._add(RankSegment(start, ranks, busy + seconds, max(longest, seconds)))
        return start, ranks

    def _take_late(self, sample: LongSample) -> tuple[int, int]:
        """Choose ranks for a sample that would be late on its fewest ranks, so that it ends as early as possible."""
        limits = self.limits
        ordered = self.in_order()
        least = sample.least
        most = sample.most
        best_end = math.inf
        best = range(0)
        number = least
        for index, (_, width, busy, longest) in enumerate(ordered):
            for ranks in (least, min(width, most)):
                end = limits.ends(busy, longest, sample.seconds(ranks, limits))
                if width >= least and end < best_end:
                    best_end = end
                    best = range(index, index + 1)
                    number = ranks
        run, end = self._best_run(ordered, sample)
        if end < best_end:
            best = run
            number = min(sum(ordered[index].width for index in run), most)
        chosen = [ordered[index] for index in best]
        joined = RankSegment(
            chosen[0].start,
            sum(segment.width for segment in chosen),
            max(segment.busy for segment in chosen),
            max(segment.longest for segment in chosen),
        )
        others = ordered[: best.start] + ordered[best.stop :]
        self._narrow = []
        self._late = []
        self._open = [(segment.busy if limits.stages == 1 else -segment.busy, segment) for segment in others]
        heapify(self._open)
        return self._give(joined, number, sample.seconds(number, limits))

    def _best_run(self, ordered: list[RankSegment], sample: LongSample) -> tuple[range, float]:
        """The neighbouring segments to join for a sample, and the time of its end. Waiting of their ranks counts as a later end of all."""
        limits = self.limits
        best_end = math.inf
        best = range(0)
        for first in range(len(ordered)):
            width = 0
            work = 0.0
            ready = 0.0
            longest = 0.0
            for last in range(first, len(ordered)):
                segment = ordered[last]
                width += segment.width
                work += segment.busy * segment.width
                ready = max(ready, segment.busy)
                longest = max(longest, segment.longest)
                if width >= sample.least and last > first:
                    end = limits.ends(ready, longest, sample.seconds(min(width, sample.most), limits))
                    end = max(end, limits.end + (ready * width - work) / limits.ranks)
                    best_end, best = (end, range(first, last + 1)) if end < best_end else (best_end, best)
                if width >= sample.most:
                    break
        return best, best_end
