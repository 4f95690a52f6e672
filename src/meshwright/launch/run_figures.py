"""Reads the figures of a run from the files in its folder: progress, speed, goodput, restarts.

It works during the run and after.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.checkpoint.format.manifest import has_commit, step_of, steps_in
from meshwright.launch.incidents import FOLDER as INCIDENTS
from meshwright.launch.progress_file import FILE as PROGRESS_FILE
from meshwright.launch.progress_file import JobProgress, read_progress
from meshwright.launch.state_file import STATE_FILE
from meshwright.observe.expert_load_table import ExpertLoadTable, expert_load_table
from meshwright.observe.goodput import RunGoodput, run_goodput
from meshwright.observe.metrics_tail import LineTail, MetricsTail
from meshwright.observe.wall_time import FILE as WALL_TIME
from meshwright.spec.batch_sizes import BatchSizes, BatchStage

FRESH_SECONDS = 15.0
"""A job counts as running while its `progress.json` is younger than this; without supervision, its `metrics.jsonl`."""


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run; None if they are unknown, or not known yet.

    Those without a description are values of the last step: `loss` in nats per token, `grad_norm` before clipping,
    `mfu` with causal attention. `tokens` counts since the run began.
    """

    name: str
    state: str
    """`starting`, `running`, the status of supervision, or how the run ended."""
    running: bool
    step: int
    steps: int | None
    """Number of steps of the whole run."""
    seconds_left: float | None
    """Seconds that the remaining steps will take, if they are as fast as the most recent steps."""
    step_seconds: float | None
    """Mean seconds of the most recent steps."""
    tokens: float | None
    tokens_per_second: float | None
    mfu: float | None
    loss: float | None
    validation_loss: float | None
    grad_norm: float | None
    wall_seconds: float | None
    """Seconds from the beginning of the first start to the last step or pause (`observe.goodput`)."""
    goodput: float | None
    """Share of the wall time that was spent in steps that count, 0 to 1."""
    checkpoint_step: int | None
    """Step of the newest committed checkpoint."""
    attempt: int
    restarts: int
    incidents: int
    exit_code: int | None
    """Exit code of the newest supervised job. None while it runs, if it was killed, and without supervision."""


class RunFigureReader:
    """Reads the figures of a run repeatedly. Each call reads only the lines that were added since the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = MetricsTail(folder / "metrics.jsonl")
        self._history = LineTail(folder / STATE_FILE)
        self._goodput = _GoodputReader(folder)
        self._jobs: dict[str, _Job] = {}
        self._train: tuple[float, dict[str, Any] | None] = (0.0, None)
        """Modification time of config.yaml, and its section `train`."""
        self.progress: JobProgress | None = None
        """The progress of the ranks at the last call of `read`; None if its file cannot be read."""

    def read(self, now: float | None = None) -> RunFigures:
        """Return the figures at the Unix time `now`, which is the present by default."""
        now = time.time() if now is None else now
        self._metrics.update()
        self._read_history()
        self.progress = read_progress(self._folder)
        job = next(reversed(self._jobs.values()), None)
        running = now - self._changed(PROGRESS_FILE if job else "metrics.jsonl") < FRESH_SECONDS
        metrics = self._metrics
        train = self._train_settings() or {}
        steps = train.get("steps")
        step = metrics.newest.get("step", 0)
        running &= step != steps if job is None else job.code is None
        breakdown = self._goodput.read()
        pace = metrics.recent_step_seconds
        return RunFigures(
            name=self._folder.resolve().name,
            state=_state(job, running, step, steps),
            running=running,
            step=step,
            steps=steps,
            seconds_left=None
            if steps is None or pace is None
            else pace * _steps_left(train, step, metrics.recent_steps),
            step_seconds=pace,
            tokens=metrics.number("tokens"),
            tokens_per_second=metrics.number("tokens_per_second"),
            mfu=metrics.number("mfu"),
            loss=metrics.number("loss"),
            validation_loss=metrics.validation_loss,
            grad_norm=metrics.number("grad_norm"),
            wall_seconds=breakdown.wall_seconds if breakdown else None,
            goodput=breakdown.goodput if breakdown else None,
            checkpoint_step=_newest_checkpoint(self._folder / "checkpoints"),
            attempt=job.attempt if job else 0,
            restarts=sum(max(0, len(job.attempts) - 1) for job in self._jobs.values()),
            incidents=_newest_incident(self._folder / INCIDENTS),
            exit_code=job.code if job else None,
        )

    @property
    def expert_loads(self) -> ExpertLoadTable | None:
        """The loads of the experts at the last call of `read`; None for a model without experts."""
        return expert_load_table(list(self._metrics.with_loads))

    def _read_history(self) -> None:
        """Read the states that supervision has recorded since the last call, by job."""
        records, anew = self._history.read()
        if anew:
            self._jobs.clear()
        for record in records:
            self._jobs.setdefault(str(record.get("job", "")), _Job()).add(record)

    def _train_settings(self) -> dict[str, Any] | None:
        """Return the section `train` of the resolved configuration; None if it has no number of steps."""
        changed = self._changed("config.yaml")
        if changed != self._train[0]:
            try:
                train = yaml.safe_load((self._folder / "config.yaml").read_text(encoding="utf-8"))["train"]
                self._train = changed, train if isinstance(train["steps"], int) else None
            except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
                self._train = changed, None
        return self._train[1]

    def _changed(self, name: str) -> float:
        """Return the Unix time of a file's last change; 0 if there is no such file."""
        try:
            return (self._folder / name).stat().st_mtime
        except OSError:
            return 0.0


