"""Computes when activations are offloaded and copied back.

Compute waits for a copy out only when another layer needs the memory, and a copy back starts as soon as there is space.
So where some layers are moved and others are kept, the link has the whole forward, and the whole backward, for the few;
where all are moved, each copy has the compute of one other layer. A visit that need not free memory is not moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from meshwright.workload.buffers import DEVICE_LAYERS

ROUNDING = 1 + 1e-9
"""Of sums in one order over those in another."""

Visit = tuple[int, int, int]
"""(stage, micro-batch, unit)."""


@dataclass(frozen=True)
class Timetable:
    """By position among a step's forwards and backwards: visits that have left the device, and visits whose copy back starts."""

    left: Mapping[int, Sequence[Visit]]
    back: Mapping[int, Sequence[Visit]]
    moved: frozenset[Visit]
    """Those in it: of what the plan moves, what must make room for others."""


@lru_cache(maxsize=4)  # of a run's steps all but a few are alike
def timetable(
    computes: tuple[tuple[Visit, ...], ...], keeps: tuple[tuple[Visit, float], ...], moved: frozenset[Visit]
) -> Timetable:
    """The copy positions of the `moved` visits, for the forwards and backwards `computes` in order.

    A visit with a backward occurs twice in `computes`. `keeps` is the memory that each leaves on the device in between, in
    any unit. A moved visit is on the device while it computes, during the compute after its forward, and during the compute
    before its backward. It may stay longer, the oldest leaving first, while the total does not exceed the maximum of the
    kept visits plus the largest `DEVICE_LAYERS` of the moved, which is what the memory account counts. A visit that may
    stay all the time is not moved.
    """
    if not moved:
        return Timetable({}, {}, moved)
    size, length = dict(keeps), len(computes)
    last = {visit: position for position, visits in enumerate(computes) for visit in visits}
    first = {visit: length - 1 - position for position, visits in enumerate(reversed(computes)) for visit in visits}
    away = sorted((visit for visit in moved if first[visit] + 2 < last[visit] - 1), key=last.__getitem__)
    kept = [_Stay(first[visit], last[visit] + 1, size[visit]) for visit in size.keys() - moved]
    near = [_Stay(first[visit], last[visit] + 1, size[visit]) for visit in moved.difference(away)]
    near += [_Stay(first[visit], first[visit] + 2, size[visit]) for visit in away]
    near += [_Stay(last[visit] - 1, last[visit] + 1, size[visit]) for visit in away]
    load = _load(length, [*kept, *near])
    fullest = max(_load(length, kept)) + sum(sorted(size[visit] for visit in moved)[-DEVICE_LAYERS:])
    room = max(fullest, *load) * ROUNDING
    left = _gone_from(load, room, {visit: _Stay(first[visit] + 2, last[visit] - 1, size[visit]) for visit in away})
    # Backwards in time a copy back is one out.
    turned = {
        visit: _Stay(length + 1 - last[visit], length - left[visit], size[visit])
        for visit in away
        if left[visit] < last[visit] - 1
    }
    back = {visit: length - position for visit, position in _gone_from(load[::-1], room, turned).items()}
    going = [visit for visit in turned if left[visit] < back[visit]]
    left, back = ({visit: at[visit] for visit in going} for at in (left, back))
    return Timetable(_by_position(left), _by_position(back), frozenset(going))


@dataclass(frozen=True)
class _Stay:
    """What is on the device from the beginning of one compute to that of another."""

    start: int
    stop: int
    size: float


def _load(length: int, stays: Iterable[_Stay]) -> list[float]:
    """Memory on the device at each position."""
    change = [0.0] * (length + 1)
    for stay in stays:
        change[stay.start] += stay.size
        change[stay.stop] -= stay.size
    return [*accumulate(change)][:length]


def _gone_from(load: list[float], room: float, lingering: Mapping[Visit, _Stay]) -> dict[Visit, int]:
    """By visit, the position from which it is off the device: the end of its stay, or when memory exceeds `room`.

    The oldest leave first. Their memory is added to `load`.
    """
    gone: dict[Visit, int] = {}
    there: dict[Visit, float] = {}
    starts = _by_position({visit: stay.start for visit, stay in lingering.items()})
    stops = _by_position({visit: stay.stop for visit, stay in lingering.items()})
    size = 0.0
    for position, taken in enumerate(load):
        for visit in starts[position]:
            there[visit] = lingering[visit].size
            size += there[visit]
        ended = [visit for visit in stops[position] if visit in there]
        while ended or (there and taken + size > room):
            visit = ended.pop() if ended else next(iter(there))
            size -= there.pop(visit)
            gone[visit] = position
        load[position] += size
    return gone


def _by_position(positions: Mapping[Visit, int]) -> defaultdict[int, list[Visit]]:
    visits = defaultdict[int, list[Visit]](list)
    for visit, position in positions.items():
        visits[position].append(visit)
    return visits
