"""Copies a run's checkpoints to an object store and back; an index object lists the complete copies. Torch-free.

    <mirror>/<run's name>/checkpoints.json              run id, epoch, and the complete checkpoints; written last
    <mirror>/<run's name>/step-00000100.<attempt>/…     the files of a checkpoint; manifest.json and COMMITTED after all others

An object is never overwritten but for the index, so a broken-off upload leaves objects that nothing refers to.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.checkpoint.format.files import disk_space_error, plain_name
from meshwright.checkpoint.format.inventory import newest_step
from meshwright.checkpoint.format.manifest import (
    COMMITTED,
    MANIFEST,
    CheckpointManifest,
    DamagedCheckpoint,
    commit_line,
    parse_manifest,
    read_manifest,
    step_name,
)
from meshwright.checkpoint.format.verify import verify
from meshwright.checkpoint.mirror.store import MirrorStore
from meshwright.durable.lease import read_lease
from meshwright.durable.writes import publish_folder, sync_file, sync_folder, write_durable
from meshwright.spec.errors import BadInput, CommunicationFailure, Damaged, MeshwrightError, OutOfResources
from meshwright.spec.folder_files import parse_json

log = logging.getLogger(__name__)

INDEX = "checkpoints.json"
INDEX_FORMAT = 1
COPIED = "mirror.json"
"""File in a run's folder that names the newest checkpoint that was copied, and where to."""
FILES_AT_ONCE = 4
START_PATIENCE = 60.0
"""Seconds that the start of a run tries to reach the store."""
DESCRIBE_PATIENCE = 5.0
"""Seconds that a message which only describes the store tries to reach it."""


@dataclass(frozen=True)
class MirrorEntry:
    """A complete checkpoint in the store."""

    step: int
    folder: str


@dataclass(frozen=True)
class MirrorIndex:
    """The contents of the index object; `checkpoints` is ordered by step."""

    run_id: str | None
    epoch: int | None
    checkpoints: tuple[MirrorEntry, ...] = ()


def mirror_url(mirror: str, run_folder: Path) -> str:
    """The URL of the copies of a run's checkpoints below `mirror`, the run's key `checkpoint.mirror`."""
    return f"{mirror.rstrip('/')}/{run_folder.absolute().name}"


def read_index(store: MirrorStore) -> MirrorIndex | None:
    """The index of a run in the store, or None if it does not exist. Raises Damaged when it is invalid."""
    data = store.get_bytes(INDEX)
    if data is None:
        return None
    where = Path(f"{store.url}/{INDEX}")
    table = parse_json(data, where, own=True)
    if isinstance(table, dict) and isinstance(version := table.get("format"), int) and version > INDEX_FORMAT:
        raise BadInput(
            f"{where} is of format {version}, which a later release writes; this one reads format {INDEX_FORMAT}"
        )
    try:
        entries = tuple(MirrorEntry(int(entry["step"]), str(entry["folder"])) for entry in table["checkpoints"])
        index = MirrorIndex(table["run_id"], table["epoch"], tuple(sorted(entries, key=lambda entry: entry.step)))
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{where} is not an index of checkpoints ({error!r})") from error
    if not all(
        plain_name(entry.folder) and entry.folder.startswith(step_name(entry.step)) for entry in index.checkpoints
    ):
        raise Damaged(f"{where} names a folder that is not one of a checkpoint")
    return index


def upload_checkpoint(store: MirrorStore, path: Path, keep: int) -> int:
    """Copy the committed checkpoint at `path` to the store, then delete all but the newest `keep` there; returns its bytes.

    Raises BadInput when the store holds another run's checkpoints or a later start of this run writes there, FileNotFoundError when `path`
    is deleted meanwhile, CommunicationFailure when the store fails for too long.
    """
    manifest = read_manifest(path)
    entry = MirrorEntry(manifest.step, f"{step_name(manifest.step)}.{manifest.attempt}")
    before = _owned_index(store, manifest)
    if entry in before.checkpoints:
        _record_copy(path, store.url, entry.step)
        return 0
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(lambda name: store.put(path / name, f"{entry.folder}/{name}"), manifest.files))
    for name in (MANIFEST, COMMITTED):
        store.put(path / name, f"{entry.folder}/{name}")
    before = _owned_index(store, manifest)
    others = [each for each in before.checkpoints if each.step != entry.step]
    entries = sorted([*others, entry], key=lambda each: each.step)
    after = MirrorIndex(manifest.run_id, manifest.epoch, tuple(entries[-keep:]))
    store.put_bytes((json.dumps({"format": INDEX_FORMAT, **asdict(after)}) + "\n").encode(), INDEX)
    _record_copy(path, store.url, entry.step)
    for old in set(before.checkpoints) - set(after.checkpoints):
        _delete(store, old)
    return manifest.total_bytes


