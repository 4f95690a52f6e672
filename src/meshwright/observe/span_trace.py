"""Writes the recorded spans of all ranks of a run as a trace for Perfetto, with times on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.events.clock_alignment import ClockAlignment, align_clocks
from meshwright.events.span import SPAN_PHASES, Span
from meshwright.events.span_ring import RankSpans, read_spans, starts_with_spans
from meshwright.simulator.trace import write_spans
from meshwright.spec.errors import BadInput

LANES = {
    "forward": "compute",
    "backward": "compute",
    "weight_gradient": "compute",
    "gradient_norm": "compute",
    "optimizer": "compute",
    "collective_wait": "wait",
    "receive": "wait",
    "send": "send",
    "garbage_collection": "host",
}
"""Lane of the trace by phase. Phases that are not listed are in the lane `step`."""


def write_span_trace(folder: Path, file: Path, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """Write the spans of the newest start of a run into `file`.

    Return the trace's figures, which the file has as `otherData`.

    `steps` (first, last) limits the trace to these steps. Raises BadInput if the run has no spans, or none of these
    steps.
    """
    starts = starts_with_spans(folder)
    ranks, notes = read_spans(starts[-1]) if starts else ([], [])
    if not ranks:
        raise BadInput(f"{folder}: no spans in spans/; they are recorded unless observe.spans is false")
    alignment = align_clocks(ranks)
    origin = min(int(rank.records["start_ns"].min()) for rank in ranks if len(rank.records))
    spans = list(trace_spans(ranks, alignment, origin, steps))
    if not spans:
        recorded = [step for rank in ranks for step in rank.of_phase("step")["step"].tolist()]
        raise BadInput(f"{folder}: no spans of these steps; recorded are {min(recorded)} to {max(recorded)}")
    figures = {
        "start": starts[-1].name,
        "ranks": len(ranks),
        "steps": [min(span.step for span in spans), max(span.step for span in spans)],
        "spans": len(spans),
        "origin_unix_ns": origin,
        "clock_offset_ns": dict(alignment.offset_ns),
        "clock_error_ns": dict(alignment.error_ns),
        "largest_clock_error_ns": alignment.largest_error_ns,
        "missing": notes,
    }
    write_spans(spans, file, {rank.rank: _name(rank) for rank in ranks}, figures)
    return figures


def trace_spans(
    ranks: Sequence[RankSpans], alignment: ClockAlignment, origin: int, steps: tuple[int, int] | None
) -> Iterator[Span]:
    """Yield the records of all ranks as spans, with times in seconds after `origin` (Unix time in ns on the first
    host's clock).
    """
    for rank in ranks:
        shift = alignment.offset_ns[rank.header["host"]] - origin
        for record in rank.records:
            phase = SPAN_PHASES[record["phase"]]
            if phase in ("clock", "attention_work") or (
                steps is not None and not steps[0] <= record["step"] <= steps[1]
            ):
                continue
            start = (int(record["start_ns"]) + shift) / 1e9
            duration = int(record["duration_ns"]) / 1e9
            yield Span(_label(phase, record), start, duration, int(record["step"]), rank.rank, LANES.get(phase, "step"))


def _label(phase: str, record: Any) -> str:
    stage, micro_batch, unit = (int(record[name]) for name in ("stage", "micro_batch", "unit"))
    if stage < 0:
        return phase
    return f"{phase} {stage}" + (f".{micro_batch}" if micro_batch >= 0 else "") + (f"/{unit}" if unit >= 0 else "")


def _name(rank: RankSpans) -> str:
    coordinates = ", ".join(f"{axis} {index}" for axis, index in rank.header["coordinates"].items())
    return f"rank {rank.rank} ({coordinates}) on {rank.header['host']}"
