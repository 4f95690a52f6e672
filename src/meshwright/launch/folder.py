"""The folder of a run: its name, its lock, and whether the run resumes or is finished."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from meshwright.checkpoint.format.inventory import newest_step, record_commit, take_inventory
from meshwright.checkpoint.format.manifest import step_name, step_of, steps_in
from meshwright.checkpoint.format.verify import newest_commit, run_id_of, verify
from meshwright.checkpoint.mirror.copies import describe_copies, has_copies
from meshwright.checkpoint.write.attempt import await_writers, remove_stale
from meshwright.config.load import differences, load_resolved
from meshwright.durable.lease import owner_is_alive, read_lease, release_lease, take_lease
from meshwright.durable.lock import locked
from meshwright.launch.corpus import recorded_corpus, skipped_samples
from meshwright.observe.metrics import scan_metrics
from meshwright.policies.skipped_samples import samples_of_step
from meshwright.spec.batch_sizes import BatchStage
from meshwright.spec.errors import BadInput
from meshwright.spec.job import TrainSpec
from meshwright.spec.run import Lease, RunSpec

_ALTERNATIVE = "give this run another name (name=…, or --fresh)"
"""Advice at the end of errors, and two reasons that several keys share."""
_SCHEDULE = "it would change the learning rate of steps that are done"
_POSITION = "the position in the data follows from it"
_BATCH = ("train.global_batch", "train.batch_ramp")
"""Keys of the batch size. They may change for later steps, if all steps that are done keep the batch that they had."""
_WHY_FIXED = {
    "seed": "the initial weights and the order of samples follow from it",
    "model": "the checkpoints hold this model's weights",
    "data": "the samples that were read follow from it",
    "train.global_batch_tokens": _POSITION,
    "train.seq_len": _POSITION,
    "train.learning_rate": _SCHEDULE,
    "train.min_learning_rate": _SCHEDULE,
    "train.warmup_steps": _SCHEDULE,
    "train.schedule": _SCHEDULE,
    "train.decay_fraction": _SCHEDULE,
}
"""Why a key, or a section's keys, must not change after a run's first start."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other jobs for a `with` block.

    The folder is created if missing, and removed if it stays empty.

    The process that prepares a job takes the lock: the launcher, or rank 0 if another launcher has started the ranks.
    The lock is released when that process ends, even if it crashes.

    Raises BadInput if another process holds the lock. On a file system without locks it raises BadInput if the folder's
    lease belongs to a living process of this host.
    """
    with locked(folder, wait=False, alternative=_ALTERNATIVE) as exclusive:
        if exclusive:
            yield
            return
        lease = read_lease(folder)
        if lease is not None and lease.pid != os.getpid() and owner_is_alive(lease):
            raise BadInput(
                f"{folder}: process {lease.pid} on {lease.host} is writing here; wait for it, or {_ALTERNATIVE}"
            )
        try:
            yield
        finally:
            release_lease(folder)


def take_over(folder: Path) -> Lease:
    """Take the lease of a run's folder, and remove unfinished checkpoints of earlier starts.

    The caller holds the folder's lock.

    After this, a process of an earlier start that still runs can commit no checkpoint.
    """
    checkpoints = folder / "checkpoints"
    await_writers(checkpoints)
    lease = take_lease(folder, lambda: newest_commit(checkpoints))
    remove_stale(checkpoints, lease.epoch)
    if present := steps_in(checkpoints):  # a folder that was copied here may lack the record of its newest checkpoint
        record_commit(folder, step_of(present[-1].name) or 0)
    return lease


def renamed(run: RunSpec, runs: Path) -> RunSpec:
    """Return the run with an unused name: NAME, or NAME-2, NAME-3, … A name is in use if a folder or the mirror has it."""
    mirror = run.checkpoint.mirror
    names = chain([run.name], (f"{run.name}-{number}" for number in count(2)))
    free = (name for name in names if not (runs / name).exists())
    return replace(run, name=next(name for name in free if mirror is None or not has_copies(mirror, runs / name)))


def check_state(run: RunSpec, folder: Path) -> None:
    """Raise Damaged if the run has written checkpoints, but none can be loaded.

    Only names, sizes and manifests are checked here; the ranks check the contents. A checkpoint in the mirror is
    enough, because the start copies it. Raises NewerFormat if the newest checkpoint is of a newer release than this
    one.
    """
    inventory = take_inventory(folder)
    mirror = run.checkpoint.mirror
    if inventory.usable() is None and inventory.had_checkpoint and mirror is not None and has_copies(mirror, folder):
        return
    inventory.check_start(lambda: describe_copies(mirror, folder))


def continues(run: RunSpec, folder: Path) -> bool:
    """Whether the run continues from its folder. A run that ended before its first step has nothing to continue.

    These keys may differ from the earlier start:

    - `train.steps` may increase; the remaining steps follow the longer schedule.
    - `train.global_batch` and `train.batch_ramp` may change if all steps that are done keep their batch.
    - The paths in `data.mix` may change, for example on another machine; `launch.corpus.check_unchanged` compares the
      contents.

    Raises BadInput if any other key differs. The error names each such key, and why it must not change.
    """
    config = _earlier_config(folder)
    if config is None or not _began(folder):
        return False
    before = load_resolved(config)
    refused = [
        f"  {key}: {earlier!r} there, {now!r} now ({_why_fixed(key)})"
        for key, earlier, now in differences(before, run)
        if key not in _BATCH
        # It is derived from the data, which could not be opened now.
        and not (key == "data.document_mask" and now is None)
        and not (key == "train.steps" and now >= earlier)
        and not (key == "data.mix" and _may_be_moved(earlier, now, folder))
    ]
    if batch := _batch_change(before.train, run.train, folder):
        refused.append(batch)
    if refused:
        lines = "\n".join(refused)
        raise BadInput(
            f"{folder} is a run with another configuration:\n{lines}\n"
            "Give this one another name (name=…), start it beside the old one with --fresh, or set the keys back to resume"
        )
    return True


def _batch_change(before: TrainSpec, now: TrainSpec, folder: Path) -> str | None:
    """Return a line that refuses a new batch size for steps that are done; None if they keep theirs.

    The line has the `train.batch_ramp` with which the done steps keep their batch and later steps get the new one.
    """
    if before.batches == now.batches or before.global_batch_tokens or now.global_batch_tokens:
        return None
    skipped = skipped_samples(folder)
    # The first sample of the first step that is not done.
    position = samples_of_step(_last_step(folder) + 1, before.batches, skipped)[0]
    position = max(position, *(end for _, end in skipped), 0)  # skipped samples belong to steps that are done, too
    if before.batches.equal_until(now.batches, position):
        return None
    done = before.batches.steps_before(position)
    # The earlier ramp's stages that are over, and then the batch size of the last done step until now.
    stages = [stage for stage in before.batch_ramp if stage.until < done]
    stages.append(BatchStage(until=done, batch=before.batches.at(before.batches.samples_before(done - 1))))
    ramp = ", ".join(f"{{until: {stage.until}, batch: {stage.batch}}}" for stage in stages)
    key = "batch_ramp"
    earlier = before.batch_ramp
    later = now.batch_ramp
    if before.global_batch != now.global_batch:
        key = "global_batch"
        earlier = before.global_batch
        later = now.global_batch
    return (
        f"  train.{key}: {earlier!r} there, {later!r} now (the {done} steps that are done keep their batch; another one after them: "
        f"train.global_batch={now.global_batch} 'train.batch_ramp=[{ramp}]')"
    )


def _last_step(folder: Path) -> int:
    """Return the last step that any start of the run has trained, according to its metrics and checkpoints."""
    metrics = folder / "metrics.jsonl"
    stored = steps_in(folder / "checkpoints")
    lines = scan_metrics(metrics)[0] if metrics.exists() else ()
    steps = [line["step"] for line in lines if line.get("kind") == "step"]
    return max([*steps, *(step_of(path.name) or 0 for path in stored)], default=0)


def _may_be_moved(before: dict[str, float], now: dict[str, float], folder: Path) -> bool:
    """Whether `now` may be the same corpora as `before` under other paths, and a checkpoint has a record to check that with."""
    return sorted(before.values()) == sorted(now.values()) and bool(recorded_corpus(folder)[1])


def _earlier_config(folder: Path) -> Path | None:
    """Return the configuration file of the run's last start: in its folder, or else in its newest checkpoint.

    None if missing.
    """
    config_files = (path / "config.yaml" for path in reversed(steps_in(folder / "checkpoints")))
    return next((path for path in (folder / "config.yaml", *config_files) if path.exists()), None)


def _why_fixed(key: str) -> str:
    """Return the reason why a key must not change after a run's first start."""
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
    """Whether a good checkpoint has the run's last step."""
    step = newest_step(folder)
    return step >= run.train.steps and not verify(folder / "checkpoints" / step_name(step), run_id_of(folder))
