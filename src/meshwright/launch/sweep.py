"""Trains the runs of a sweep, each in processes of its own. Runs train in parallel where devices are free.

If a sweep is started again, it continues with the runs that have not ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from meshwright.config.load import load_run
from meshwright.config.sweep_file import SweptRun, swept_runs
from meshwright.durable.writes import write_durable
from meshwright.families.folder import folder_spec
from meshwright.launch.folder import continues
from meshwright.launch.machine import found_cluster, visible_gpus
from meshwright.launch.prepare import with_vocabulary
from meshwright.launch.run_figures import RunFigureReader
from meshwright.launch.run_list import is_run, run_state
from meshwright.observe.metrics import scan_metrics
from meshwright.observe.report_charts import recent_mean
from meshwright.observe.runfolder import column
from meshwright.spec.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, BadConfig, BadInput
from meshwright.spec.host_limits import usable_cores
from meshwright.spec.run import RunSpec
from meshwright.spec.sweep import EarlyStop, SweepSpec

RECORD = "sweep.json"
"""File in a sweep's folder that records the runs that were stopped early."""
TRAIN = (sys.executable, "-m", "meshwright", "train")
"""The command that trains a run. The run file and its keys follow."""
POLL_SECONDS = 0.3
"""Seconds between two looks at the running processes."""
Outcome = Literal["finished", "stopped early", "stopped", "failed", "not started"]


@dataclass(eq=False)
class SweepRun:
    """A run of a sweep, and its state."""

    # `spec` is the run with the sweep's keys, `overrides` those keys as arguments. `why` is the reason of an early
    # stop.
    # `process` runs while the run trains, on `devices`. `exit_code` is the code of its last end.
    swept: SweptRun
    spec: RunSpec
    folder: Path
    overrides: list[str]
    outcome: Outcome = "not started"
    exit_code: int | None = None
    why: str = ""
    process: subprocess.Popen[bytes] | None = None
    devices: list[str] = field(default_factory=list)
    reader: RunFigureReader | None = None
    compared: set[int] = field(default_factory=set)
    """Steps of the rule for early stops at which this run has been compared with the others."""

    @property
    def name(self) -> str:
        return self.swept.name

    @property
    def log(self) -> Path:
        """File with the output of the run's command."""
        return self.folder.with_name(f"{self.name}.log")


