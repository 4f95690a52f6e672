"""Describes a checkpoint, and deletes old ones: the commands `show` and `prune`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.checkpoint.format.manifest import candidate_step, has_commit, read_manifest, steps_in
from meshwright.checkpoint.format.verify import find_checkpoints, read_verified, run_id_of, verify
from meshwright.checkpoint.write.attempt import delete_beyond, recover, remove_stale
from meshwright.durable.lease import owner_is_alive, read_lease
from meshwright.durable.lock import locked
from meshwright.spec.errors import BadInput, Damaged

PHASES = ("staging", "writing", "commit")
_PLAN_LIMIT = 64 << 20


def choose_checkpoint(folder: Path, step: int | None) -> Path:
    """Return the checkpoint of `step`, or the newest committed checkpoint if `step` is None.

    `folder` is a run's folder, its `checkpoints` folder or the folder of one checkpoint. Raises BadInput if there is no such checkpoint;
    the message names the checkpoints that exist.
    """
    paths = find_checkpoints(folder)
    chosen = [
        path
        for path in paths
        if (has_commit(path) if step is None else candidate_step(path) == step or paths == [folder])
    ]
    if chosen:
        return chosen[-1]
    steps = ", ".join(str(candidate_step(path)) for path in paths) or "none"
    missing = "no committed checkpoint" if step is None else f"no checkpoint of step {step}"
    raise BadInput(f"{folder} holds {missing}; steps there: {steps}")


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Return what is known about a checkpoint: step, whether it is committed, Plan, versions, files with sizes, seconds of each save phase.

    A checkpoint without a commit has no manifest; its plan, versions and seconds are None. Raises Damaged if the manifest or the Plan is
    not what was written.
    """
    if not has_commit(path):
        files = [{"name": file.name, "bytes": file.stat().st_size} for file in sorted(path.iterdir()) if file.is_file()]
        return {
            "step": candidate_step(path),
            "committed": False,
            "plan": None,
            "versions": None,
            "files": files,
            "seconds": dict.fromkeys(PHASES),
        }
    manifest = read_manifest(path)
    plan = None
    if "plan.yaml" in manifest.files:
        try:
            plan = yaml.safe_load(read_verified(path, manifest, "plan.yaml", _PLAN_LIMIT))
        except yaml.YAMLError as error:
            raise Damaged(f"{path / 'plan.yaml'} is not YAML: {error}") from error
    seconds = manifest.seconds or {}
    return {
        "step": manifest.step,
        "committed": True,
        "plan": plan,
        "versions": manifest.versions,
        "files": [{"name": name, "bytes": record.bytes} for name, record in manifest.files.items()],
        "seconds": {phase: seconds.get(phase) for phase in PHASES},
    }


@dataclass(frozen=True)
class PruneResult:
    """The checkpoints that `prune_checkpoints` deleted, and those that remain."""

    deleted: tuple[Path, ...]
    kept: tuple[Path, ...]


def prune_checkpoints(folder: Path, keep: int) -> PruneResult:
    """Delete a run's committed checkpoints except the newest `keep`, and the files of interrupted saves.

    The newest undamaged checkpoint of this run always stays, also if `keep` newer ones exist that are damaged or belong to another run.
    Raises BadInput if `keep` is not positive, if `folder` is a single checkpoint or has no checkpoints, and while a job works in the run's
    folder.
    """
    if find_checkpoints(folder) == [folder]:
        raise BadInput(f"{folder}: expected a run's folder or its checkpoints folder")
    checkpoints = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    run = folder.parent if folder.name == "checkpoints" else folder
    with locked(run, wait=False, alternative="stop it first") as exclusive:
        lease = None if exclusive else read_lease(run)
        if lease is not None and owner_is_alive(lease):
            raise BadInput(f"{run}: process {lease.pid} on {lease.host} is writing here; stop it first")
        run_id = run_id_of(folder)
        recover(checkpoints)
        newest_first = [path for path in reversed(steps_in(checkpoints)) if has_commit(path)]
        newest_intact = next((path for path in newest_first if not verify(path, run_id)), None)
        deleted = delete_beyond(checkpoints, keep, newest_intact)
        remove_stale(checkpoints)
        return PruneResult(tuple(deleted), tuple(steps_in(checkpoints)))
