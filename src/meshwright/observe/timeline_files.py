"""Timeline files of a job: the recordings of all ranks on one clock, their trace with the predicted step, the summary."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from meshwright.events.span import Span, StepSpans
from meshwright.observe.measured_timeline import measured_timeline
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.timeline import Timeline
from meshwright.spec.layout import Layout

ALIGNED = "clocks aligned"
"""Name of the mark that every rank sets right after an all-reduce over all ranks: the same moment on all clocks."""
UNSCHEDULED_LANES = ("step", "mark", "offload", "fetch")
"""Lanes without actions of the schedule: waits for data, marks, copies to host memory and back."""


@dataclass(frozen=True)
class Recording:
    """The recorded steps of one rank, and the times of its alignment marks."""

    steps: tuple[StepSpans, ...]
    marks: tuple[float, ...]

    @classmethod
    def of(cls, recorded: Iterable[StepSpans]) -> Recording:
        """The recording of what `StepRecorder.take` returned: steps, and as step 0 the spans between steps."""
        recorded = tuple(recorded)
        marks = (s.start for step in recorded for s in step.spans if s.lane == "mark" and s.name == ALIGNED)
        return cls(tuple(step for step in recorded if step.step > 0), tuple(marks))

    def shifted(self, seconds: float) -> Recording:
        steps = (
            replace(step, start=step.start + seconds, spans=tuple(_later(step.spans, seconds))) for step in self.steps
        )
        return Recording(tuple(steps), tuple(mark + seconds for mark in self.marks))

    def to_bytes(self) -> bytes:
        """Compressed JSON, to be sent between ranks."""
        return gzip.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Recording:
        plain = json.loads(gzip.decompress(data))
        steps = (
            StepSpans(step["step"], step["start"], step["seconds"], tuple(Span(**span) for span in step["spans"]))
            for step in plain["steps"]
        )
        return cls(tuple(steps), tuple(plain["marks"]))


def on_one_clock(recordings: Sequence[Recording]) -> tuple[list[Recording], float]:
    """(recordings by rank on rank 0's clock, with its first mark at 0; remaining difference of corresponding marks).

    A rank's clock is shifted, never stretched, to fit its marks best. The remaining difference contains both the spread
    of an all-reduce's end over ranks and the drift of clocks in the window.
    """
    first = recordings[0].marks
    begun = [recording.shifted(-recording.marks[0]) for recording in recordings]
    reference = [mark - first[0] for mark in first]
    shifts = [fmean(target - mark for target, mark in zip(reference, r.marks, strict=True)) for r in begun]
    shifted = [recording.shifted(by) for recording, by in zip(begun, shifts, strict=True)]
    left = (abs(a - b) for r in shifted for a, b in zip(reference, r.marks, strict=True))
    return shifted, max(left)


@dataclass(frozen=True)
class Measured:
    """The recorded steps of a job: for each step a timeline per pipeline group."""

    layout: Layout
    recordings: tuple[Recording, ...]
    clock_error_seconds: float
    steps: tuple[int, ...]
    timelines: tuple[tuple[tuple[Timeline, float], ...], ...]
    """By step and pipeline group: the timeline, and the time of its first action."""

    @classmethod
    def of(cls, schedule: Schedule, layout: Layout, recordings: Sequence[Recording]) -> Measured:
        """Timelines of the recordings by rank. Raises ValueError if a rank did not follow the schedule."""
        aligned, error = on_one_clock(recordings)
        numbers = tuple(step.step for step in aligned[0].steps)
        timelines = tuple(
            tuple(
                measured_timeline(schedule, [aligned[rank].steps[at] for rank in group])
                for group in pipeline_groups(layout)
            )
            for at in range(len(numbers))
        )
        return cls(layout, tuple(aligned), error, numbers, timelines)


def pipeline_groups(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that differ only along the pipeline axis, in its order."""
    return layout.groups("pipeline") if layout.size("pipeline") > 1 else tuple((rank,) for rank in range(layout.ranks))


def trace_spans(measured: Measured, predicted: Timeline | None) -> Iterator[Span]:
    """Spans of every rank's steps; the predicted pipeline ranks have the lowest numbers.

    A predicted step begins when the measured step begins.
    """
    above = measured.layout.size("pipeline") if predicted else 0
    for number, (step, timelines) in enumerate(zip(measured.steps, measured.timelines, strict=True)):
        if predicted is not None:
            yield from _later(predicted.spans(step), min(begun for _, begun in timelines))
        for group, (timeline, begun) in zip(pipeline_groups(measured.layout), timelines, strict=True):
            for span in _later(timeline.spans(step), begun):
                yield replace(span, rank=above + group[span.rank])
        for rank, recording in enumerate(measured.recordings):
            for span in recording.steps[number].spans:
                if span.lane in UNSCHEDULED_LANES:
                    yield replace(span, rank=above + rank)


def trace_names(layout: Layout, *, predicted: bool) -> dict[int, str]:
    """The name of every process of the trace."""
    pipeline = layout.size("pipeline")
    names = {rank: f"predicted: pipeline rank {rank}" for rank in range(pipeline if predicted else 0)}
    for rank in range(layout.ranks):
        coordinates = ", ".join(f"{axis} {number}" for axis, number in layout.coordinates(rank).items())
        names[len(names)] = f"measured: rank {rank} ({coordinates})"
    return names


def summary(measured: Measured, predicted: Timeline | None, why_not: str | None) -> dict[str, Any]:
    """Figures of the window: means over steps and pipeline groups, in seconds per step."""
    by_step = [_mean([figures(timeline) for timeline, _ in timelines]) for timelines in measured.timelines]
    everything = [timeline for timelines in measured.timelines for timeline, _ in timelines]
    by_rank = zip(*(timeline.compute_seconds for timeline in everything), strict=True)
    return {
        "steps": [measured.steps[0], measured.steps[-1]],
        "ranks": measured.layout.ranks,
        "clock_error_seconds": measured.clock_error_seconds,
        "measured": _mean(by_step),
        "predicted": figures(predicted) if predicted else None,
        "not_predicted": why_not,
        "compute_by_pipeline_rank": {
            "measured": [fmean(seconds) for seconds in by_rank],
            "predicted": list(predicted.compute_seconds) if predicted else None,
        },
        "by_step": [{"step": step, **means} for step, means in zip(measured.steps, by_step, strict=True)],
    }


def figures(timeline: Timeline) -> dict[str, float]:
    """The figures of a timeline, measured or predicted; `closing` is the gradient norm and the optimizer."""
    exposed = {f"exposed_{axis}": seconds for axis, seconds in timeline.exposed.items()}
    parts = {name: timeline.breakdown[name] for name in ("compute", "closing", "idle")}
    return {"step_seconds": timeline.step_seconds, "bubble": timeline.bubble, **parts, **exposed}


def table(summary: Mapping[str, Any]) -> str:
    """A summary as lines: measured and predicted."""
    measured, predicted = summary["measured"], summary["predicted"] or {}
    lines = [f"{'':22s}{'measured':>12s}" + (f"{'predicted':>12s}" if predicted else "")]
    for name, value in measured.items():
        beside = f"{_cell(name, predicted[name]):>12s}" if predicted else ""
        lines.append(f"  {_NAMES.get(name, name):20s}{_cell(name, value):>12s}{beside}")
    if summary["not_predicted"]:
        lines.append(f"  not predicted: {summary['not_predicted']}")
    return "\n".join(lines)


_NAMES = {
    "step_seconds": "step",
    "closing": "norm, optimizer",
    "exposed_pipeline": "exposed pipeline",
    "exposed_shard": "exposed shard",
    "exposed_replicate": "exposed replicate",
}


def _cell(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "bubble" else f"{value:.4f} s"


def _mean(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: fmean(record[key] for record in records) for key in records[0]}


def _later(spans: Iterable[Span], seconds: float) -> Iterator[Span]:
    return (replace(span, start=span.start + seconds) for span in spans)
