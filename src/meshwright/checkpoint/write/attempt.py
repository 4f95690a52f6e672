"""Attempts: an attempt writes a checkpoint into a hidden folder and renames the folder when all files are durable.

    .step-00000100.<attempt>.partial/   every file is written here and fsynced, manifest.json and COMMITTED last
    step-00000100/                      the same folder, fsynced and renamed; then the parent is fsynced

Where the run's folder has a lease, the attempt is named EPOCH-RANDOM, and the lease is checked immediately before the rename.

A crash at any point leaves either no `step-` folder or a complete one. Torch-free; only the first rank calls this.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshwright import __version__
from meshwright.checkpoint.format.contents import Contents, check_record, encode_contents
from meshwright.checkpoint.format.files import FileRecord
from meshwright.checkpoint.format.inventory import record_commit
from meshwright.checkpoint.format.manifest import (
    COMMITTED,
    CONTENTS,
    MANIFEST,
    REPLACED,
    CheckpointManifest,
    commit_line,
    has_commit,
    matching,
    step_name,
    steps_in,
)
from meshwright.checkpoint.write.file_writer import write_file
from meshwright.durable.lease import check_lease
from meshwright.durable.writes import publish_folder, rename, sync_folder
from meshwright.spec.errors import BadInput
from meshwright.spec.failures import missing_path_error
from meshwright.spec.run import Lease

_PARTIAL = re.compile(r"\.(step-\d{8,12})\.(?:(\d+)-)?([0-9a-f]+)\.partial")
_DELETED = re.compile(r"\.deleted-step-\d{8,12}\.[0-9a-f]+")

IDLE_SECONDS = 10.0
"""Seconds that `await_writers` waits for a writer without progress."""
AWAIT_POLL_SECONDS = 0.05
"""Seconds between two checks of the writers."""

log = logging.getLogger(__name__)


def new_attempt(lease: Lease | None = None) -> str:
    """A random name for an attempt; with a lease it begins with its epoch, the number of the run's start."""
    return secrets.token_hex(4) if lease is None else f"{lease.epoch}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Provenance:
    """The fields of a manifest that describe the job that wrote it; see `CheckpointManifest`."""

    ranks: int
    torch_version: str
    parent: int | None = None
    finite: bool | None = None
    seconds: dict[str, float] | None = None


