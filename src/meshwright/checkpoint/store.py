"""The checkpoints of one run: save, find the newest good one, load it in any layout, keep the last few.

This is the interface the trainer knows. What lies behind it (DCP's planning over our safetensors files) can change
without it noticing.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from meshwright.checkpoint.attempt import (
    Attempt,
    Provenance,
    candidate_step,
    candidates,
    delete_beyond,
    new_attempt,
    recover,
    remove_stale,
)
from meshwright.checkpoint.boxed import Boxed
from meshwright.checkpoint.contents import Contents
from meshwright.checkpoint.files import FileRecord
from meshwright.checkpoint.fit import check_storable
from meshwright.checkpoint.load import device_of, load_tensors, open_checkpoint
from meshwright.checkpoint.manifest import (
    COMMITTED,
    Damage,
    DamagedCheckpoint,
    has_commit,
    read_manifest,
    read_own_manifest,
    step_name,
    steps_in,
)
from meshwright.checkpoint.ranks import Ranks
from meshwright.checkpoint.state import encode_plain
from meshwright.checkpoint.storage import PiecePlanner, ShardWriter
from meshwright.checkpoint.verify import blocks_to_check, check_blocks, check_sizes, verify
from meshwright.durable.lease import check_lease
from meshwright.events.span import NullRecorder, Recorder
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.run import Lease
from meshwright.state.parts import StateParts

log = logging.getLogger(__name__)
_STATE_LIMIT = 256 << 20
Held = Tensor | StateParts
"""How a rank gives its part of a tensor."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk. `written` is false when the step was there already, and nothing was done."""

    path: Path
    bytes: int
    seconds: float
    written: bool = True


