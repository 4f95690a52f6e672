"""The trace of all ranks' spans: a process for each rank, one clock, its error bound in the file and printed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from meshwright.events.span import SpanRecord
from meshwright.events.span_ring import SpanRing, ring_path
from tests.cli.command import meshwright

SECOND = 1_000_000_000
BEGIN = 1_790_000_000 * SECOND


def write_rank(folder: Path, rank: int, host: str, clock: int) -> None:
    path = ring_path(folder, 1, 2, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    ring = SpanRing(path, {"rank": rank, "ranks": 2, "host": host, "coordinates": {"shard": rank}}, 64)
    for step in (1, 2):
        start = BEGIN + step * SECOND
        own = start + (step + rank) % 2 * 1000  # the ranks take turns in being the last
        ring.append(
            [
                SpanRecord(own + clock, start + 2000 - own, step=step, phase="collective_wait"),
                SpanRecord(start + 5000 + clock, SECOND // 2, 7, step, 3, 0, 1, -1, phase="forward"),
                SpanRecord(start + clock, 100, step=step, phase="clock"),
                SpanRecord(start + clock, SECOND, step=step, phase="step"),
            ]
        )
    ring.close()


def test_the_trace_has_every_rank_on_one_clock(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    write_rank(tmp_path, 0, "a", 0)
    write_rank(tmp_path, 1, "b", 77 * SECOND)
    answer = meshwright("trace", tmp_path, "--steps", "2:2")
    assert answer.code == 0 and "6 spans of 2 ranks, steps 2 to 2" in answer.out, answer.err
    trace = json.loads(gzip.decompress((tmp_path / "traces" / "spans.json.gz").read_bytes()))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    starts = [event["ts"] for event in spans if event["name"] == "forward 0.1"]
    assert len(starts) == 2 and abs(starts[0] - starts[1]) <= trace["otherData"]["largest_clock_error_ns"] / 1000
    assert (
        abs(trace["otherData"]["clock_offset_ns"]["b"] + 77 * SECOND)
        <= trace["otherData"]["clock_error_ns"]["b"]
        < 3000
    )
    assert f"error bound of the clocks: {trace['otherData']['largest_clock_error_ns'] / 1000:.1f} µs" in answer.out
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0 (shard 0) on a", "rank 1 (shard 1) on b"}
    missing = meshwright("trace", tmp_path, "--steps", "8:9")
    assert missing.code == 2 and "recorded are 1 to 2" in missing.err


def test_a_run_without_spans_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    answer = meshwright("trace", tmp_path)
    assert answer.code == 2 and "they are recorded unless observe.spans is false" in answer.err
