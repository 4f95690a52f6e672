"""The inventory of a run: its checkpoints, which of them can be loaded, and whether the run ever had one.

The launcher, the ranks, and the commands that read a model call `take_inventory` to decide between a start from scratch, a
resume from the newest checkpoint, and a resume from an older one. A run that ever had a checkpoint never starts from
scratch.

This module does not import torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.checkpoint.format.manifest import Damage, NewerFormat, candidate_step, read_manifest, step_name
from meshwright.checkpoint.format.verify import damage_of, find_checkpoints, run_id_of
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError

FIRST_COMMIT = "first_commit.json"
"""File in a run's folder, written after its first commit. It proves that the run had a checkpoint, even if none is left."""
SHOWN = 5
"""A message names at most this many checkpoints."""

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class Found:
    """A checkpoint folder that was found.

    `step`: None if neither the name nor the manifest has it. `damage`: why it cannot be loaded; empty if it can.
    """

    path: Path
    step: int | None
    damage: tuple[Damage, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damage

    @property
    def is_newer_format(self) -> bool:
        """Whether a later release wrote the checkpoint in a format that this release cannot read. That is no damage."""
        return any(entry.kind == "format" for entry in self.damage)

    def __str__(self) -> str:
        return f"{self.path.name}: {self.damage[0] if self.damage else 'its contents are not what was written'}"


@dataclass(frozen=True)
class Inventory:
    """The checkpoints of a run's folder, newest first, and the evidence that the run had a checkpoint."""

    folder: Path
    checkpoints: tuple[Found, ...]
    record: str | None
    """Name of a file in the run's folder that proves that the run had a checkpoint, or None.

    It is only looked for if `checkpoints` is empty.
    """

    @property
    def had_checkpoint(self) -> bool:
        return self.record is not None or bool(self.checkpoints)

    def up_to(self, step: int) -> Inventory:
        """Return the inventory without checkpoints of steps after `step`."""
        early = tuple(found for found in self.checkpoints if (found.step or 0) <= step)
        return replace(self, checkpoints=early, record=None)

    def usable(self) -> Found | None:
        """Return the newest checkpoint that is not damaged, or None.

        Raises NewerFormat if a newer checkpoint was written by a later release: an older checkpoint must not replace it.
        """
        for found in self.checkpoints:
            if found.ok:
                return found
            if found.is_newer_format:
                raise NewerFormat(found.path, found.damage)
        return None

    def lost(self, copies: Callable[[], str] = str) -> Damaged | None:
        """Return the error for a run that had a checkpoint but has none that can be loaded; None if it never had one.

        `copies` returns a text on what the run's mirror has, which the message includes; empty without a mirror.
        """
        if not self.had_checkpoint:
            return None
        if self.checkpoints:
            shown = "; ".join(map(str, self.checkpoints[:SHOWN]))
            more = f"; {len(self.checkpoints) - SHOWN} more" if len(self.checkpoints) > SHOWN else ""
            what = f"every checkpoint of {self.folder} is damaged: {shown}{more}"
        else:
            what = f"{self.folder} had a checkpoint ({self.record}) and none is left in {self.folder / 'checkpoints'}"
        there = f"; {text}" if (text := copies()) else ""
        return Damaged(
            f"{what}{there}. The run does not start from scratch: put a good copy back, or start a "
            "new run beside it with --fresh"
        )

    def check_start(self, copies: Callable[[], str]) -> None:
        """Raise Damaged, or NewerFormat, if the run would have to start from scratch although it had a checkpoint."""
        lost = self.lost(copies) if self.usable() is None else None
        if lost is not None:
            raise lost


def take_inventory(folder: Path, *, contents: bool = False) -> Inventory:
    """Return the inventory of a run's folder, of its `checkpoints` folder, or of a single checkpoint.

    Names, sizes and manifests are checked, and with `contents` every byte. A folder that does not exist is empty.
    """
    paths = find_checkpoints(folder) if folder.is_dir() else []
    run_id = run_id_of(folder)
    checkpoints = tuple(_found(path, contents, run_id) for path in reversed(paths))
    run = folder.parent if folder.name == "checkpoints" else folder
    record = FIRST_COMMIT if not checkpoints and (run / FIRST_COMMIT).exists() else None
    return Inventory(folder, checkpoints, record)


def record_commit(run: Path, step: int) -> None:
    """Record in a run's folder that the run has had a checkpoint, unless that is recorded.

    A failure is only logged, because the next commit tries again.
    """
    try:
        if not (run / FIRST_COMMIT).exists():
            write_durable(run / FIRST_COMMIT, json.dumps({"step": step}) + "\n")
    except OSError as error:
        log.warning("%s is not written: %s", run / FIRST_COMMIT, error)


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that a command uses. `passed_over` are newer checkpoints that are damaged."""

    path: Path
    step: int | None
    passed_over: tuple[Found, ...] = ()

    @property
    def warning(self) -> str | None:
        """A sentence for the user if an older checkpoint is used in place of the newest, else None."""
        if not self.passed_over:
            return None
        newest = self.passed_over[0]
        more = f" ({len(self.passed_over) - 1} more too)" if len(self.passed_over) > 1 else ""
        return f"the newest checkpoint {newest.path.parent / str(newest)} is damaged{more}; {self.path.name} is used"

    def facts(self) -> dict[str, object]:
        """Return the choice for programs: `checkpoint`, and `damaged_checkpoints` if newer ones are damaged."""
        damaged = [{"path": str(found.path), "reason": str(found.damage[0])} for found in self.passed_over]
        return {"checkpoint": str(self.path), **({"damaged_checkpoints": damaged} if damaged else {})}


def choose_newest(folder: Path, *, contents: bool = True) -> Chosen:
    """Return the newest good checkpoint in a run folder or `checkpoints` folder, or `folder` itself if it is a checkpoint.

    `contents=False` checks names and sizes only; a reader verifies the blocks that it reads anyway. Raises BadInput if
    there is no checkpoint, Damaged if all are damaged, and NewerFormat if this release cannot read the newest.
    """
    run_id = run_id_of(folder)
    passed_over = list[Found]()
    for path in reversed(find_checkpoints(folder)):
        found = _found(path, contents, run_id)
        if found.ok:
            return Chosen(found.path, found.step, tuple(passed_over))
        if found.is_newer_format:
            raise NewerFormat(found.path, found.damage)
        passed_over.append(found)
    if passed_over:
        raise Damaged(
            f"every checkpoint in {folder} is damaged: {'; '.join(map(str, passed_over[:SHOWN]))}; "
            f"`meshwright checkpoint verify {folder}` says where"
        )
    if (lost := take_inventory(folder).lost()) is not None:
        raise lost
    raise BadInput(f"{folder} holds no committed checkpoint")


def choose_weights(folder: Path, *, contents: bool = True) -> Chosen | None:
    """Return the checkpoint of a model's folder as `choose_newest` does; None for a Hugging Face folder."""
    return None if (folder / "config.json").exists() else choose_newest(folder, contents=contents)


def newest_checkpoint(folder: Path, *, contents: bool = True) -> Path:
    """Return the path of the checkpoint that `choose_newest` chooses. Raises the same errors."""
    return choose_newest(folder, contents=contents).path


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a run folder whose file names and sizes are right; 0 without one."""
    return max(present_steps(folder), default=0)


def present_steps(folder: Path) -> tuple[int, ...]:
    """Return the steps of the checkpoints in a run's folder whose file names and sizes are right, ascending."""
    return tuple(found.step or 0 for found in reversed(take_inventory(folder).checkpoints) if found.ok)


def describe_continuation(folder: Path) -> str:
    """Return a sentence for the user: after which step the same command continues the run in `folder`."""
    if step := newest_step(folder):
        path = folder / "checkpoints" / step_name(step)
        return f"started again, the run {folder.name} continues after step {step}, from {path}"
    try:
        take_inventory(folder).check_start(str)
    except MeshwrightError as error:
        return str(error)
    return f"there is no checkpoint in {folder} yet; the same command begins at step 1"


def _found(path: Path, contents: bool, run_id: str | None) -> Found:
    damage = tuple(damage_of(path, run_id, contents=contents))
    step = candidate_step(path)
    if step is None and not damage:
        step = read_manifest(path).step
    return Found(path, step, damage)
