"""Clock offsets between hosts: the true offset is within the error bound, and collectives make the bound small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.events.clock_alignment import align_clocks
from meshwright.events.span import SpanRecord
from meshwright.events.span_ring import RankSpans, SpanRing, read_ring

MS = 1_000_000


def ranks_of(
    folder: Path, records: dict[int, list[SpanRecord]], hosts: list[str], coordinates: list[dict]
) -> list[RankSpans]:
    spans = []
    for rank, mine in records.items():
        ring = SpanRing(folder / f"{rank}", {"rank": rank, "host": hosts[rank], "coordinates": coordinates[rank]}, 4096)
        ring.append(mine)
        ring.close()
        spans.append(read_ring(folder / f"{rank}"))
    return spans


@pytest.mark.parametrize("seed", range(5))
def test_all_reduces_bound_the_offset_of_every_host(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    clock_of_host = {"a": 0, "b": 37 * MS, "c": -5_000 * MS}
    hosts = ["a", "a", "b", "b", "c"]
    records: dict[int, list[SpanRecord]] = {rank: [] for rank in range(5)}
    for step in range(1, 30):
        arrival = step * 1000 * MS + random.integers(0, 20 * MS, 5)
        end = int(arrival.max()) + 30_000
        for rank, host in enumerate(hosts):
            clock, start = clock_of_host[host], int(arrival[rank])
            done = end + int(random.integers(0, 10_000))
            records[rank].append(SpanRecord(start + clock, done - start, step=step, phase="collective_wait"))
            records[rank].append(SpanRecord(start + clock, 2_000, step=step, phase="clock"))
    alignment = align_clocks(ranks_of(tmp_path, records, hosts, [{"shard": rank} for rank in range(5)]))
    assert alignment.device_error_ns == 2_000 and alignment.offset_ns["a"] == 0
    for host, clock in clock_of_host.items():
        error = alignment.error_ns[host]
        assert error is not None and abs(alignment.offset_ns[host] + clock) <= error <= 60_000, host


def test_messages_in_both_directions_bound_the_offset(tmp_path: Path) -> None:
    clock = 8 * MS
    first = [
        SpanRecord(1000 * MS, 0, 64, 1, 0, 0, 0, -1, 1, phase="send"),
        SpanRecord(1050 * MS, 20 * MS, 64, 1, 4, 0, 0, -1, 1, phase="receive"),  # arrives at 1070 ms
    ]
    second = [
        SpanRecord(990 * MS + clock, 12 * MS, 64, 1, 0, 1, 0, -1, 0, phase="receive"),  # arrives at 1002 ms
        SpanRecord(1069 * MS + clock, 0, 64, 1, 3, 1, 0, -1, 0, phase="send"),
    ]
    places = [{"pipeline": 0, "shard": 0}, {"pipeline": 1, "shard": 0}]
    alignment = align_clocks(ranks_of(tmp_path, {0: first, 1: second}, ["a", "b"], places))
    assert abs(alignment.offset_ns["b"] + clock) <= 1.5 * MS and alignment.error_ns["b"] == 1.5 * MS
    others = [{"pipeline": 0, "shard": 0}, {"pipeline": 1, "shard": 1}]
    apart = align_clocks(ranks_of(tmp_path, {0: first, 1: second}, ["a", "b"], others))
    assert apart.error_ns == {"a": 0, "b": None} and apart.largest_error_ns is None, "messages of different pipelines"
