"""Reports the progress of a run: on the terminal, in metrics.jsonl, and to optional sinks. Only rank 0 has these."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.events.messages import (
    Checkpoint,
    Corruption,
    MessageChannel,
    SkippedSamplesMessage,
    StepMessage,
    Validation,
)
from meshwright.events.start import StartClock, start_line
from meshwright.observe.compiling import compiler_work
from meshwright.observe.metrics import STEP_KEYS, MetricsWriter
from meshwright.observe.prediction_check import PredictionCheck
from meshwright.observe.run_progress import RunProgress
from meshwright.observe.sinks import SinkThread, open_sinks
from meshwright.observe.wall_time import FILE, Pause, WallTimeWriter
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.fields import to_plain
from meshwright.training.evaluate import Evaluation
from meshwright.training.session import TrainingSession

log = logging.getLogger("meshwright")

LOG_SECONDS = 60.0
"""Least time between two step lines in a rank's log, seconds."""


class Reporter:
    """Passes records to the metrics file, the terminal and the sinks. On other ranks than the first it only informs the launcher."""

    def __init__(
        self,
        metrics: MetricsWriter | None,
        progress: RunProgress | None,
        sinks: SinkThread | None,
        start: StartClock | None = None,
        channel: MessageChannel | None = None,
        wall_time: WallTimeWriter | None = None,
    ) -> None:
        self._wall_time = wall_time
        self._last_step = 0
        self._metrics = metrics
        self._progress = progress
        self._sinks = sinks
        self._start = start
        self._channel = channel or MessageChannel(None)
        self._leads = metrics is not None
        self.failure: MeshwrightError | None = None
        """The error because of which this rank can no longer report about the run; None without one."""
        self._logged_at = -LOG_SECONDS

    @classmethod
    def open(cls, session: TrainingSession, channel: MessageChannel | None = None) -> Reporter:
        if not session.world.leads:
            return cls(None, None, None, channel=channel)
        run = session.run
        show_mfu = run.cluster.peak_flops(session.plan.precision.compute) is not None
        metrics = MetricsWriter(session.folder / "metrics.jsonl", session.step, session.lease)
        progress = RunProgress(
            run.train.steps,
            session.step,
            session.world.ranks,
            samples_before=run.train.batches.samples_before,
            show_mfu=show_mfu,
            title=run.name,
            began=session.start.start_time,
        )
        sinks = open_sinks(run.observe, session.folder, to_plain(run), log.warning, resume_from=session.step)
        wall_time = WallTimeWriter(session.folder / FILE)
        return cls(metrics, progress, sinks, session.start, channel, wall_time)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Store a disk error in the block as `failure`. All ranks then end after the step, with a checkpoint if the disk has space."""
        try:
            yield
        except (OSError, MeshwrightError) as error:
            self.failure = self.failure or as_meshwright_error(error)

    @property
    def channel_descriptors(self) -> list[int]:
        """The file descriptor of the pipe to the launcher, if there is one. The launcher waits while any process has it open."""
        return self._channel.descriptors

    def fail(self, failure: MeshwrightError) -> None:
        """End the run after the step, on all ranks, because of a failure that did not happen in this rank's reports."""
        self.failure = self.failure or failure

    def check(self) -> None:
        """Raise the stored failure, if there is one."""
        if self.failure:
            raise self.failure

    def step(self, record: dict[str, Any]) -> None:
        """Report a finished step."""
        figures = {key: record[key] for key in STEP_KEYS if key != "step"} if self._leads else {}
        self._channel.send(StepMessage(record["step"], figures))
        self._log_step(record)
        if self._metrics:
            with self.writing():
                self._metrics.write_step(record)
        if self._wall_time:
            self._record_time(self._wall_time, record)
        self._show(record)
        if self._start:
            self._say_start(self._start, record)
            self._start = None

    def _record_time(self, wall_time: WallTimeWriter, record: dict[str, Any]) -> None:
        """Write when the step ended. For the first step also write how long the start took."""
        step = record["step"]
        seconds = record["step_seconds"]
        if self._start:
            wall_time.start(step - 1, sum(self._start.phases.values()) + seconds, seconds)
        samples = "rollout_seconds" in record  # producing the batch is then part of the run's work and no wait
        data_seconds = 0.0 if samples else record.get("phases", {}).get("data", record["data_wait_seconds"])
        wall_time.step(step, data_seconds, skipped=bool(record.get("update_skipped")))
        self._last_step = step

    @contextmanager
    def pause(self, activity: Pause, session: TrainingSession) -> Iterator[None]:
        """Record the time of a `with` block in which the session does not train."""
        began = time.monotonic()
        try:
            yield
        finally:
            if self._wall_time:
                self._wall_time.pause(activity, session.step, time.monotonic() - began)

    def _log_step(self, record: dict[str, Any]) -> None:
        """Write a line to the rank's log at most every `LOG_SECONDS`; metrics.jsonl has every step."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            log.debug("step %d, loss %s, %.3g s", record["step"], record["loss"], record["step_seconds"])

    def _say_start(self, clock: StartClock, first: dict[str, Any]) -> None:
        """Report how long the start took. It ends with the step `first`."""
        waited = first["data_wait_seconds"]
        clock.add("first batch", waited)
        clock.add("first step", first["step_seconds"] - waited)
        work = compiler_work()
        if self._metrics:
            with self.writing():
                self._metrics.write_start(first["step"] - 1, clock.phases, work)
        self.say(start_line(clock.phases, work))

    def validation(self, step: int, result: Evaluation) -> None:
        """Report a validation after `step`."""
        more: dict[str, Any] = {"tokens": result.tokens, **result.preferences}
        if not result.preferences:
            more |= {"perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
        more |= {"by_source": result.by_source} if result.by_source else {}
        more |= {"bits_per_byte_by_source": result.bits_by_source} if result.bits_by_source else {}
        if self._metrics:
            with self.writing():
                self._metrics.write_validation(step, result.loss, **more)
            self._channel.send(Validation(step, result.loss))
        self._show({"kind": "validation", "step": step, "loss": result.loss, **more})

    def event(self, step: int, text: str) -> None:
        """Report an event after `step`, as a line for people and in the metrics."""
        log.info("%s", text)
        if self._metrics:
            with self.writing():
                self._metrics.write_event(step, text)
        if self._progress:
            self._progress.note(text)

    def answers(self, step: int, details: Mapping[str, Any]) -> None:
        """Record some answers of a step with `rl` for people to read, and the lengths of all its answers."""
        if self._metrics:
            with self.writing():
                self._metrics.write_answers(step, details)

    def checkpoint(self, step: int, path: Path, text: str) -> None:
        """Report that the checkpoint of `step` is durable."""
        self.event(step, text)
        self.sync()
        if self._leads:
            self._channel.send(Checkpoint(step, str(path)))

    def sync(self, *, waits: bool = False) -> None:
        """Start to flush the lines of the metrics to the disk; with `waits` return only when they are on the disk."""
        if self._metrics:
            self._metrics.sync(waits=waits)

    def skip_samples(self, first: int, end: int) -> None:
        """Report to the launcher that the run leaves out these samples from now on, so that a restart leaves them out too."""
        if self._leads:
            self._channel.send(SkippedSamplesMessage(first, end))

    def corruption(self, rank: int, step: int, cause: str) -> None:
        """Report that the state of `rank` was corrupt after `step`. Its host is then tested before the next attempt."""
        if self._leads:
            self._channel.send(Corruption(rank, step, cause))

    def rewind(self, step: int) -> None:
        """Remove the records after `step`, because the run continues from this step again."""
        if self._metrics:
            with self.writing():
                self._metrics.rewind(step)

    def prediction_check(self, step: int, comparison: PredictionCheck, lines: Sequence[str]) -> None:
        """Report the comparison with the prediction after `step`: print `lines` for people and write the figures to the metrics."""
        if self._metrics:
            with self.writing():
                self._metrics.write_check(step, to_plain(comparison))
        self.say("\n".join(lines))

    def say(self, text: str) -> None:
        """Print lines for people, and log them."""
        log.info("%s", text)
        if self._progress:
            self._progress.note(text)

    def _show(self, record: dict[str, Any]) -> None:
        if self._progress:
            self._progress.update(record)
        if self._sinks:
            self._sinks.put(record)

    def close(self) -> None:
        """Close the display, deliver pending records to the sinks, and close the files. A second call does nothing."""
        for target in (self._progress, self._sinks, self._metrics):
            if target is not None:
                target.close()
        if self._wall_time:
            self._wall_time.end(self._last_step)
        self._metrics = self._progress = self._sinks = self._wall_time = None
