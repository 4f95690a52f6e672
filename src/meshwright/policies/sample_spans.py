"""Ranks and order of the samples that need several ranks each.

All ranks of such a sample work on it at the same time. A segment is a run of consecutive ranks that are busy until the same time: a sample
takes a segment or cuts one in two, so no rank waits for another. Samples are placed from those on most ranks to those on fewest.

- Without pipelines a sample takes the segment that is free first: all ranks then have samples of equal length at a time.
- A pipeline with p stages ends p − 1 times its longest slot after its work. So samples are stacked on the busiest segment that can still
  end in time, and the other pipelines keep to short samples.
- A sample that would end too late takes more ranks than it needs: a whole segment, or several segments beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

MOST_SEARCHED = 16
"""Segments up to which more ranks are sought for a late sample; with more of them, samples are small beside the pool."""
LATE = 1.005
"""Multiple of the time to end by that is not too late."""


@dataclass(frozen=True)
class SpanLimits:
    """Sizes and times that decide between the placements of a sample."""

    ranks: int
    heads: int
    """Key/value heads, which ranks that exchange tokens for heads divide."""
    fixed: float
    """Seconds that a part takes beside its share of the sample's work."""
    stages: int
    end: float
    """Time by which ranks should end."""
    always_exchange: bool = False
    """Whether heads are always exchanged, as in `sample_time.SampleTime`."""

    def ends(self, busy: float, longest: float, seconds: float) -> float:
        """Time at which a rank would end with a further slot of `seconds`."""
        return busy + seconds + (self.stages - 1) * max(longest, seconds)


@dataclass(frozen=True)
class Spans:
    """Samples on several ranks in the order of their placement, and the seconds that these take of each rank."""

    samples: list[int]
    first: list[int]
    """First rank of each sample."""
    ranks: list[int]
    busy: np.ndarray
    """Seconds until which each rank has samples of several ranks, `(ranks,)`."""
    longest: np.ndarray
    """Seconds of the longest of them on each rank, `(ranks,)`."""


class LongSample(NamedTuple):
    """A sample for several ranks: its number, and the bounds of how many."""

    number: int
    least: int
    most: int
    shared: float
    """Seconds that the ranks share."""
    attention: float
    """Seconds of these that a ring overlaps."""
    ring: float
    """Seconds in which keys and values go round a ring."""
    exchange: float
    """Seconds that the ranks share to exchange tokens for heads."""

    def seconds(self, ranks: int, limits: SpanLimits) -> float:
        """Seconds of a slot with a part of this sample on `ranks` ranks (`SampleTime.parts`)."""
        seconds = self.shared / ranks + max(self.ring - self.attention / ranks, 0.0)
        if limits.heads % ranks == 0:
            exchanged = (self.shared + self.exchange) / ranks
            seconds = exchanged if limits.always_exchange else min(seconds, exchanged)
        return seconds + limits.fixed


class RankSegment(NamedTuple):
    """Consecutive ranks that are busy until the same time; `longest` is the longest slot so far."""

    start: int
    width: int
    busy: float
    longest: float


def place_spans(samples: Sequence[LongSample], limits: SpanLimits) -> Spans:
    """Place `samples` in their order, by falling least ranks."""
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
    """All segments, in three heaps: open ones, ones that are too narrow for a sample, and ones that would end too late.

    As samples get smaller, they return to the open ones.
    """

    def __init__(self, limits: SpanLimits) -> None:
        self.limits = limits
        self._open: list[tuple[float, RankSegment]] = []
        self._narrow: list[tuple[int, RankSegment]] = []
        self._late: list[tuple[float, RankSegment]] = []
        self._add(RankSegment(0, limits.ranks, 0.0, 0.0))

    def in_order(self) -> list[RankSegment]:
        """The segments in the order of ranks."""
        return sorted(segment for heap in (self._open, self._narrow, self._late) for _, segment in heap)

    def take(self, sample: LongSample) -> tuple[int, int]:
        """First rank and number of ranks for a sample; they are busy with it from now on."""
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
                break  # the others are busy even longer
            heappush(self._late, (-slack, heappop(self._open)[1]))
        first_free = self._open or self._late
        if first_free and len(self._open) + len(self._late) + len(self._narrow) > MOST_SEARCHED:
            return self._give(heappop(first_free)[1], least, seconds)
        return self._take_late(sample)

    def _add(self, segment: RankSegment) -> None:
        """Open a segment."""
        heappush(self._open, (segment.busy if self.limits.stages == 1 else -segment.busy, segment))

    def _give(self, segment: RankSegment, ranks: int, seconds: float) -> tuple[int, int]:
        """Give the first `ranks` ranks of a segment, which is in no heap, a slot of `seconds`."""
        start, width, busy, longest = segment
        if ranks < width:
            self._add(RankSegment(start + ranks, width - ranks, busy, longest))
        self._add(RankSegment(start, ranks, busy + seconds, max(longest, seconds)))
        return start, ranks

    def _take_late(self, sample: LongSample) -> tuple[int, int]:
        """Ranks for a sample that ends too late on the fewest ranks, so that it ends as soon as possible."""
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
        """Neighbours to join for a sample, and when it would end; ranks that wait delay the end of all."""
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