def download_checkpoint(store: MirrorStore, entry: MirrorEntry, checkpoints: Path) -> Path:
    """Copy a checkpoint from the store to `checkpoints`, verified; it becomes visible whole and durable, or not at all.

    Raises Damaged when it is not what was written, OutOfResources when the disk has no room. Only the one writer of a folder calls this.
    """
    target = checkpoints / step_name(entry.step)
    committed, data = (store.get_bytes(f"{entry.folder}/{name}") for name in (COMMITTED, MANIFEST))
    if committed is None or data is None or committed != commit_line(data):
        raise Damaged(f"{store.url}/{entry.folder}: {MANIFEST} or {COMMITTED} is missing or not what was written")
    manifest = parse_manifest(target, data)
    short = disk_space_error(checkpoints, manifest.total_bytes)
    if short is not None:
        raise OutOfResources(short)
    partial = checkpoints / f".{target.name}.{manifest.attempt}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:

        def fetch(name: str) -> None:
            store.get(f"{entry.folder}/{name}", partial / name)
            sync_file(partial / name)

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(fetch, [*manifest.files, MANIFEST, COMMITTED]))
        damage = verify(partial)
        if damage:
            raise DamagedCheckpoint(Path(f"{store.url}/{entry.folder}"), damage)
        sync_folder(partial)
        aside = checkpoints / f".replaced-{target.name}.{manifest.attempt.rpartition('-')[2]}"
        publish_folder(partial, target, aside)
        shutil.rmtree(aside, ignore_errors=True)
    except FileNotFoundError as error:
        raise Damaged(f"{store.url}/{entry.folder}: {error}: an object is missing") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def fetch_newest(
    mirror: str, run_folder: Path, note: Callable[[str], None], *, patience: float = START_PATIENCE
) -> Path | None:
    """Copy the newest complete checkpoint of the mirror to the run's folder if it is newer than all that are complete there.

    `note` hears which of both a start resumes from. What the mirror has, or had by the record in the run's folder, is never taken for
    nothing: Damaged is raised if a newer checkpoint than the local ones was copied and is no longer listed, and without a local one if
    there are copies without an index, an index without checkpoints, or every copy is damaged. A store that cannot be reached is noted
    if no newer checkpoint was copied; otherwise CommunicationFailure is raised. Raises BadInput when the store holds another run.
    """
    url = mirror_url(mirror, run_folder)
    checkpoints = run_folder / "checkpoints"
    local = newest_step(run_folder) if run_folder.is_dir() else 0
    copied = _copied_step(run_folder, url)
    try:
        store = MirrorStore(url, patience=patience)
        index = read_index(store)
    except CommunicationFailure as error:
        if not local:
            raise
        if copied > local:
            raise CommunicationFailure(
                f"{error}; it has the checkpoint of step {copied}, and the newest in {checkpoints} is of step {local}"
            ) from error
        note(f"the mirror cannot be reached ({error}); the newest local checkpoint is of step {local}")
        return None
    lease = read_lease(run_folder)
    listed = index.checkpoints[-1].step if index is not None and index.checkpoints else 0
    if copied > max(listed, local):
        raise Damaged(
            f"{url} had a checkpoint of step {copied} ({run_folder / COPIED}) and "
            + (f"lists none after step {listed}" if listed else f"its index {INDEX} is missing or empty")
            + f"; the newest in {checkpoints} is of step {local}. Bring the store's contents back (is it mounted?); "
            "or go on from what is there with another checkpoint.mirror; or start a new run with --fresh"
        )
    if index is None:
        if not local and (copies := _copies_without_index(store)):
            raise Damaged(
                f"{url} has copies of checkpoints ({', '.join(copies)}) and its index {INDEX} is missing: put the index back, copy a "
                f"checkpoint to {checkpoints}, or start a new run with --fresh"
            )
        if local:
            note(f"resuming from the local checkpoint of step {local}; {url} has no copy of this run yet")
        return None
    if not listed and not local:
        raise Damaged(
            f"{url}/{INDEX} lists no checkpoints, which no run writes: put the index back, copy a checkpoint to {checkpoints}, or "
            "start a new run with --fresh"
        )
    if lease is not None and index.run_id not in (None, lease.run_id):
        raise BadInput(
            f"{url} holds run {index.run_id}, {run_folder} is run {lease.run_id}; choose another name or checkpoint.mirror"
        )
    damaged: list[str] = []
    for entry in reversed(index.checkpoints):
        if entry.step <= local:
            break
        checkpoints.mkdir(parents=True, exist_ok=True)
        try:
            path = download_checkpoint(store, entry, checkpoints)
        except Damaged as error:
            note(f"{error}; trying the next older checkpoint")
            damaged.append(str(error))
            continue
        note(
            f"resuming from step {entry.step} of {url}; "
            + (f"the newest local one is of step {local}" if local else "none is local")
        )
        return path
    if damaged and not local:
        with suppress(OSError):
            checkpoints.rmdir()  # made for a download; it stays if it has something in it
        raise Damaged(
            f"every copy of a checkpoint in {url} is damaged ({'; '.join(damaged)}) and {run_folder} has none; put a good copy into "
            f"{checkpoints}, or start a new run with --fresh"
        )
    if local:
        note(f"resuming from the local checkpoint of step {local}; {url} has none that is newer")
    return None