class Sweep:
    """The runs of one sweep in `folder`. Runs of earlier starts have the outcome of those starts."""

    def __init__(self, spec: SweepSpec, file: Path, runs: Path) -> None:
        """`file` is the sweep file, and `runs` the folder of all runs.

        Raises BadConfig or BadInput if a run cannot be trained, or has begun with another configuration.
        """
        self.spec = spec
        self.folder = runs / spec.name
        self._base = file.parent / spec.run
        self._gpus = _gpus()
        self._cores = [f"core {number}" for number in range(usable_cores())]
        self.runs = [self._checked(swept, file) for swept in swept_runs(spec)]
        stopped = _read_record(self.folder)
        for run in self.runs:
            if run.name in stopped:
                run.outcome = "stopped early"
                run.why = stopped[run.name]
            elif is_run(run.folder):
                self._take_up(run)

    def _checked(self, swept: SweptRun, file: Path) -> SweepRun:
        """Return a run of the sweep, after reading its configuration. Raises BadInput if it cannot be trained on this host."""
        folder = self.folder / swept.name
        overrides = swept.overrides(self.spec)
        try:
            spec = load_run(
                self._base,
                [*overrides, f"name={swept.name}"],
                runs=self.folder,
                detect=found_cluster,
                model_reader=folder_spec,
            )
        except BadConfig as error:
            raise BadInput(f"{file}: run {swept.name}:\n{error}") from None
        if spec.cluster.nodes > 1:
            raise BadInput(
                f"{file}: run {swept.name}: cluster.nodes is {spec.cluster.nodes}; a sweep trains on one host"
            )
        if not spec.cluster.is_cpu and spec.cluster.gpus_per_node > len(self._gpus):
            raise BadInput(
                f"{file}: run {swept.name}: cluster.gpus_per_node is {spec.cluster.gpus_per_node}; this host has {len(self._gpus)} GPUs"
            )
        if spec.observe.wandb is not None and spec.observe.wandb.group is None:
            overrides.append(f"observe.wandb.group={json.dumps(self.spec.name)}")
        return SweepRun(swept, spec, folder, overrides)

    def _take_up(self, run: SweepRun) -> None:
        """Set the outcome of a run that an earlier start of the sweep has begun."""
        continues(with_vocabulary(run.spec), run.folder)
        figures = RunFigureReader(run.folder).read()
        state = run_state(run.folder, figures)
        if state in ("running", "waiting"):
            raise BadInput(f"{run.folder} is {state}; wait for it, or: meshwright runs stop {run.folder}")
        finished = state == "finished" and figures.step >= run.spec.train.steps
        run.outcome = "not started" if state == "failed" else "stopped"
        if finished:
            run.outcome = "finished"

    def train(self, note: Callable[[str], None], changed: Callable[[], object]) -> int:
        """Train the runs that have not ended, and return the exit code.

        `note` receives a sentence for each start and end of a run. `changed` is called when a run has ended. Ctrl-C or
        SIGTERM lets the runs save checkpoints and end; a second Ctrl-C kills them. A run that fails does not affect the
        others.
        """
        waiting = [run for run in self.runs if run.outcome in ("not started", "stopped")]
        ended = len(self.runs) - len(waiting)
        if ended:
            note(f"{ended} of {len(self.runs)} runs have ended already")
        going: list[SweepRun] = []
        with _stop_signals(going) as signals:
            while going or (waiting and not signals):
                while waiting and not signals and (devices := self._free(waiting[0], going)) is not None:
                    run = waiting.pop(0)
                    self._start(run, devices)
                    going.append(run)
                    note(f"{run.name}: started, run {self.runs.index(run) + 1} of {len(self.runs)}{_on(run)}")
                time.sleep(POLL_SECONDS)
                for run in [run for run in going if self._has_ended(run)]:
                    going.remove(run)
                    note(_end_line(run))
                    changed()
                if self.spec.stop_early is not None and not signals:
                    for run in going:
                        self._compare(run, self.spec.stop_early)
        if signals:
            return EXIT_INTERRUPTED if signals[0] == signal.SIGINT else EXIT_PREEMPTED
        return next((run.exit_code or 1 for run in self.runs if run.outcome == "failed"), EXIT_DONE)

    def _free(self, run: SweepRun, going: Sequence[SweepRun]) -> list[str] | None:
        """Return devices for a run that no other run uses; None if the run has to wait."""
        most = len(self.runs) if self.spec.parallel == "auto" else self.spec.parallel
        used = {device for other in going for device in other.devices}
        devices = self._cores if run.spec.cluster.is_cpu else self._gpus
        free = [device for device in devices if device not in used]
        # CPU ranks may be more than the cores, and share them.
        needed = min(run.spec.cluster.gpus_per_node, len(devices))
        return free[:needed] if len(going) < most and len(free) >= needed else None

    def _start(self, run: SweepRun, devices: list[str]) -> None:
        """Start the process that trains a run on `devices`. Its output goes into the run's log."""
        environment = dict(os.environ)
        if not run.spec.cluster.is_cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        elif self.spec.parallel != 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        command = [*TRAIN, str(self._base), *run.overrides, f"name={run.name}"]
        with run.log.open("ab") as log:
            # In a session of its own, so that Ctrl-C reaches only this process, which then tells the runs.
            run.process = subprocess.Popen(
                [*command, "--runs", str(self.folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run.devices = devices
        run.reader = RunFigureReader(run.folder)

    def _has_ended(self, run: SweepRun) -> bool:
        """Whether the process of a run has ended. If so, the outcome of the run is set."""
        assert run.process is not None, "it was started"
        code = run.process.poll()
        if code is None:
            return False
        run.exit_code = code
        run.process = None
        if code == EXIT_DONE:
            run.outcome = "finished"
        elif run.why and code == EXIT_PREEMPTED:
            run.outcome = "stopped early"
            _write_record(
                self.folder, {other.name: other.why for other in self.runs if other.outcome == "stopped early"}
            )
        else:
            run.outcome = "stopped" if code in (EXIT_PREEMPTED, EXIT_INTERRUPTED) else "failed"
        return True

    def _compare(self, run: SweepRun, rule: EarlyStop) -> None:
        """Stop a run whose loss, at a step of the rule, is above the median loss of the other runs at that step."""
        assert run.reader is not None and run.process is not None, "it was started"
        step = run.reader.read().step
        for place in rule.steps:
            if step < place or place in run.compared or place >= run.spec.train.steps:
                continue
            run.compared.add(place)
            losses = [
                loss for other in self.runs if other is not run and (loss := loss_at(other.folder, place)) is not None
            ]
            own = loss_at(run.folder, place)
            if own is not None and len(losses) >= rule.runs and own > median(losses):
                run.why = (
                    f"loss {own:.4f} at step {place}, above {median(losses):.4f}, the median of {len(losses)} runs"
                )
                with suppress(ProcessLookupError):
                    run.process.terminate()
                return


def loss_at(folder: Path, step: int) -> float | None:
    """Return the mean training loss of the ten steps up to `step`; None if the run has not reached that step."""
    file = folder / "metrics.jsonl"
    records = scan_metrics(file)[0] if file.exists() else []
    steps = [record for record in records if record.get("kind", "step") == "step"]
    if not steps or steps[-1]["step"] < step:
        return None
    return recent_mean(column([record for record in steps if record["step"] <= step], "loss"))


def _gpus() -> list[str]:
    """Return the names of this host's visible GPUs for CUDA_VISIBLE_DEVICES.

    CUDA ignores the names after the first one that is no GPU of the host.
    """
    count = visible_gpus()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(number) for number in range(count)])[:count]


def _on(run: SweepRun) -> str:
    return "" if run.spec.cluster.is_cpu else f", on GPU {', '.join(run.devices)}"


def _end_line(run: SweepRun) -> str:
    if run.outcome == "failed":
        return f"{run.name}: failed with code {run.exit_code}; {run.log} says why"
    return f"{run.name}: {run.outcome}{f': {run.why}' if run.why else ''}"


def _read_record(folder: Path) -> Mapping[str, str]:
    """Return the reasons of the runs that were stopped early, by name. Raises BadInput if the record is damaged."""
    try:
        values: Any = json.loads((folder / RECORD).read_text(encoding="utf-8"))["stopped_early"]
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"{folder / RECORD} is damaged ({error}); delete it, and runs that were stopped early go on"
        ) from None
    return values


def _write_record(folder: Path, stopped: Mapping[str, str]) -> None:
    write_durable(folder / RECORD, json.dumps({"stopped_early": stopped}, indent=1) + "\n")


@contextmanager
def _stop_signals(going: Sequence[SweepRun]) -> Iterator[list[int]]:
    """Handle SIGINT and SIGTERM during a `with` block: pass them on to the runs in `going`.

    Yields the signals received so far.

    The runs get SIGTERM, so that they save checkpoints; after a second SIGINT they are killed. If the block raises an
    exception, the runs get SIGTERM, and their end is awaited.
    """
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        received.append(number)
        at_once = received.count(signal.SIGINT) > 1
        for run in going:
            if run.process is not None:
                with suppress(ProcessLookupError):
                    if at_once:
                        os.killpg(run.process.pid, signal.SIGKILL)
                    else:
                        run.process.terminate()

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    except BaseException:
        receive(signal.SIGTERM, None)
        for run in going:
            if run.process is not None:
                run.process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
