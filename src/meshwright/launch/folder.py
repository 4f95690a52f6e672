"""The folder of a run: which one, whether it continues what is there or has nothing left to do, and that one job at a time works in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from meshwright.checkpoint.manifest import step_name, steps_in
from meshwright.checkpoint.verify import newest_step, verify
from meshwright.files.lock import locked
from meshwright.observe.metrics import scan_metrics
from meshwright.spec.errors import BadInput
from meshwright.spec.load import differences, load_resolved
from meshwright.spec.run import RunSpec


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other jobs out of a run's folder for the length of a `with` block. It is made when missing, and removed when it is left empty.

    Taken once a job, by the process that prepares it: the launcher, or rank 0 where another launcher started the ranks. The lock is the
    process's, so one that was killed leaves none. Raises BadInput when another process has it.
    """
    with locked(folder, wait=False, instead="give this run another name (name=…, or --fresh)"):
        yield


def renamed(run: RunSpec, runs: Path) -> RunSpec:
    """The run under a name that is not taken: NAME, or NAME-2, NAME-3, …"""
    names = chain([run.name], (f"{run.name}-{number}" for number in count(2)))
    return replace(run, name=next(name for name in names if not (runs / name).exists()))


def continues(run: RunSpec, folder: Path) -> bool:
    """Whether the run continues what is in its folder. A run that ended before its first step left nothing to continue, whatever it was.

    Raises BadInput naming every key that differs when a run of this name trains something else.
    """
    if not (folder / "config.yaml").exists() or not _began(folder):
        return False
    changed = differences(load_resolved(folder / "config.yaml"), run)
    if changed:
        lines = "\n".join(f"  {key}: {before!r} there, {now!r} now" for key, before, now in changed)
        raise BadInput(
            f"{folder} is a run with another configuration:\n{lines}\n"
            "Give this one another name (name=…), start it beside the old one with --fresh, or set the keys back to resume"
        )
    return True


def _began(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return bool(steps_in(folder / "checkpoints")) or (
        metrics.exists() and any(line.get("kind") == "step" for line in scan_metrics(metrics)[0])
    )


def is_finished(run: RunSpec, folder: Path) -> bool:
    """Whether the run's last step is in a checkpoint, and that is what was written."""
    step = newest_step(folder)
    return step >= run.train.steps and not verify(folder / "checkpoints" / step_name(step))
