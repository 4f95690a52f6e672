"""Timelines as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: a process for each rank, a thread for each lane."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.events.span import Span
from meshwright.simulator.timeline import Timeline

MICROSECONDS = 1e6


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the simulated step to `path` as JSON."""
    trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(timeline.spans())}
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def trace_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Spans, predicted or measured, as Chrome trace events; the category is the span's first word.

    Format: "Trace Event Format" (Google), complete events (`ph` X) with times in microseconds, metadata events (`ph` M).
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
    return _names(lanes) + events


def _names(lanes: dict[tuple[int, str], int]) -> list[dict[str, Any]]:
    ranks = sorted({rank for rank, _ in lanes})
    processes = [_metadata("process_name", rank, 0, f"rank {rank}") for rank in ranks]
    return processes + [_metadata("thread_name", rank, number, lane) for (rank, lane), number in lanes.items()]


def _metadata(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
