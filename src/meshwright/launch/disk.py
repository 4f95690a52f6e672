"""Space on the run's disk for the checkpoints that it will write. This module imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.checkpoint.format.files import add_reserve
from meshwright.checkpoint.format.inventory import newest_step
from meshwright.checkpoint.format.manifest import steps_in
from meshwright.observe.number_text import size
from meshwright.policies.checkpoint_times import planned_checkpoints
from meshwright.spec.errors import OutOfResources
from meshwright.spec.job import AUTO_FIRST_SECONDS, AUTO_SECONDS
from meshwright.spec.model import ModelSpec, trained_parameter_count
from meshwright.spec.run import RunSpec

BYTES_PER_PARAMETER = 12
"""Bytes in a checkpoint for each trained parameter: master weight and two optimizer moments, in fp32."""


def checkpoint_bytes(model: ModelSpec) -> int:
    """Return the bytes of all tensors in one checkpoint of a run. A tied head is stored once."""
    return trained_parameter_count(model) * BYTES_PER_PARAMETER


def check_disk(run: RunSpec, folder: Path, step_seconds: float | None = None) -> None:
    """Raise OutOfResources if the checkpoints that the run will add do not fit on its folder's disk.

    While a new checkpoint is written, the `checkpoint.keep` newest ones still exist, so at most `keep + 1` exist at
    once. With `checkpoint.every: auto`, the number of checkpoints is computed from the predicted `step_seconds`; it is
    one if there is no prediction.
    """
    existing = steps_in(folder / "checkpoints")
    planned = planned_checkpoints(run.checkpoint, run.train.steps, newest_step(folder) if existing else 0, step_seconds)
    count = min(planned, max(1, run.checkpoint.keep + 1 - len(existing)))
    disk = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    checkpoint_size = add_reserve(checkpoint_bytes(run.model))
    free_bytes = shutil.disk_usage(disk).free
    if count * checkpoint_size > free_bytes:
        need_text = (
            f"{count} checkpoints of {checkpoint_size:,} bytes need {count * checkpoint_size:,}"
            if count > 1
            else f"one checkpoint needs {checkpoint_size:,}"
        )
        keep_advice = "lower checkpoint.keep (one more than it exists while one is written), " if count > 2 else ""
        raise OutOfResources(
            f"{folder}: {need_text} bytes and {free_bytes:,} are free; {keep_advice}choose another disk with --runs DIR, or "
            "write none with checkpoint.every=0 checkpoint.at_end=false"
        )


def checkpoints_line(run: RunSpec) -> str | None:
    """Return the line about checkpoints that a start prints: when, how large, how many are kept.

    None if the run writes none.
    """
    spec = run.checkpoint
    times = []
    if spec.every == "auto":
        times.append(
            f"{AUTO_FIRST_SECONDS // 60} minutes after the first step, then at least every {AUTO_SECONDS // 60} minutes"
        )
    elif spec.every:
        times.append(f"every {spec.every:,} steps")
    if spec.at_end:
        times.append("after the last step" if spec.every else "after the last step alone (checkpoint.every is 0)")
    if not times:
        return None
    return f"checkpoints: {', and '.join(times)}; {size(checkpoint_bytes(run.model))} each, the newest {spec.keep} stay"