class CheckpointStore:
    """The checkpoints in one folder, normally `RUN/checkpoints`.

    Every method is collective: all ranks of `group` (the default group when None; this process alone when no job was
    joined) call it with the same arguments, and all return the same or raise the same error. On GPU jobs pass a Gloo
    group. `progress(bytes)` hears of each piece this rank writes. A folder has one writer at a time: with the `lease` of the run's folder
    (`folder`'s parent), saving and retention raise BadInput once another start of the run has taken it.

    Tensors alone may differ: each rank passes those it holds a part of, which may be none, under names that mean the
    same tensor everywhere. They are DTensors, each on a mesh of any of the ranks, plain tensors, or StateParts. What several ranks
    hold, such as replicas or an embedding tied across two pipeline stages, is equal on all of them, in the same pieces.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup | None = None,
        recorder: Recorder | None = None,
        progress: Callable[[int], None] | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.folder = folder
        self._lease = lease
        self._run_id = None if lease is None else lease.run_id
        self._ranks = Ranks(group)
        self._recorder = recorder or NullRecorder()
        self._progress = progress
        self._good: set[Path] = set()
        """Written or verified by this store; retention takes them for good without reading them again."""
        self._reported: set[Path] = set()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Held],
        state: dict[str, Any],
        texts: dict[str, str],
        *,
        overwrite: bool = False,
        parent: int | None = None,
        finite: bool | None = None,
    ) -> Saved:
        """Write the checkpoint of `step` and make it visible, whole and durable, or raise and leave nothing visible.

        `state` is plain values (JSON) and `texts` are files to keep beside the tensors, such as the resolved
        configuration; both are taken from the first rank. `parent` and `finite` are the manifest's. A step that is there and good is left
        alone unless `overwrite`. Raises OutOfResources when the disk is or becomes full (earlier checkpoints stay), BadInput for what
        cannot be stored and for a tensor of which the ranks together hold a part twice, in unlike pieces, or not at all,
        CommunicationFailure when a rank is lost.
        """
        started = time.perf_counter()
        doing = f"saving step {step}"
        there = None if overwrite else self._already(doing, step)
        if there is not None:
            return Saved(there, read_manifest(there).total_bytes, time.perf_counter() - started, written=False)

        def check() -> dict[str, bytes]:
            check_storable(tensors)
            return encode_plain(state, texts) if self._ranks.first else {}

        plain = self._ranks.together(doing, check)[0]
        attempt = self._ranks.from_first(doing, lambda: self._begin(step))
        try:
            with self._recorder.span("write", lane="checkpoint"):
                shards, contents = self._write(doing, attempt, tensors)

            def commit() -> int:
                seconds = {"writing": time.perf_counter() - started}
                provenance = Provenance(self._ranks.size, str(torch.__version__), parent, finite, seconds)
                return attempt.commit(shards, contents, plain, provenance).total_bytes

            with self._recorder.span("commit", lane="checkpoint"):
                size = self._ranks.from_first(doing, commit)
        except BaseException:
            if self._ranks.first:
                attempt.abandon()
            raise
        self._good.add(attempt.target)
        return Saved(attempt.target, size, time.perf_counter() - started)

    def newest_good(self) -> Path | None:
        """The newest checkpoint that is committed and whose every byte is what was written, or None.

        Ranks verify a share each. One that is damaged or not committed is reported once, with the files concerned, and
        the next older is tried.
        """
        doing = f"looking for checkpoints in {self.folder}"
        names = self._ranks.from_first(doing, lambda: [path.name for path in candidates(self.folder)])
        for path in (self.folder / name for name in names):
            damage = self._damage(doing, path)
            if not damage:
                return path
            if path not in self._reported and self._ranks.first:
                log.warning("%s; trying the next older one", DamagedCheckpoint(path, damage))
            self._reported.add(path)
        return None

    def load(
        self, path: Path, tensors: Mapping[str, Held], *, prefix: str = "", convert: bool = False
    ) -> dict[str, Any]:
        """Fill `tensors` in place from the checkpoint at `path`, written in whatever layout, and return its state.

        The names given by all ranks together must be exactly those in the checkpoint that start with `prefix`:
        `prefix="model."` loads the weights alone. Shapes must agree, and dtypes too unless `convert`. What is read is
        verified first. Raises Damaged when it is not what was written (some tensors may have been filled by then),
        BadInput when it does not fit the tensors.
        """
        doing = f"loading {path}"
        opened = open_checkpoint(self._ranks, path, None, doing)
        load_tensors(self._ranks, opened, tensors, self._recorder, prefix=prefix, convert=convert, doing=doing)
        return opened.state

    def newest_step(self, at_most: int | None = None) -> int | None:
        """The step of the newest checkpoint folder of at most that step, whether or not it is good; None without any."""
        looking = f"looking for checkpoints in {self.folder}"
        steps = self._ranks.from_first(looking, lambda: [candidate_step(path) for path in candidates(self.folder)])
        return next((step for step in steps if at_most is None or step <= at_most), None)

    def load_newest(
        self, tensors: Mapping[str, Held], at_most: int | None = None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Fill `tensors` from the newest good checkpoint; return its path and state, or None when there is no checkpoint at all.

        Checkpoints of steps beyond `at_most` do not count. Every byte is read once and verified on the way. On
        damage all ranks turn to the next older checkpoint together, after one
        warning with file and byte offset. Raises Damaged when all are damaged; then the tensors hold values of none.
        """
        looking = f"looking for checkpoints in {self.folder}"
        names = self._ranks.from_first(looking, lambda: _names_up_to(at_most, candidates(self.folder)))
        for path in (self.folder / name for name in names):
            doing = f"loading {path}"
            try:
                opened = open_checkpoint(self._ranks, path, self._run_id, doing)
                if opened.manifest.finite is False:
                    raise Damaged(f"checkpoint {path} has values that are not finite")
                load_tensors(self._ranks, opened, tensors, self._recorder, prefix="", convert=False, doing=doing)
            except Damaged as error:
                if self._ranks.first:
                    log.warning("%s; trying the next older one", error)
                continue
            self._good.add(path)
            return path, opened.state
        return None

    def retain(self, keep: int) -> list[Path]:
        """Delete and return the committed checkpoints older than the newest `keep`; clear up after dead attempts.

        The newest good one is never deleted, even when `keep` newer ones turn out to be damaged.
        """
        deleted = self._ranks.from_first(f"deleting old checkpoints in {self.folder}", lambda: self._retain(keep))
        self._good.difference_update(deleted)
        return deleted

    def _already(self, doing: str, step: int) -> Path | None:
        """The checkpoint of `step` if it is there and good."""
        target = self.folder / step_name(step)

        def look() -> bool:
            self._check_owner()
            return has_commit(target)

        committed = self._ranks.from_first(doing, look)
        return target if committed and not self._damage(doing, target) else None

    def _check_owner(self) -> None:
        if self._lease is not None:
            check_lease(self.folder.parent, self._lease)

    def _begin(self, step: int) -> Attempt:
        attempt = Attempt(self.folder, step, new_attempt(self._lease), self._lease)
        attempt.check_owner()
        recover(self.folder)
        attempt.create()
        return attempt

    def _write(
        self, doing: str, attempt: Attempt, tensors: Mapping[str, Held]
    ) -> tuple[dict[str, FileRecord], Contents]:
        """Make every rank's tensors durable: the files of all ranks, and (on the first rank) what they hold."""
        writer = ShardWriter(
            attempt.folder, self._ranks.rank, pinned=device_of(tensors).type == "cuda", progress=self._progress
        )
        self._plan_and(
            doing,
            lambda options: dcp.save(_detached(tensors), storage_writer=writer, planner=PiecePlanner(), **options),
        )

        def report() -> dict[str, FileRecord]:
            if isinstance(writer.failure, FileNotFoundError):
                attempt.check_owner()
            _reraise(writer.failure)
            return writer.files

        shares = self._ranks.together(doing, report)
        return {name: record for share in shares for name, record in share.items()}, writer.contents

    def _damage(self, doing: str, path: Path) -> list[Damage]:
        """What is wrong with a checkpoint: every rank looks at names and sizes, and reads its share of the blocks."""

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
            found = self._ranks.together(doing, check)
        if len({attempt for attempt, _ in found}) > 1:
            blind = next(rank for rank, (attempt, _) in enumerate(found) if attempt != found[0][0])
            raise BadInput(
                f"{doing}: rank {blind} does not see the {path} that rank 0 sees; "
                "the run folder must be on storage that all hosts share"
            )
        damage = list(dict.fromkeys(each for _, share in found for each in share))
        if not damage:
            self._good.add(path)
        return damage

    def _plan_and(self, doing: str, work: Callable[[dict[str, Any]], object]) -> None:
        """Let DCP plan and move the bytes; what fails in our reader or writer is kept there, for the ranks to share."""
        options = {"no_dist": True} if self._ranks.alone else {"process_group": self._ranks.group}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            self._ranks.common(doing, lambda: work(options))

    def _retain(self, keep: int) -> list[Path]:
        self._check_owner()
        recover(self.folder)
        committed = [path for path in reversed(steps_in(self.folder)) if has_commit(path)]
        newest_good = next((path for path in committed if path in self._good or not verify(path, self._run_id)), None)
        deleted = delete_beyond(self.folder, keep, newest_good)
        remove_stale(self.folder, None if self._lease is None else self._lease.epoch)
        return deleted


def _names_up_to(at_most: int | None, paths: Sequence[Path]) -> list[str]:
    return [path.name for path in paths if at_most is None or candidate_step(path) <= at_most]


def _detached(tensors: Mapping[str, Held]) -> dict[str, Any]:
    """The same memory without gradients, so that filling it in place is no operation of autograd's."""
    return {name: tensor.detach() if isinstance(tensor, Tensor) else Boxed(tensor) for name, tensor in tensors.items()}


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
