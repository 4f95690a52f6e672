"""Computes when offloaded activations are freed on the device, and when they are copied back.

The device memory of activations is freed only when another layer needs it, after a wait for the copy to host memory. A copy back starts as
soon as the predicted memory has space for it. If only some layers are offloaded, their copies can overlap with the whole forward and the
whole backward. If all layers are offloaded, each copy overlaps with the compute of one other layer. Activations that fit on the device all
the time are not offloaded.

A position is the index of a compute (a forward or a backward) among all computes of the step. A visit is one micro-batch in one unit of a
stage: its forward and its backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from meshwright.workload.buffers import DEVICE_LAYERS

ROUNDING = 1 + 1e-9
"""Tolerance of the comparison of memory sums: the same sizes, added in another order, can differ by rounding."""

Visit = tuple[int, int, int]
"""(stage, micro-batch, unit): the forward and the backward of one micro-batch in one unit."""


@dataclass(frozen=True)
class Timetable:
    """When offloaded activations are freed and copied back, by position among the step's forwards and backwards."""

    frees: Mapping[int, Sequence[Visit]]
    """Visits whose device memory is freed at the position, after their copy to host memory."""
    fetches: Mapping[int, Sequence[Visit]]
    """Visits whose copy back starts at the position."""
    offloaded: frozenset[Visit]
    """The visits in `frees` and `fetches`. The plan may ask to offload more visits; the others fit on the device all the time."""


@lru_cache(maxsize=4)  # nearly all steps of a run have the same schedule
def build_timetable(
    computes: tuple[tuple[Visit, ...], ...], sizes: tuple[tuple[Visit, float], ...], candidates: frozenset[Visit]
) -> Timetable:
    """Return the positions at which the activations of the `candidates` are freed and copied back.

    - `computes`: the visits of each forward and backward, in order. A visit with a backward occurs twice.
    - `sizes`: the memory of each visit between its forward and its backward, in any unit of size.
    - `candidates`: the visits that the plan asks to offload.

    A candidate must be on the device during its forward and the next compute, and during its backward and the compute before it. Between
    these it stays on the device as long as the total does not exceed the limit; the oldest candidates are freed first. The limit is the
    planner's memory estimate: at each position the other visits plus the largest candidates, at most `DEVICE_LAYERS` and no more than are
    alive there; the limit is the peak of this sum. A candidate that is never freed is not offloaded.
    """
    if not candidates:
        return Timetable({}, {}, candidates)
    size = dict(sizes)
    length = len(computes)
    last = {visit: position for position, visits in enumerate(computes) for visit in visits}
    first = {visit: length - 1 - position for position, visits in enumerate(reversed(computes)) for visit in visits}
    freeable = sorted((visit for visit in candidates if first[visit] + 2 < last[visit] - 1), key=last.__getitem__)
    others = [_Allocation(first[visit], last[visit] + 1, size[visit]) for visit in size.keys() - candidates]
    required = [_Allocation(first[visit], last[visit] + 1, size[visit]) for visit in candidates.difference(freeable)]
    required += [_Allocation(first[visit], first[visit] + 2, size[visit]) for visit in freeable]
    required += [_Allocation(last[visit] - 1, last[visit] + 1, size[visit]) for visit in freeable]
    load = _load(length, [*others, *required])
    limit = _limit(length, others, [_Allocation(first[visit], last[visit] + 1, size[visit]) for visit in candidates])
    capacity = max(limit, *load) * ROUNDING
    optional = {visit: _Allocation(first[visit] + 2, last[visit] - 1, size[visit]) for visit in freeable}
    frees = _free_positions(load, capacity, optional)
    # In reversed time a copy back is a free, so the same function computes the positions of both.
    reversed_optional = {
        visit: _Allocation(length + 1 - last[visit], length - frees[visit], size[visit])
        for visit in freeable
        if frees[visit] < last[visit] - 1
    }
    reversed_frees = _free_positions(load[::-1], capacity, reversed_optional)
    fetches = {visit: length - position for visit, position in reversed_frees.items()}
    offloaded = [visit for visit in reversed_optional if frees[visit] < fetches[visit]]
    frees, fetches = ({visit: positions[visit] for visit in offloaded} for positions in (frees, fetches))
    return Timetable(_by_position(frees), _by_position(fetches), frozenset(offloaded))


@dataclass(frozen=True)
class _Allocation:
    """Memory that is on the device from the beginning of compute `start` to the beginning of compute `stop`."""

    start: int
    stop: int
    size: float


def _limit(length: int, others: Sequence[_Allocation], candidates: Sequence[_Allocation]) -> float:
    """The peak over all positions of `others` plus the largest candidates: as many as are alive there, but at most `DEVICE_LAYERS`."""
    largest = [0.0, *accumulate(sorted((visit.size for visit in candidates), reverse=True)[:DEVICE_LAYERS])]
    alive = _load(length, [replace(visit, size=1.0) for visit in candidates])
    pairs = zip(_load(length, others), alive, strict=True)
    return max(load + largest[min(round(count), DEVICE_LAYERS)] for load, count in pairs)


def _load(length: int, allocations: Iterable[_Allocation]) -> list[float]:
    """Memory on the device at each position."""
    change = [0.0] * (length + 1)
    for allocation in allocations:
        change[allocation.start] += allocation.size
        change[allocation.stop] -= allocation.size
    return [*accumulate(change)][:length]


def _free_positions(load: list[float], capacity: float, optional: Mapping[Visit, _Allocation]) -> dict[Visit, int]:
    """Return the position at which the optional allocation of each visit is freed.

    It is freed at its end, or earlier if the memory at a position would exceed `capacity`; the oldest allocations are freed first. The
    memory of the allocations is added to `load`.
    """
    frees: dict[Visit, int] = {}
    allocated: dict[Visit, float] = {}
    starts = _by_position({visit: allocation.start for visit, allocation in optional.items()})
    stops = _by_position({visit: allocation.stop for visit, allocation in optional.items()})
    size = 0.0
    for position, required in enumerate(load):
        for visit in starts[position]:
            allocated[visit] = optional[visit].size
            size += allocated[visit]
        ended = [visit for visit in stops[position] if visit in allocated]
        while ended or (allocated and required + size > capacity):
            visit = ended.pop() if ended else next(iter(allocated))
            size -= allocated.pop(visit)
            frees[visit] = position
        load[position] += size
    return frees


def _by_position(positions: Mapping[Visit, int]) -> defaultdict[int, list[Visit]]:
    visits = defaultdict[int, list[Visit]](list)
    for visit, position in positions.items():
        visits[position].append(visit)
    return visits
