"""Makes the timeline files of a job: recordings of all ranks on one clock, a trace with the predicted step, and a summary."""

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
"""Name of a mark that every rank sets right after an all-reduce over all ranks, which is nearly the same moment on all
ranks.
"""
UNSCHEDULED_LANES = ("step", "mark", "offload", "fetch")
"""Lanes without actions of the schedule: waits for data, marks, and copies to and from host memory."""


@dataclass(frozen=True)
class Recording:
    """The recorded steps of one rank, and the times in seconds of its marks `ALIGNED`."""

    steps: tuple[StepSpans, ...]
    marks: tuple[float, ...]

    @classmethod
    def of(cls, recorded: Iterable[StepSpans]) -> Recording:
        """Return the recording of what `StepRecorder.take` returned. Of spans between steps (step 0), only marks are kept."""
        recorded = tuple(recorded)
        marks = (span.start for step in recorded for span in step.spans if span.lane == "mark" and span.name == ALIGNED)
        return cls(tuple(step for step in recorded if step.step > 0), tuple(marks))

    def shifted(self, seconds: float) -> Recording:
        steps = (
            replace(step, start=step.start + seconds, spans=tuple(_shifted_spans(step.spans, seconds)))
            for step in self.steps
        )
        return Recording(tuple(steps), tuple(mark + seconds for mark in self.marks))

    def to_bytes(self) -> bytes:
        """Return the recording as compressed JSON, to send it to another rank."""
        return gzip.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Recording:
        fields = json.loads(gzip.decompress(data))
        steps = (
            StepSpans(step["step"], step["start"], step["seconds"], tuple(Span(**span) for span in step["spans"]))
            for step in fields["steps"]
        )
        return cls(tuple(steps), tuple(fields["marks"]))


def on_one_clock(recordings: Sequence[Recording]) -> tuple[list[Recording], float]:
    """Return (recordings on rank 0's clock, with its first mark at 0; largest remaining difference between marks in
    seconds).

    `recordings` has one entry for each rank. Each rank's clock is shifted, never stretched, so that its marks fit best.
    The remaining difference has two causes: an all-reduce ends at slightly different times on the ranks, and clocks
    drift.
    """
    first_marks = recordings[0].marks
    from_first_mark = [recording.shifted(-recording.marks[0]) for recording in recordings]
    reference = [mark - first_marks[0] for mark in first_marks]
    shifts = [
        fmean(target - mark for target, mark in zip(reference, recording.marks, strict=True))
        for recording in from_first_mark
    ]
    shifted = [recording.shifted(shift) for recording, shift in zip(from_first_mark, shifts, strict=True)]
    differences = (
        abs(target - mark) for recording in shifted for target, mark in zip(reference, recording.marks, strict=True)
    )
    return shifted, max(differences)


@dataclass(frozen=True)
class RecordedSteps:
    """The recorded steps of a job, with one timeline for each step and pipeline group."""

    layout: Layout
    recordings: tuple[Recording, ...]
    clock_error_seconds: float
    steps: tuple[int, ...]
    timelines: tuple[tuple[tuple[Timeline, float], ...], ...]
    """[step][pipeline group]: (timeline, time of its first action in seconds)."""

    @classmethod
    def of(cls, schedule: Schedule, layout: Layout, recordings: Sequence[Recording]) -> RecordedSteps:
        """Make the timelines from the recordings of all ranks. Raises ValueError if a rank did not follow the schedule."""
        aligned, error = on_one_clock(recordings)
        numbers = tuple(step.step for step in aligned[0].steps)
        timelines = tuple(
            tuple(
                measured_timeline(schedule, [aligned[rank].steps[index] for rank in group])
                for group in pipeline_groups(layout)
            )
            for index in range(len(numbers))
        )
        return cls(layout, tuple(aligned), error, numbers, timelines)