def has_copies(mirror: str, run_folder: Path, *, patience: float = START_PATIENCE) -> bool:
    """Whether the mirror has copies of a run of this folder's name. Raises CommunicationFailure if that cannot be looked up."""
    store = MirrorStore(mirror_url(mirror, run_folder), patience=patience)
    return store.get_bytes(INDEX) is not None or bool(_copies_without_index(store))


def describe_copies(mirror: str | None, run_folder: Path) -> str:
    """What the mirror has of a run, or why it cannot be read, in words; empty without a mirror."""
    if mirror is None:
        return ""
    url = mirror_url(mirror, run_folder)
    try:
        index = read_index(MirrorStore(url, patience=DESCRIBE_PATIENCE))
    except MeshwrightError as error:
        return f"its mirror cannot be read ({error})"
    if index is None:
        return f"its mirror {url} has no {INDEX}"
    steps = ", ".join(str(entry.step) for entry in reversed(index.checkpoints)) or "none"
    return f"its mirror {url} lists checkpoints of steps {steps}, which a start takes if no local folder is as new"


def _record_copy(path: Path, url: str, step: int) -> None:
    """Write to the folder of a run that its checkpoint at `path` is in the store. A failure is logged: the next copy repeats it."""
    try:
        write_durable(path.parent.parent / COPIED, json.dumps({"url": url, "step": step}) + "\n")
    except OSError as error:
        log.warning("%s is not written: %s", path.parent.parent / COPIED, error)


def _copied_step(run_folder: Path, url: str) -> int:
    """The step of the newest checkpoint that was copied from this folder to `url`; 0 without any. Raises Damaged for a damaged record."""
    try:
        data = (run_folder / COPIED).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    record = parse_json(data, run_folder / COPIED, own=True)
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("url"), str)
        or not isinstance(record.get("step"), int)
    ):
        raise Damaged(f"{run_folder / COPIED}: expected a URL and a step; remove the file if {url} is in order")
    return record["step"] if record["url"] == url else 0


def _copies_without_index(store: MirrorStore) -> list[str]:
    """Names of copies in a store that has no index. A listing may lag behind, so that the newest can be missing."""
    return [name for name in store.names() if name.startswith("step-")]


def _owned_index(store: MirrorStore, manifest: CheckpointManifest) -> MirrorIndex:
    """The index, or an empty one. Raises BadInput if another run or a later start of this run wrote it."""
    index = read_index(store)
    if index is None:
        return MirrorIndex(manifest.run_id, manifest.epoch)
    if index.run_id not in (None, manifest.run_id):
        raise BadInput(f"{store.url} holds checkpoints of run {index.run_id}; this is run {manifest.run_id}")
    if index.epoch is not None and (manifest.epoch or 0) < index.epoch:
        raise BadInput(
            f"{store.url}: a later start of this run writes there (epoch {index.epoch}; this one has {manifest.epoch})"
        )
    return index


def _delete(store: MirrorStore, entry: MirrorEntry) -> None:
    """Delete a checkpoint that is no longer in the index. A failure only wastes space: log it and go on."""
    try:
        data = store.get_bytes(f"{entry.folder}/{MANIFEST}")
        names = parse_manifest(Path(step_name(entry.step)), data).files if data is not None else {}
        for name in (COMMITTED, *names, MANIFEST):
            store.delete(f"{entry.folder}/{name}")
    except (Damaged, BadInput, CommunicationFailure) as error:
        log.warning("%s/%s is not deleted: %s", store.url, entry.folder, error)
