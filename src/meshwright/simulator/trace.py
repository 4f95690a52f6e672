"""Writes timelines as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: a process per rank, a thread per lane."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.events.span import Span
from meshwright.simulator.timeline import Timeline

MICROSECONDS = 1e6
LANES = ("step", "compute", "wait", "unshard", "reduce", "replicate", "offload", "fetch", "recv", "send")
"""Order of a rank's lanes from the top, by the first word of the lane's name. Lanes with other names follow."""
UNNAMED: Mapping[int, str] = MappingProxyType({})


def write_trace(timeline: Timeline, path: Path, ranks: Mapping[int, str] = UNNAMED) -> None:
    """Write the simulated step to `path` as JSON, compressed if the file name ends in `.gz`. `ranks` gives names to ranks."""
    write_spans(timeline.spans(), path, ranks)


def write_spans(
    spans: Iterable[Span], path: Path, ranks: Mapping[int, str] = UNNAMED, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write predicted or measured spans to `path`, as `write_trace` does. `metadata` is stored in the file's `otherData`."""
    trace: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": trace_events(spans, ranks)}
    if metadata is not None:
        trace["otherData"] = dict(metadata)
    text = json.dumps(trace, separators=(",", ":")).encode("utf-8")
    # Without file name and time in the gzip header, the same plan gives the same bytes.
    path.write_bytes(gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)


def trace_events(spans: Iterable[Span], ranks: Mapping[int, str] = UNNAMED) -> list[dict[str, Any]]:
    """Convert predicted or measured spans to Chrome trace events. The category of an event is the first word of the span's name.

    Format: "Trace Event Format" (Google). Spans become complete events (`ph` X) with times in microseconds; names of ranks and lanes
    become metadata events (`ph` M).
    """
    lanes: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        lane = lanes.setdefault((span.rank, span.lane), len(lanes))
        events.append(
            {
                "name": span.name,
                "cat": span.name.partition(" ")[0],
                "ph": "X",
                "ts": span.start * MICROSECONDS,
                "dur": span.duration * MICROSECONDS,
                "pid": span.rank,
                "tid": lane,
                "args": {"step": span.step},
            }
        )
    return _names(lanes, ranks) + events


def _names(lanes: dict[tuple[int, str], int], ranks: Mapping[int, str]) -> list[dict[str, Any]]:
    events = []
    for rank in sorted({rank for rank, _ in lanes}):
        events.append(_metadata("process_name", rank, 0, name=ranks.get(rank, f"rank {rank}")))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
    for (rank, lane), number in lanes.items():
        events.append(_metadata("thread_name", rank, number, name=lane))
        events.append(_metadata("thread_sort_index", rank, number, sort_index=_sort_index(lane)))
    return events


def _sort_index(lane: str) -> int:
    word = lane.partition(" ")[0]
    return LANES.index(word) if word in LANES else len(LANES)


def _metadata(name: str, process: int, thread: int, /, **arguments: str | int) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}