def pipeline_groups(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ only in their pipeline coordinate, each in the order of that coordinate."""
    return layout.groups("pipeline") if layout.size("pipeline") > 1 else tuple((rank,) for rank in range(layout.ranks))


def trace_spans(measured: RecordedSteps, predicted: Timeline | None) -> Iterator[Span]:
    """Yield the spans of every rank's steps for the trace.

    The predicted pipeline ranks come first in the numbering. A predicted step begins at the time of the measured one.
    """
    first_rank = measured.layout.size("pipeline") if predicted else 0
    for number, (step, timelines) in enumerate(zip(measured.steps, measured.timelines, strict=True)):
        if predicted is not None:
            yield from _shifted_spans(predicted.spans(step), min(start for _, start in timelines))
        for group, (timeline, start) in zip(pipeline_groups(measured.layout), timelines, strict=True):
            for span in _shifted_spans(timeline.spans(step), start):
                yield replace(span, rank=first_rank + group[span.rank])
        for rank, recording in enumerate(measured.recordings):
            for span in recording.steps[number].spans:
                if span.lane in UNSCHEDULED_LANES:
                    yield replace(span, rank=first_rank + rank)


def trace_names(layout: Layout, *, predicted: bool) -> dict[int, str]:
    """Return the name of each process of the trace, by its number."""
    pipeline = layout.size("pipeline")
    names = {rank: f"predicted: pipeline rank {rank}" for rank in range(pipeline if predicted else 0)}
    for rank in range(layout.ranks):
        coordinates = ", ".join(f"{axis} {number}" for axis, number in layout.coordinates(rank).items())
        names[len(names)] = f"measured: rank {rank} ({coordinates})"
    return names


def summary(measured: RecordedSteps, predicted: Timeline | None, not_predicted_because: str | None) -> dict[str, Any]:
    """Return the figures of the recorded steps: means over steps and pipeline groups, in seconds per step.

    `predicted` is the simulated step; if there is none, `not_predicted_because` says why.
    """
    by_step = [_mean_figures([figures(timeline) for timeline, _ in timelines]) for timelines in measured.timelines]
    all_timelines = [timeline for timelines in measured.timelines for timeline, _ in timelines]
    by_rank = zip(*(timeline.compute_seconds for timeline in all_timelines), strict=True)
    return {
        "steps": [measured.steps[0], measured.steps[-1]],
        "ranks": measured.layout.ranks,
        "clock_error_seconds": measured.clock_error_seconds,
        "measured": _mean_figures(by_step),
        "predicted": figures(predicted) if predicted else None,
        "not_predicted": not_predicted_because,
        "compute_by_pipeline_rank": {
            "measured": [fmean(seconds) for seconds in by_rank],
            "predicted": list(predicted.compute_seconds) if predicted else None,
        },
        "by_step": [{"step": step, **means} for step, means in zip(measured.steps, by_step, strict=True)],
    }


def figures(timeline: Timeline) -> dict[str, float]:
    """Return the figures of a measured or predicted timeline. `closing` is the time of gradient norm and optimizer."""
    exposed = {f"exposed_{axis}": seconds for axis, seconds in timeline.exposed.items()}
    parts = {name: timeline.breakdown[name] for name in ("compute", "closing", "idle")}
    return {"step_seconds": timeline.step_seconds, "bubble": timeline.bubble, **parts, **exposed}


def table(summary: Mapping[str, Any]) -> str:
    """Return a summary as lines of text, with columns for measured and predicted figures."""
    measured = summary["measured"]
    predicted = summary["predicted"] or {}
    lines = [f"{'':22s}{'measured':>12s}" + (f"{'predicted':>12s}" if predicted else "")]
    for name, value in measured.items():
        predicted_text = f"{_figure_text(name, predicted[name]):>12s}" if predicted else ""
        lines.append(f"  {_NAMES.get(name, name):20s}{_figure_text(name, value):>12s}{predicted_text}")
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


def _figure_text(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "bubble" else f"{value:.4f} s"


def _mean_figures(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: fmean(record[key] for record in records) for key in records[0]}


def _shifted_spans(spans: Iterable[Span], seconds: float) -> Iterator[Span]:
    return (replace(span, start=span.start + seconds) for span in spans)