class SaveAttempt:
    """The folder of one attempt. Every rank may use `folder`; only the first rank calls `create`, `commit`, `abandon`.

    With a `lease` (the file that names the start that owns the run's folder), commit fails once another start owns it.
    """

    def __init__(self, checkpoints: Path, step: int, name: str, lease: Lease | None = None) -> None:
        self.checkpoints = checkpoints
        self.step = step
        self.name = name
        self.lease = lease
        self.target = checkpoints / step_name(step)
        self.folder = checkpoints / f".{step_name(step)}.{name}.partial"

    def create(self) -> None:
        """Create the attempt's folder, and `checkpoints` if it is missing.

        Raises OutOfResources when the run's folder no longer exists: a new one would have neither configuration nor metrics,
        and might be on another disk.
        """
        if not os.path.isdir(self.checkpoints.parent):
            raise missing_path_error(self.checkpoints.parent)
        if not self.checkpoints.is_dir():
            self.checkpoints.mkdir()
            sync_folder(self.checkpoints.parent)
        self.folder.mkdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock on the folder for a `with` block, so that `await_writers` sees that a writer works on it.

        Does nothing on a file system without locks.
        """
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)

    def commit(
        self,
        shards: dict[str, FileRecord],
        contents: Contents,
        plain: dict[str, bytes],
        provenance: Provenance,
    ) -> CheckpointManifest:
        """Write the remaining files and make the checkpoint visible.

        `shards` are the records of the tensor files, which are durable already, and `contents` the tensors in them.
        `plain` has further files by name. An existing checkpoint of the step is renamed before and removed afterwards;
        `recover` renames it back after a crash in between. Raises Damaged when the shards do not cover a tensor, and
        BadInput when another start of the run has the lease; then nothing becomes visible.
        """
        try:
            return self._commit(shards, contents, plain, provenance)
        except FileNotFoundError:  # the start that took the lease has removed the attempt
            self.check_owner()
            raise

    def check_owner(self) -> None:
        """Raise BadInput when another start of the run has the lease."""
        if self.lease is not None:
            check_lease(self.checkpoints.parent, self.lease)

    def _commit(
        self, shards: dict[str, FileRecord], contents: Contents, plain: dict[str, bytes], provenance: Provenance
    ) -> CheckpointManifest:
        for name, record in contents.items():
            check_record(name, record, self.folder)
        plain = {CONTENTS: encode_contents(contents), **plain}
        files = shards | {name: write_file(self.folder / name, [[data]]) for name, data in plain.items()}
        written = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = CheckpointManifest(
            step=self.step,
            world_size=provenance.ranks,
            attempt=self.name,
            written=written,
            versions={"meshwright": __version__, "torch": provenance.torch_version},
            files=dict(sorted(files.items())),
            run_id=None if self.lease is None else self.lease.run_id,
            epoch=None if self.lease is None else self.lease.epoch,
            parent=provenance.parent,
            finite=provenance.finite,
            seconds=provenance.seconds,
        )
        data = manifest.encode()
        write_file(self.folder / MANIFEST, [[data]])
        write_file(self.folder / COMMITTED, [[commit_line(data)]])
        sync_folder(self.folder)
        displaced = self.checkpoints / f".replaced-{self.target.name}.{self.name.rpartition('-')[2]}"
        self.check_owner()
        publish_folder(self.folder, self.target, displaced)
        if self.lease is not None:
            record_commit(self.checkpoints.parent, self.step)
        _remove(displaced)
        return manifest

    def abandon(self) -> None:
        """Remove the attempt's folder after a failure. If that fails too, `remove_stale` removes it later.

        The folder is renamed first, so that writers of other ranks can add nothing to it any more.
        """
        hidden = self.checkpoints / f".deleted-{self.target.name}.{self.name.rpartition('-')[2]}"
        try:
            rename(self.folder, hidden)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("could not remove %s, left by a failed save: %s; the next retention will", self.folder, error)
            return
        _remove(hidden)


def recover(checkpoints: Path) -> None:
    """Rename back, or remove, checkpoints that a crash left renamed for their replacement.

    Only the writer of the folder may call this, between saves.
    """
    for path, match in matching(checkpoints, REPLACED):
        target = checkpoints / match[1]
        if os.path.lexists(target):
            _remove(path)
        else:
            rename(path, target)
            sync_folder(checkpoints)


def delete_beyond(checkpoints: Path, keep: int, protected: Path | None) -> list[Path]:
    """Delete and return the committed checkpoints older than the newest `keep`, except `protected`."""
    if keep < 1:
        raise BadInput(f"checkpoint.keep is {keep}; at least 1 must be kept")
    committed = [path for path in steps_in(checkpoints) if has_commit(path)]
    outdated = [path for path in committed[:-keep] if path != protected]
    for path in outdated:
        hidden = checkpoints / f".deleted-{path.name}.{new_attempt()}"
        rename(path, hidden)
        _remove(hidden)
    return outdated


def await_writers(checkpoints: Path, idle_seconds: float = IDLE_SECONDS) -> None:
    """Wait while a writer process of an earlier start writes an attempt here and makes progress, so that it can commit.

    Stops waiting for a process that writes nothing for `idle_seconds`: it was stopped, or its storage hangs.
    """
    for folder, _ in matching(checkpoints, _PARTIAL):
        before = -1
        since = time.monotonic()
        while _is_locked(folder) and time.monotonic() - since < idle_seconds:
            written = _bytes_in(folder)
            if written != before:
                before = written
                since = time.monotonic()
            time.sleep(AWAIT_POLL_SECONDS)


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # committed or abandoned meanwhile
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)


def _bytes_in(folder: Path) -> int:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries)
    return 0


def remove_stale(checkpoints: Path, epoch: int | None = None) -> None:
    """Remove unfinished attempts of epochs up to `epoch` (None: all), and folders whose deletion was interrupted.

    Only the writer of the folder may call this, between saves. An attempt is renamed before it is removed: if its
    stopped process continues, its commit finds no folder instead of a partly removed one.
    """
    for path, match in matching(checkpoints, _PARTIAL):
        if epoch is None or int(match[2] or 0) <= epoch:
            with suppress(FileNotFoundError):  # committed meanwhile
                rename(path, checkpoints / f".deleted-{match[1]}.{match[3]}")
    for path, _ in matching(checkpoints, _DELETED):
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a hidden folder. Nothing reads it, so a failure only wastes disk space: log it and go on."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("could not remove %s: %s", path, error)
