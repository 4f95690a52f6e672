"""`train --timeline A:B`: writes the actions of every rank in steps A to B, and the predicted ones, as one trace and a summary."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshwright.durable.writes import write_durable
from meshwright.observe.timeline_files import (
    ALIGNED,
    RecordedSteps,
    Recording,
    summary,
    table,
    trace_names,
    trace_spans,
)
from meshwright.parallel.world import World
from meshwright.simulator.picture import draw_within
from meshwright.simulator.trace import write_spans
from meshwright.spec.errors import BadInput
from meshwright.training.reporting import Reporter
from meshwright.training.session import TrainingSession

log = logging.getLogger("meshwright")

ALIGNMENT_REDUCES = 2
"""Number of all-reduces before an alignment mark. The first synchronises the ranks; the second ends on all ranks at nearly one time."""


class StepTimelines:
    """Records the steps of a range in detail; after the last of them rank 0 writes them to a file. Collective over all ranks.

    Raises BadInput if the session begins inside or after the range.
    """

    def __init__(self, session: TrainingSession, reporter: Reporter) -> None:
        self._session = session
        self._reporter = reporter
        self._first, self._last = session.timeline or (0, 0)
        if self._last and session.step >= self._first:
            raise BadInput(
                f"--timeline {self._first}:{self._last}: the run goes on after step {session.step}; choose steps from "
                f"{session.step + 1} to {session.run.train.steps}, or start anew with --fresh"
            )
        self.summary: Mapping[str, Any] | None = None
        """Figures of the recorded steps, on rank 0, once the last of them has ended; None before."""
        self.end_step(session.step)

    def writes_after(self, step: int) -> bool:
        """Whether the timeline is written after `step`."""
        return step == self._last > 0

    def end_step(self, step: int) -> bool:
        """Call it at the end of `step`, and once before the first step. Returns True if a timeline was written, which takes time."""
        if step + 1 == self._first:
            self._session.recorder.detail = True
            self._align()
        if not self.writes_after(step):
            return False
        self._align()
        self._session.recorder.detail = False
        self._session.recorder.wait()
        recording = Recording.of(self._session.recorder.take())
        everyone = gather_bytes(self._session.world, recording.to_bytes())
        if self._session.world.leads:
            try:
                self._write([Recording.from_bytes(data) for data in everyone])
            except (OSError, ValueError) as error:  # a failed timeline must not end the run
                log.warning("no timeline of steps %d to %d: %s", self._first, self._last, error)
        return True

    def _align(self) -> None:
        for _ in range(ALIGNMENT_REDUCES):
            self._session.mesh.sum_over_all(torch.zeros(1, device=self._session.world.device))
        self._session.recorder.mark(ALIGNED)

    def _write(self, recordings: list[Recording]) -> None:
        session = self._session
        layout = self._session.mesh.layout
        measured = RecordedSteps.of(session.engine.training, layout, recordings)
        # Imported here: runs without a timeline do not need simulator and cost model.
        from meshwright.simulator.predicted_step import predicted_step

        predicted, why_not = predicted_step(session.run, session.plan)
        folder = session.folder / "timelines"
        folder.mkdir(exist_ok=True)
        file = folder / f"steps-{self._first}-{self._last}.json.gz"
        write_spans(trace_spans(measured, predicted), file, trace_names(layout, predicted=predicted is not None))
        self.summary = result = summary(measured, predicted, why_not)
        write_durable(file.with_name(f"steps-{self._first}-{self._last}.summary.json"), json.dumps(result, indent=1))
        self._reporter.event(session.step, f"timeline of steps {self._first} to {self._last}: {file}")
        self._reporter.say(table(result))
        for title, timeline in (("measured", measured.timelines[0][0][0]), ("predicted", predicted)):
            picture = draw_within(timeline, shutil.get_terminal_size().columns) if timeline else None
            if picture is not None:
                self._reporter.say(f"{title}\n{picture}")


def gather_bytes(world: World, data: bytes) -> list[bytes]:
    """Gather the bytes of every rank on rank 0 and return them there, by rank; empty on other ranks. Collective over the control group."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.ranks)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=world.control)
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(world.ranks)] if world.leads else None
    dist.gather(padded, gathered, dst=0, group=world.control)
    return [bytes(part[: int(size)].numpy()) for part, size in zip(gathered or [], sizes, strict=False)]
