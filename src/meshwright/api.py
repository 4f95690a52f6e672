"""The public Python functions of Meshwright. They are stable within a minor version (docs/how-to/python.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from meshwright.events.messages import Checkpoint, FailureMessage, Message, StepMessage, Validation
from meshwright.spec.errors import ERROR_CLASS_BY_EXIT_CODE, EXIT_DONE, EXIT_PREEMPTED, BadInput, MeshwrightError
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

OnStep = Callable[[Mapping[str, Any]], object]
"""Called with the figures of a step, which are the keys of a step's line in metrics.jsonl."""
OnValidation = Callable[[int, float], object]
"""Called with the step and the validation loss in nats per token."""
OnCheckpoint = Callable[[int, Path], object]
"""Called with the step and the folder of a checkpoint that is durable."""


class StopTraining(Exception):
    """Raised by a callback to stop the run after the running step, with a checkpoint. `train` then returns normally."""


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`."""

    folder: Path
    """Folder of the run, with checkpoints/, metrics.jsonl, report.html and more."""
    finished: bool
    """Whether the last step was reached. False after `StopTraining`."""
    step: int
    """Last step of the run, counted from 1 over all its starts. 0 if there is none."""
    checkpoint: Path | None
    """Folder of the newest checkpoint; None if the run has none."""
    held_out_loss: float | None
    """Loss on held-out text after the last step, in nats per token. None without held-out text, or if the run did not finish."""


def load_run(
    file: str | PathLike[str] | None = None, overrides: Iterable[str] = (), *, runs: str | PathLike[str] = "runs"
) -> RunSpec:
    """Read a run from a run file and `KEY=VALUE` overrides, as the command line does.

    `runs` is the folder in which `model.init: checkpoint:NAME` looks for the run NAME. Raises BadConfig with every
    mistake.
    """
    from meshwright.config.load import load_run
    from meshwright.families.folder import folder_spec
    from meshwright.launch.machine import found_cluster

    path = None if file is None else Path(file)
    return load_run(path, list(overrides), runs=Path(runs), detect=found_cluster, model_reader=folder_spec)


def plan(run: RunSpec) -> Plan:
    """Return the plan that `train` would use, with predicted step time and memory. Needs no torch and no GPU.

    On one host, the plan may use fewer ranks than the cluster has devices, if that is faster or the only possibility.
    Raises BadInput for contradictory pins, and OutOfResources if no plan fits.
    """
    from meshwright.launch.prepare import on_used_devices, training_plan, with_vocabulary

    return training_plan(on_used_devices(with_vocabulary(run), _ignore_note), _ignore_note)


def _ignore_note(text: str) -> None:
    """Ignore a note."""


def train(
    run: RunSpec | str | PathLike[str],
    overrides: Iterable[str] = (),
    *,
    runs: str | PathLike[str] = "runs",
    fresh: bool = False,
    on_step: OnStep | None = None,
    on_validation: OnValidation | None = None,
    on_checkpoint: OnCheckpoint | None = None,
) -> TrainResult:
    """Train on this host's devices, or resume the run of this name, and return when it ends.

    - `run`: the result of `load_run`, or a run file that is read with `overrides`.
    - `runs`: folder that contains a folder for each run.
    - `fresh`: start a new run beside an earlier one of this name, as NAME-2, NAME-3 and so on.
    - `on_step(figures)`: called with the keys of a step's line in `metrics.jsonl`: `step`, `loss`, `tokens`,
      `tokens_per_second`, `lr` and more.
    - `on_validation(step, loss)`: called after a validation.
    - `on_checkpoint(step, folder)`: called once a checkpoint is durable.

    The ranks are processes of their own. Callbacks run in the calling thread, in the order of events. A slow callback
    does not slow the run down; if it falls far behind, steps are left out. If a callback raises an exception, the run
    stops after the running step, with a checkpoint. The exception is then raised here, except `StopTraining`.

    Raises the MeshwrightError that belongs to the run's exit code: BadInput, OutOfResources, Damaged,
    CommunicationFailure, NumericalFailure, Preempted, Interrupted.
    """
    from meshwright.launch.folder import renamed
    from meshwright.launch.job import run_job

    if not isinstance(run, RunSpec):
        run = load_run(run, overrides, runs=runs)
    elif list(overrides):
        raise BadInput("overrides are read with a run file: give them to load_run")
    runs_folder = Path(runs)
    run = renamed(run, runs_folder) if fresh else run
    failures: list[FailureMessage] = []

    def listen(rank: int, message: Message) -> None:
        if isinstance(message, FailureMessage):
            failures.append(message)
        elif isinstance(message, StepMessage) and message.figures and on_step:
            on_step({"step": message.step, **message.figures})
        elif isinstance(message, Validation) and on_validation:
            on_validation(message.step, message.loss)
        elif isinstance(message, Checkpoint) and on_checkpoint:
            on_checkpoint(message.step, Path(message.path))

    stopped = False
    try:
        code = run_job(run, runs_folder, listener=listen)
    except StopTraining:
        stopped = True
        code = EXIT_PREEMPTED
    if code != EXIT_DONE and not stopped:
        text = next((failure.message for failure in failures if failure.exit_code == code), f"exit code {code}")
        raise ERROR_CLASS_BY_EXIT_CODE.get(code, MeshwrightError)(text)
    return _result(run, runs_folder / run.name, finished=not stopped)


def _result(run: RunSpec, folder: Path, *, finished: bool) -> TrainResult:
    """Return the result of a run, from the files in its folder."""
    from meshwright.checkpoint.format.inventory import newest_step
    from meshwright.checkpoint.format.manifest import step_name
    from meshwright.observe.metrics import scan_metrics

    step = max((line["step"] for line in scan_metrics(folder / "metrics.jsonl")[0]), default=0)
    newest = newest_step(folder)
    summary = folder / "summary.json"
    loss = (
        json.loads(summary.read_text(encoding="utf-8")).get("held_out_loss") if finished and summary.exists() else None
    )
    return TrainResult(folder, finished, step, folder / "checkpoints" / step_name(newest) if newest else None, loss)
