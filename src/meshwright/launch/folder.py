"""The folder of a run: which one, whether it continues what is there or has nothing left to do, and that one job at a time works in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from meshwright.checkpoint.attempt import remove_stale
from meshwright.checkpoint.manifest import step_name, steps_in
from meshwright.checkpoint.verify import newest_commit, newest_step, run_id_of, verify
from meshwright.config.load import differences, load_resolved
from meshwright.durable.lease import owner_is_alive, read_lease, release_lease, take_lease
from meshwright.durable.lock import locked
from meshwright.observe.metrics import scan_metrics
from meshwright.spec.errors import BadInput
from meshwright.spec.run import Lease, RunSpec

_INSTEAD = "give this run another name (name=…, or --fresh)"
_SCHEDULE = "it would change the learning rate of steps that are done"
_POSITION = "the position in the data follows from it"
_WHY_FIXED = {
    "seed": "the initial weights and the order of samples follow from it",
    "model": "the checkpoints hold this model's weights",
    "data": "the samples that were read follow from it",
    "train.global_batch": _POSITION,
    "train.seq_len": _POSITION,
    "train.learning_rate": _SCHEDULE,
    "train.min_learning_rate": _SCHEDULE,
    "train.warmup_steps": _SCHEDULE,
    "train.schedule": _SCHEDULE,
    "train.decay_fraction": _SCHEDULE,
}
"""Why a key, or a section's keys, must stay what they were when the run began."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other jobs out of a run's folder for the length of a `with` block. It is made when missing, and removed when it is left empty.

    Taken once a job, by the process that prepares it: the launcher, or rank 0 where another launcher started the ranks. The lock is the
    process's, so one that was killed leaves none. Raises BadInput when another process has it, or, on a file system without locks, when
    the folder's lease is that of a living process of this host.
    """
    with locked(folder, wait=False, instead=_INSTEAD) as exclusive:
        if exclusive:
            yield
            return
        lease = read_lease(folder)
        if lease is not None and lease.pid != os.getpid() and owner_is_alive(lease):
            raise BadInput(f"{folder}: process {lease.pid} on {lease.host} is writing here; wait for it, or {_INSTEAD}")
        try:
            yield
        finally:
            release_lease(folder)


def take_over(folder: Path) -> Lease:
    """Take the lease of a run's folder, which this process holds, and remove the unfinished checkpoints of earlier starts.

    A process of an earlier start that still runs cannot commit from here on: its lease is not the folder's, and its attempt is gone. What
    it committed before is among the checkpoints that this start resumes from.
    """
    checkpoints = folder / "checkpoints"
    lease = take_lease(folder, lambda: newest_commit(checkpoints))
    remove_stale(checkpoints, lease.epoch)
    return lease


def renamed(run: RunSpec, runs: Path) -> RunSpec:
    """The run under a name that is not taken: NAME, or NAME-2, NAME-3, …"""
    names = chain([run.name], (f"{run.name}-{number}" for number in count(2)))
    return replace(run, name=next(name for name in names if not (runs / name).exists()))


def continues(run: RunSpec, folder: Path) -> bool:
    """Whether the run continues what is in its folder. A run that ended before its first step left nothing to continue, whatever it was.

    `train.steps` may have been raised: the steps that are done stay what they are, and the schedule of those to come gets longer. Raises
    BadInput naming every other key that differs in what is trained, and why it must not change.
    """
    config = _earlier_config(folder)
    if config is None or not _began(folder):
        return False
    refused = [
        f"  {key}: {before!r} there, {now!r} now ({_why_fixed(key)})"
        for key, before, now in differences(load_resolved(config), run)
        if key != "train.steps" or now < before
    ]
    if refused:
        lines = "\n".join(refused)
        raise BadInput(
            f"{folder} is a run with another configuration:\n{lines}\n"
            "Give this one another name (name=…), start it beside the old one with --fresh, or set the keys back to resume"
        )
    return True


def _earlier_config(folder: Path) -> Path | None:
    """The configuration that the run had at its last start: the folder's, or where that was lost, its newest checkpoint's."""
    kept = (path / "config.yaml" for path in reversed(steps_in(folder / "checkpoints")))
    return next((path for path in (folder / "config.yaml", *kept) if path.exists()), None)


def _why_fixed(key: str) -> str:
    """Why a key must stay what it was when the run began."""
    if key == "train.steps":
        return "steps may be raised, not lowered"
    section = key.partition(".")[0]
    return _WHY_FIXED.get(key) or _WHY_FIXED.get(section, "the steps that are done were trained with the other value")


def _began(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return bool(steps_in(folder / "checkpoints")) or (
        metrics.exists() and any(line.get("kind") == "step" for line in scan_metrics(metrics)[0])
    )


def is_finished(run: RunSpec, folder: Path) -> bool:
    """Whether the run's last step is in a checkpoint, and that is what was written."""
    step = newest_step(folder)
    return step >= run.train.steps and not verify(folder / "checkpoints" / step_name(step), run_id_of(folder))
