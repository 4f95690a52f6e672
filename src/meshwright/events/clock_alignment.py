"""Estimates the offsets between the clocks of hosts, from events that several hosts recorded. Does not import torch.

A collective ends on no rank before its last participant has started, and a message arrives only after it was ready. So each pair of a start
on one host and an end on another gives a bound on the difference of their clocks: start − end. The tightest bounds over many steps,
combined along all paths between hosts, give an interval for every offset (as in Duda et al. 1987).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.events.span_ring import RankSpans

Events = dict[tuple[int, ...], list[tuple[int, int, int]]]
"""For each collective or message, by a key: (host, start in ns or UNKNOWN, end in ns or UNKNOWN) of each participant."""
NEVER = 2**62
UNKNOWN = 2**61
"""Stands for a time that an event does not have, and for a difference without a bound. Two such values can be added without overflow."""


@dataclass(frozen=True)
class ClockAlignment:
    """Offsets in ns that must be added to the times of each host to get times of the first host's clock, with error bounds.

    A bound includes the error of device clocks relative to their hosts (`device_error_ns`, the largest). A bound is None for a host that
    shares no event with the others; the times of such a host are not changed.
    """

    offset_ns: Mapping[str, int]
    error_ns: Mapping[str, int | None]
    device_error_ns: int

    @property
    def largest_error_ns(self) -> int | None:
        """The largest error bound between any rank and the first host; None if it is unknown for a host."""
        errors = list(self.error_ns.values())
        return None if None in errors else max(error for error in errors if error is not None)


def align_clocks(ranks: Sequence[RankSpans]) -> ClockAlignment:
    """Estimate the offset from every host to the host of the first of `ranks`. Ranks of one host share its clock."""
    hosts = list(dict.fromkeys(rank.header["host"] for rank in ranks))
    clocks = np.concatenate([rank.of_phase("clock")["duration_ns"] for rank in ranks]) if ranks else np.zeros(0, int)
    device_error = int(clocks.max(initial=0))
    distance = (
        _largest_differences(ranks, hosts, 2 * device_error) if len(hosts) > 1 else np.zeros((len(hosts),) * 2, int)
    )
    for middle in range(len(hosts)):  # shortest paths (Floyd–Warshall)
        distance = np.minimum(distance, distance[:, middle, None] + distance[None, middle, :])
    offsets = {}
    errors = {}
    for number, host in enumerate(hosts):
        high = int(distance[number, 0])
        low = -int(distance[0, number])
        known = high < UNKNOWN // 2 and low > -UNKNOWN // 2
        offsets[host] = (high + low) // 2 if known and number else 0
        half_width = abs(high - low) // 2 if number else 0
        errors[host] = half_width + device_error if known or not number else None
    return ClockAlignment(offsets, errors, device_error)


def on_one_clock(ranks: Sequence[RankSpans]) -> tuple[list[RankSpans], ClockAlignment]:
    """The spans with all times converted to the clock of the first rank's host, and the alignment that was used."""
    alignment = align_clocks(ranks)
    return [_shifted(rank, alignment.offset_ns[rank.header["host"]]) for rank in ranks], alignment


def _shifted(rank: RankSpans, offset_ns: int) -> RankSpans:
    if not offset_ns:
        return rank
    records = rank.records.copy()
    records["start_ns"] += offset_ns
    return replace(rank, records=records)


def _largest_differences(ranks: Sequence[RankSpans], hosts: Sequence[str], slack: int) -> np.ndarray:
    """Element [a, b] is the largest possible value of (offset of host a) − (offset of host b), in ns."""
    largest = np.full((len(hosts), len(hosts)), UNKNOWN, dtype=np.int64)
    np.fill_diagonal(largest, 0)
    for participants in _events(ranks, hosts).values():
        for a, start, _ in participants:
            for b, _, end in participants:
                if a != b and start > -NEVER and end < NEVER:
                    largest[a, b] = min(largest[a, b], end - start + slack)
    return largest


def _events(ranks: Sequence[RankSpans], hosts: Sequence[str]) -> Events:
    """The all-reduces over all ranks, by step, and the messages. For each host, they have the latest start and the earliest end."""
    events: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}

    def add(key: tuple[int, ...], host: int, start: int, end: int) -> None:
        before = events.setdefault(key, {}).get(host, (-NEVER, NEVER))
        events[key][host] = max(start, before[0]), min(end, before[1])

    for rank in ranks:
        host = hosts.index(rank.header["host"])
        coordinates = dict(rank.header["coordinates"])
        coordinates.pop("pipeline", None)
        column = tuple(coordinates.values())
        waits = rank.of_phase("collective_wait")
        waits = waits[waits["action"] < 0]
        for step in np.unique(waits["step"]).tolist():
            for number, wait in enumerate(np.sort(waits[waits["step"] == step], order="start_ns")):
                start = int(wait["start_ns"])
                add((0, step, number), host, start, start + int(wait["duration_ns"]))
        for message in rank.of_phase("send"):
            if message["amount"] > 0:
                key = (
                    1,
                    int(message["step"]),
                    int(message["stage"]),
                    int(message["peer"]),
                    int(message["micro_batch"]),
                )
                add((*key, *column), host, int(message["start_ns"]), NEVER)
        for message in rank.of_phase("receive"):
            key = (1, int(message["step"]), int(message["peer"]), int(message["stage"]), int(message["micro_batch"]))
            add((*key, *column), host, -NEVER, int(message["start_ns"] + message["duration_ns"]))
    return {
        key: [(host, *times) for host, times in by_host.items()] for key, by_host in events.items() if len(by_host) > 1
    }
