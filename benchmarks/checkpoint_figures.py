"""Figures of runs that save checkpoints: the stall, slower steps beside saves, and predictions beside measurements.

The same definitions hold for our runs and for torchtitan's. A step is beside a save if any part of it lies between the begin of the save
and its end (for ours the commit; for torchtitan the message of its writer process). `stall_seconds` has, for each save, the longest step
beside it minus the median of the steps without a save. `beside_percent` compares the means. The first `WARM_STEPS` steps are ignored.
"""

from __future__ import annotations

import os
import re
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

from sides import titan_steps

from meshwright.config.load import load_plan, load_resolved
from meshwright.planner.checkpoint_cost import SaveRates, checkpoint_cost

Line = dict[str, Any]
WARM_STEPS = 6
"""First steps of a run, which are ignored."""
WATCH_SECONDS = 0.5
"""Time between two looks at the memory of snapshot buffers."""


def our_save_figures(records: list[Line], save_interval: int, mode: str) -> Line:
    """Figures of one run of ours from its metrics.

    In a run folder's metrics the event of a committed checkpoint follows the steps that ran during its save.
    """
    without_save: list[float] = []
    beside: list[list[float]] = []
    saves: list[Line] = []
    save_step, steps_since_save = 0, []
    for record in records:
        if record["kind"] == "step" and record["step"] > WARM_STEPS:
            in_flight = mode == "async" and save_step and record["step"] > save_step
            (steps_since_save if in_flight else without_save).append(record["step_seconds"])
            if record["step"] % save_interval == 0 and not save_step:
                save_step = record["step"]
        elif record["kind"] == "event" and record["text"].startswith("checkpoint step-"):
            saves.append({"step": save_step} | _phases(record["text"]))
            beside.append(steps_since_save)
            save_step, steps_since_save = 0, []
    if steps_since_save:  # the run ended before the commit
        saves.append({"step": save_step, "committed": False})
        beside.append(steps_since_save)
    steps = [record for record in records if record["kind"] == "step"]
    line = {
        **_step_figures(without_save, beside, saves),
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        "step_seconds": [round(record["step_seconds"], 4) for record in steps],
    }
    if mode == "sync":
        return line | {"stall_seconds": [save.get("waited") for save in saves]}
    return line


def _phases(text: str) -> Line:
    """The figures in a checkpoint's line: `… 14,832 MB in 9.1 s`, or `… beside training (seconds: staging 0.31, …)`."""
    megabytes = float(text.split(": ", 1)[1].split(" MB")[0].replace(",", ""))
    if "seconds: " not in text:
        return {"megabytes": megabytes, "waited": float(text.rpartition(" in ")[2].split()[0])}
    phases = text.partition("seconds: ")[2].partition(")")[0].split(", ")
    return {"megabytes": megabytes, **{phase.split()[0]: float(phase.split()[1]) for phase in phases}}


def _step_figures(without_save: list[float], beside: list[list[float]], saves: list[Line]) -> Line:
    """Figures from the seconds of steps without a save and of the steps beside each of `saves`, in order."""
    median = statistics.median(without_save)
    copying = [steps[0] for steps in beside if steps]
    writing = [seconds for steps in beside for seconds in steps[1:]]
    for save, steps in zip(saves, beside, strict=True):
        save |= {"longest": max(steps, default=None), "steps": len(steps)}
    return {
        "steps": len(without_save),
        "median_step_seconds": median,
        "saves": saves,
        "stall_seconds": [round(max(steps) - median, 5) for steps in beside if steps],
        "beside_percent": _slower_percent(copying + writing, without_save),
        "copy_step_percent": _slower_percent(copying, without_save),
        "writing_percent": _slower_percent(writing, without_save),
        "mean_step_free": statistics.mean(without_save),
        "mean_step_beside": statistics.mean(copying + writing) if copying else None,
    }


def _slower_percent(steps: list[float], without_save: list[float]) -> float | None:
    """How much longer the mean of `steps` is than that of the steps without a save; None if there are none."""
    return round(100 * (statistics.mean(steps) / statistics.mean(without_save) - 1), 3) if steps else None


@dataclass
class PeerSave:
    """A save in torchtitan's log, times in seconds: its begin, the end of its copies to host memory, and its end."""

    step: int
    begin: float
    staged: float | None = None
    end: float | None = None
    call: float | None = None
    """Duration of the call that begins it, which waits for the save before; None for the save after the last step."""
    beside: list[float] = field(default_factory=list)
    """Seconds of the steps beside it."""


def peer_save_figures(log: str, tokens: int) -> Line:
    """Figures of one torchtitan run of `tokens` tokens per step and GPU, from its log with a line for every step.

    torchtitan begins a save after it prints a step's line, so the seconds of the next step contain what blocks training. The seconds of a
    step are its tokens over the printed rate. A step that is beside two saves counts for the later. Raises ValueError if the log has too
    few steps.
    """
    steps, ends = titan_steps(log), dict(_line_times(log, r"step: +(\d+) .*loss: "))
    saves = _peer_saves(log, ends)
    without_save: list[float] = []
    for step in steps:
        if step.step <= WARM_STEPS:
            continue
        save = next((save for save in reversed(saves) if save.step < step.step), None)
        in_flight = save is not None and (save.end is None or ends.get(step.step - 1, ends[step.step]) < save.end)
        (save.beside if save is not None and in_flight else without_save).append(tokens / step.rate)
    if not without_save:
        raise ValueError(f"{len(steps)} steps, none of them after step {WARM_STEPS} without a save")
    saves = [save for save in saves if save.step < steps[-1].step]  # the save after the last step has no step beside it
    return {
        **_step_figures(without_save, [save.beside for save in saves], [_peer_save_line(save) for save in saves]),
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
        "step_seconds": [round(tokens / step.rate, 4) for step in steps],
        "memory_reserved_peak_gib": max(step.memory_gib for step in steps),
    }