def _steps_left(train: Mapping[str, Any], step: int, recent: int) -> float:
    """Return the number of remaining steps, weighted by their batch sizes.

    A remaining step whose batch is twice as large as the mean of the `recent` newest steps counts as two.
    """
    left = max(0, train["steps"] - step)
    try:
        sizes = BatchSizes(train["global_batch"], [BatchStage(**stage) for stage in train["batch_ramp"]])
        size = (sizes.samples_before(step) - sizes.samples_before(max(0, step - recent))) / min(recent, step)
        return (sizes.samples_before(step + left) - sizes.samples_before(step)) / size
    except (KeyError, TypeError, ZeroDivisionError):  # someone has edited the configuration
        return left


class _GoodputReader:
    """Reads the goodput of a run again when its file has changed, but spends at most about a tenth of the time on reading."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_size = -1
        self._due = 0.0
        self._breakdown: RunGoodput | None = None

    def read(self) -> RunGoodput | None:
        """Return the newest breakdown of the wall time; None if its file cannot be read."""
        began = time.monotonic()
        try:
            size = (self._folder / WALL_TIME).stat().st_size
            if size != self._read_size and began >= self._due:
                self._breakdown = run_goodput(self._folder)
                self._read_size = size
                self._due = time.monotonic() + 10 * (time.monotonic() - began)
        except OSError:
            self._breakdown = None
        return self._breakdown


class _Job:
    """The state of a job according to its records in supervision.jsonl."""

    def __init__(self) -> None:
        self.attempt = 0
        self.status = ""
        self.code: int | None = None
        self.attempts: set[int] = set()

    def add(self, record: Mapping[str, Any]) -> None:
        """Update the state from one record."""
        stop = record.get("stop")
        self.attempt = int(record.get("attempt") or 0)
        self.status = str(record.get("status"))
        if self.status == "running":
            self.attempts.add(self.attempt)
        finished = self.status == "finished" and isinstance(stop, Mapping)
        self.code = stop.get("code") if finished else None  # pyrefly: ignore


def _state(job: _Job | None, running: bool, step: int, steps: int | None) -> str:
    """Return the state of a run in words; see `RunFigures.state`."""
    if job is not None and job.code is not None:
        return "finished" if job.code == 0 else f"ended with code {job.code}"
    if running:
        status = job.status if job else "running"
        return "starting" if not step and status == "running" else status
    if step and step == steps:
        return "finished"
    return "not running" if job or step else "starting"


def _newest_incident(folder: Path) -> int:
    """Return the number of the newest incident, which also counts incidents whose folders were removed; 0 without any."""
    numbers = (path.name.partition("-")[0] for path in folder.glob("[0-9]*-*"))
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _newest_checkpoint(folder: Path) -> int | None:
    return next((step_of(path.name) for path in reversed(steps_in(folder)) if has_commit(path)), None)
