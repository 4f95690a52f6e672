"""`CheckpointStore`: saves, finds, loads and deletes the checkpoints of one run.

A checkpoint can be loaded in any layout of ranks, whatever layout wrote it. The trainer accesses checkpoints only through this class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.format.files import FileRecord, disk_space_error
from meshwright.checkpoint.format.manifest import (
    COMMITTED,
    Damage,
    DamagedCheckpoint,
    candidate_step,
    candidates,
    has_commit,
    read_manifest,
    read_own_manifest,
    step_name,
    steps_in,
    tensor_file,
)
from meshwright.checkpoint.format.plain_files import encode_plain
from meshwright.checkpoint.format.verify import blocks_to_check, check_blocks, check_sizes, run_id_of, verify
from meshwright.checkpoint.local_tensors import LocalTensor, device_of
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.read.load import OpenCheckpoint, load_tensors, open_checkpoint
from meshwright.checkpoint.write.attempt import (
    Provenance,
    SaveAttempt,
    delete_beyond,
    new_attempt,
    recover,
    remove_stale,
)
from meshwright.checkpoint.write.layout import FileLayout, plan_layout
from meshwright.checkpoint.write.live_state import write_tensors
from meshwright.durable.lease import check_lease
from meshwright.events.span import NullRecorder, Recorder
from meshwright.spec.errors import BadInput, Damaged, OutOfResources
from meshwright.spec.run import Lease

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOutcome:
    """The checkpoint of a save. `written` is False if an undamaged checkpoint of the step existed and was kept instead."""

    path: Path
    bytes: int
    seconds: float
    written: bool = True


class CheckpointStore:
    """The checkpoints in one folder, normally `RUN/checkpoints`.

    Every method is collective: all ranks of `group` call it with the same arguments (except tensors), and all return the same result or
    raise the same error.

    - `group`: None means the default group, or this process alone without `torch.distributed`. On GPU jobs pass a Gloo group.
    - `device_group`: the NCCL group of the same ranks. When a checkpoint is loaded, values that several ranks need are sent through it.
    - `lease`: names the start (launch) that owns the run's folder, which is the parent of `folder`. If another start has taken the folder,
      saving and deleting raise BadInput. A checkpoint that belongs to another run than this folder's lease is refused.

    Each rank passes the tensors of which it has a part, possibly none. A name means the same tensor on all ranks. A DTensor may have a mesh
    of any of the ranks. If several ranks have the same elements (replicas, or an embedding that two pipeline stages share), they must have
    equal values in the same boxes. A checkpoint is good if it is committed and every byte matches its digest.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup | None = None,
        device_group: dist.ProcessGroup | None = None,
        recorder: Recorder | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.folder = folder
        self._lease = lease
        self._run_id = run_id_of(folder) if lease is None else lease.run_id
        self._ranks = RankGroup(group)
        self._device_group = device_group
        self._recorder = recorder or NullRecorder()
        self._verified: set[Path] = set()
        """Checkpoints that this store has written or verified. `retain` does not read them again."""
        self._reported: set[Path] = set()

    def save(
        self,
        step: int,
        tensors: Mapping[str, LocalTensor],
        state: dict[str, Any],
        texts: dict[str, str],
        *,
        overwrite: bool = False,
        parent: int | None = None,
        finite: bool | None = None,
    ) -> SaveOutcome:
        """Write the checkpoint of `step` so that it is complete and durable when it becomes visible. On an error nothing becomes visible.

        - `state`: plain values (JSON), taken from the first rank.
        - `texts`: further files by name, such as the resolved configuration, taken from the first rank.
        - `overwrite`: replace a good checkpoint of this step; otherwise it is kept and nothing is written.
        - `parent`, `finite`: fields of the manifest (`checkpoint.format.manifest.CheckpointManifest`).

        Raises OutOfResources if the disk is full or becomes full (earlier checkpoints stay), CommunicationFailure if a rank is lost, and
        BadInput for values that cannot be stored, or if the ranks' boxes of a tensor overlap without being the same or do not cover it.
        """
        started = time.perf_counter()
        activity = f"saving step {step}"
        existing = None if overwrite else self._existing_checkpoint(activity, step)
        if existing is not None:
            size = read_manifest(existing).total_bytes
            return SaveOutcome(existing, size, time.perf_counter() - started, written=False)

        layout = plan_layout(self._ranks, tensors, activity=activity)
        plain: dict[str, bytes] = {}

        def begin() -> SaveAttempt:
            plain.update(encode_plain(state, texts))
            return self._begin(step, sum(record.bytes for record in layout.contents.values()))

        attempt = self._ranks.run_on_first(activity, begin)
        try:
            with self._recorder.span("write", lane="checkpoint"):
                shares = self._ranks.run_on_all(activity, lambda: self._write(attempt, layout, device_of(tensors)))
            files = {name: record for share in shares for name, record in share.items()}

            def commit() -> int:
                seconds = {"writing": time.perf_counter() - started}
                provenance = Provenance(self._ranks.size, str(torch.__version__), parent, finite, seconds)
                return attempt.commit(files, layout.contents, plain, provenance).total_bytes

            with self._recorder.span("commit", lane="checkpoint"):
                size = self._ranks.run_on_first(activity, commit)
        except BaseException:
            if self._ranks.is_first:
                attempt.abandon()
            raise
        self._verified.add(attempt.target)
        return SaveOutcome(attempt.target, size, time.perf_counter() - started)

    def newest_good(self) -> Path | None:
        """Return the newest good checkpoint, or None.

        Each rank verifies a share of the blocks. If a checkpoint is damaged or not committed, one warning names the files concerned, and
        the next older checkpoint is tried.
        """
        activity = f"looking for checkpoints in {self.folder}"
        names = self._ranks.run_on_first(activity, lambda: [path.name for path in candidates(self.folder)])
        for path in (self.folder / name for name in names):
            damage = self._damage(activity, path)
            if not damage:
                return path
            if path not in self._reported and self._ranks.is_first:
                log.warning("%s; trying the next older one", DamagedCheckpoint(path, damage))
            self._reported.add(path)
        return None

    def load(
        self, path: Path, tensors: Mapping[str, LocalTensor], *, prefix: str = "", convert: bool = False
    ) -> dict[str, Any]:
        """Fill `tensors` in place from the checkpoint at `path` and return its state. Any layout may have written the checkpoint.

        The names that all ranks together pass must be the names in the checkpoint that start with `prefix`: `prefix="model."` loads only
        the weights. Shapes must agree; dtypes must agree too unless `convert`. Raises BadInput if names, shapes or dtypes do not fit.
        Raises Damaged if a block differs from what was written (some tensors may be filled by then), or if the checkpoint belongs to
        another run than its folder.
        """
        activity = f"loading {path}"
        run_id = self._run_id if path.parent == self.folder else run_id_of(path)
        opened = open_checkpoint(self._ranks, path, run_id, activity)
        self._fill(opened, tensors, prefix=prefix, convert=convert, activity=activity)
        return opened.state

    def newest_step(self, at_most: int | None = None) -> int | None:
        """Return the step of the newest checkpoint folder whose step is not beyond `at_most`, good or not; None if there is none."""
        looking = f"looking for checkpoints in {self.folder}"
        steps = self._ranks.run_on_first(
            looking, lambda: [candidate_step(path) or 0 for path in candidates(self.folder)]
        )
        return next((step for step in steps if at_most is None or step <= at_most), None)

    def load_newest(
        self, tensors: Mapping[str, LocalTensor], at_most: int | None = None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Fill `tensors` from the newest good checkpoint whose step is not beyond `at_most`. Returns its path and state.

        Every byte is read once and verified. If a checkpoint is damaged, one warning names file and byte offset, and all ranks continue
        with the next older checkpoint. Returns None if there is no checkpoint, and also if all are damaged; the values of the tensors are
        then undefined.
        """
        looking = f"looking for checkpoints in {self.folder}"
        names = self._ranks.run_on_first(looking, lambda: _names_up_to(at_most, candidates(self.folder)))
        for path in (self.folder / name for name in names):
            activity = f"loading {path}"
            try:
                opened = open_checkpoint(self._ranks, path, self._run_id, activity)
                if opened.manifest.finite is False:
                    raise Damaged(f"checkpoint {path} has values that are not finite")
                self._fill(opened, tensors, prefix="", convert=False, activity=activity)
            except Damaged as error:
                if self._ranks.is_first:
                    log.warning("%s; trying the next older one", error)
                continue
            self._verified.add(path)
            return path, opened.state
        return None

    def retain(self, keep: int) -> list[Path]:
        """Delete the committed checkpoints older than the newest `keep` and return their paths. Also removes what failed saves left.

        The newest good checkpoint is never deleted, even if all `keep` newer ones turn out to be damaged.
        """
        deleted = self._ranks.run_on_first(f"deleting old checkpoints in {self.folder}", lambda: self._retain(keep))
        self._verified.difference_update(deleted)
        return deleted

    def _fill(
        self, opened: OpenCheckpoint, tensors: Mapping[str, LocalTensor], *, prefix: str, convert: bool, activity: str
    ) -> None:
        load_tensors(
            self._ranks,
            opened,
            tensors,
            self._recorder,
            prefix=prefix,
            convert=convert,
            activity=activity,
            device_group=self._device_group,
        )

    def _existing_checkpoint(self, activity: str, step: int) -> Path | None:
        """Return the path of the checkpoint of `step` if it is good, else None."""
        target = self.folder / step_name(step)

        def look() -> bool:
            self._check_owner()
            return has_commit(target)

        committed = self._ranks.run_on_first(activity, look)
        return target if committed and not self._damage(activity, target) else None

    def _check_owner(self) -> None:
        if self._lease is not None:
            check_lease(self.folder.parent, self._lease)

    def _begin(self, step: int, tensor_bytes: int) -> SaveAttempt:
        """Create the folder for a save. Raises OutOfResources if the disk has no space for `tensor_bytes`."""
        attempt = SaveAttempt(self.folder, step, new_attempt(self._lease), self._lease)
        attempt.check_owner()
        recover(self.folder)
        attempt.create()
        error = disk_space_error(self.folder, tensor_bytes)
        if error is not None:
            attempt.abandon()
            raise OutOfResources(error)
        return attempt

    def _write(self, attempt: SaveAttempt, layout: FileLayout, device: torch.device) -> dict[str, FileRecord]:
        """Write this rank's file, which is durable on return. A rank without tensors writes no file."""
        if not layout.pieces:
            return {}
        name = tensor_file(self._ranks.rank)
        values = (piece.values() for piece in layout.pieces)
        try:
            return {name: write_tensors(attempt.folder / name, layout.headers, values, pinned=device.type == "cuda")}
        except FileNotFoundError:  # the start that took the lease has removed the attempt
            attempt.check_owner()
            raise

    def _damage(self, activity: str, path: Path) -> list[Damage]:
        """Return the damage of a checkpoint. Every rank checks the names and sizes of all files, and reads its share of the blocks."""

        def check() -> tuple[str, list[Damage]]:
            if not path.is_dir():
                return "", [Damage(COMMITTED, None, "missing")]
            try:
                manifest = read_own_manifest(path, self._run_id)
            except DamagedCheckpoint as error:
                return "", list(error.damage)
            damage = check_sizes(path, manifest)
            blocks = blocks_to_check(manifest, damage)
            mine = slice(
                len(blocks) * self._ranks.rank // self._ranks.size,
                len(blocks) * (self._ranks.rank + 1) // self._ranks.size,
            )
            return manifest.attempt, damage + check_blocks(path, manifest, blocks[mine])

        with self._recorder.span("verify", lane="checkpoint"):
            results = self._ranks.run_on_all(activity, check)
        if len({attempt for attempt, _ in results}) > 1:
            other = next(rank for rank, (attempt, _) in enumerate(results) if attempt != results[0][0])
            raise BadInput(
                f"{activity}: rank {other} does not see the {path} that rank 0 sees; "
                "the run folder must be on storage that all hosts share"
            )
        damage = list(dict.fromkeys(entry for _, share in results for entry in share))
        if not damage:
            self._verified.add(path)
        return damage

    def _retain(self, keep: int) -> list[Path]:
        self._check_owner()
        recover(self.folder)
        committed = [path for path in reversed(steps_in(self.folder)) if has_commit(path)]
        newest_good = next(
            (path for path in committed if path in self._verified or not verify(path, self._run_id)), None
        )
        deleted = delete_beyond(self.folder, keep, newest_good)
        remove_stale(self.folder, None if self._lease is None else self._lease.epoch)
        return deleted


def _names_up_to(at_most: int | None, paths: Sequence[Path]) -> list[str]:
    return [path.name for path in paths if at_most is None or (candidate_step(path) or 0) <= at_most]