def _peer_saves(log: str, step_ends: dict[int, float]) -> list[PeerSave]:
    begins = [time for _, time in _line_times(log, r"(Saving) the checkpoint \(or staging")]
    staged = dict(_line_times(log, r"Received async checkpoint request with id=\S*step-(\d+)"))
    ends = dict(_line_times(log, r"Completed checkpoint save request for checkpoint_id=.*step-(\d+)"))
    calls = [float(seconds) for seconds in re.findall(r"Finished saving the checkpoint .*in ([\d.]+) seconds", log)]
    saves = []
    for begin, call in zip_longest(begins, calls[: len(begins)]):
        step = max(step for step, time in step_ends.items() if time <= begin)
        saves.append(PeerSave(step, begin, staged.get(step), ends.get(step), call))
    return saves


def _peer_save_line(save: PeerSave) -> Line:
    """`staging` contains the start of the writer process in the first save."""
    line: Line = {"step": save.step, "call": save.call}
    if save.staged is not None:
        line["staging"] = round(save.staged - save.begin, 3)
    if save.staged is None or save.end is None:
        return line | {"committed": False}
    return line | {"writing": round(save.end - save.staged, 3)}


def _line_times(log: str, pattern: str) -> Iterator[tuple[int, float]]:
    """The number in the pattern's group (0 for a word) and the time in seconds of each line of the log that matches."""
    stamp = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - .*?"
    for match in re.finditer(stamp + pattern, log):
        time = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        yield int(match[2]) if match[2].isdigit() else 0, time


def predictions(folder: Path, line: Line, rates: SaveRates, host_bytes: int | None) -> Line:
    """Return the predicted saves of the run in `folder` with `rates`, beside the measurements of `line`.

    `relative_error` is predicted / measured - 1; that of the stall is the difference as a share of the median step, as no stall is a usual
    prediction. The stall is the longest of all saves, other figures are means over committed saves. The prediction takes the plan's step
    time, or the measured median where the plan has none (CPU ranks without a profile). `host_bytes` is the measured memory of snapshots.
    """
    run = load_resolved(folder / "config.yaml")
    plan = load_plan(folder / "plan.yaml", run.cluster)
    known = plan.predicted.step_seconds if plan.predicted is not None else None
    median = line["median_step_seconds"]
    cost = checkpoint_cost(run, plan, None if known else median, rates)
    if cost is None or not cost.beside_training:
        return {"predicted": None, "reason": cost.reason if cost else "the run saves no checkpoints"}
    committed = [save for save in line["saves"] if "writing" in save]
    predicted = {
        "stall_seconds": cost.stall_seconds,
        "copy_seconds": cost.copy_seconds,
        "writing_seconds": cost.writing_seconds,
        "host_bytes": cost.host_bytes,
    }
    measured = {
        "stall_seconds": max(line["stall_seconds"], default=None),
        "copy_seconds": _mean(save["staging"] for save in committed),
        "writing_seconds": _mean(save["writing"] for save in committed),
        "host_bytes": host_bytes,
    }
    return {
        "step_seconds": {
            "predicted": known,
            "measured": median,
            "relative_error": known and round(known / median - 1, 4),
        },
        **{
            name: _beside(predicted[name], measured[name], median if name == "stall_seconds" else None)
            for name in predicted
        },
    }


def _beside(predicted: float | None, measured: float | None, scale: float | None) -> Line:
    error = None
    if predicted is not None and measured is not None and (scale or measured):
        error = round((predicted - measured) / (scale or measured), 4)
    return {"predicted": predicted, "measured": measured, "relative_error": error}


def _mean(values: Iterator[float]) -> float | None:
    numbers = list(values)
    return statistics.mean(numbers) if numbers else None


class MemoryWatch:
    """Samples the host memory that checkpoints take while a run is under way: snapshot buffers of ours, staged state of torchtitan.

    Both are files without a name that processes keep open. Only files that did not exist before are counted.
    """

    def __init__(self, prefixes: Sequence[str] = ("/memfd:meshwright-checkpoint", "/dev/shm/torch_")) -> None:
        self._prefixes = tuple(prefixes)
        self._earlier = set(_open_files(self._prefixes))
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak_bytes: int | None = None
        """Most bytes seen; None if no such file was."""

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(WATCH_SECONDS):
            files = _open_files(self._prefixes)
            sizes = [size for inode, size in files.items() if inode not in self._earlier]
            if sizes:
                self.peak_bytes = max(self.peak_bytes or 0, sum(sizes))


def _open_files(prefixes: tuple[str, ...]) -> dict[tuple[int, int], int]:
    """Allocated bytes of the open files of all processes whose path begins with a prefix, by device and inode."""
    sizes = {}
    for process in Path("/proc").glob("[0-9]*/fd"):
        try:
            for entry in os.scandir(process):
                if os.readlink(entry.path).startswith(prefixes):
                    status = os.stat(entry.path)
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:  # the process or the descriptor has gone, or belongs to another user
            continue
    return sizes
