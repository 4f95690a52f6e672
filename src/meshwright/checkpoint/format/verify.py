"""Finds and verifies checkpoints: file names and sizes, then the contents block by block in parallel.

A block is a consecutive part of a file (16 MiB, `files.BLOCK_BYTES`), and the manifest has a digest of each block. The
command `checkpoint verify`, the launcher and loading ranks use these functions. A checkpoint is good if it is committed
and every checked byte matches its digest.

This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from meshwright.checkpoint.format.digests import block_digest
from meshwright.checkpoint.format.files import BLOCK_BYTES, open_regular, read_range, read_small, unreadable
from meshwright.checkpoint.format.manifest import (
    COMMITTED,
    MANIFEST,
    CheckpointManifest,
    Damage,
    DamagedCheckpoint,
    NewerFormat,
    candidate_step,
    candidates,
    has_commit,
    read_manifest,
    read_own_manifest,
    steps_in,
)
from meshwright.durable.lease import LEASE, read_lease
from meshwright.spec.errors import BadInput, Damaged, nearest
from meshwright.spec.host_limits import usable_cores

MAX_THREADS = 8
"""Maximum number of threads that read in one process. More were not faster on the disks measured. Each takes memory for one block."""


def verify(path: Path, run_id: str | None = None) -> list[Damage]:
    """Return the damage of the checkpoint in folder `path`. An empty list means that every byte matches its digest.

    If `run_id` is given, a checkpoint of another run counts as damaged (`foreign`). Raises BadInput if `path` is not a
    folder.
    """
    return damage_of(path, run_id, contents=True)


def damage_of(path: Path, run_id: str | None, *, contents: bool) -> list[Damage]:
    """Return the damage as `verify` does. Without `contents` only names, sizes and the manifest are checked."""
    try:
        manifest = read_own_manifest(path, run_id)
    except (DamagedCheckpoint, NewerFormat) as error:
        return list(error.damage)
    damage = check_sizes(path, manifest)
    return damage + (check_blocks(path, manifest, blocks_to_check(manifest, damage)) if contents else [])


def list_checkpoints(folder: Path, *, contents: bool = True) -> list[dict[str, Any]]:
    """Return records of the checkpoints in `folder`, oldest first.

    `folder` is a run folder, its `checkpoints` folder, or a single checkpoint. A record is
    `{path, step, committed, ok, damaged: [{file, offset, kind}]}`. `contents=False` checks only names, sizes and the
    manifest, which is quick. `ok` is false for a folder that was never committed, because nothing loads it.
    """
    run_id = run_id_of(folder)
    return [_checkpoint_record(path, contents, run_id) for path in find_checkpoints(folder)]


def run_id_of(folder: Path) -> str | None:
    """Return the run id in the lease of a run folder; None without a lease.

    `folder` is the run folder, its `checkpoints` folder, or a checkpoint in it. The lease is a file that names the run
    and the start (one launch of the run) that currently owns the folder.
    """
    folder = folder.parent if candidate_step(folder) is not None else folder
    run = folder.parent if folder.name == "checkpoints" else folder
    lease = read_lease(run) if (run / LEASE).is_file() else None
    return None if lease is None else lease.run_id


def newest_commit(checkpoints: Path) -> tuple[str, int] | None:
    """Return (run id, epoch) from the newest manifest that has both, or None.

    The epoch is the number of the start (launch) of the run that wrote the checkpoint.
    """
    for path in reversed(steps_in(checkpoints)):
        with suppress(DamagedCheckpoint, NewerFormat):
            manifest = read_manifest(path)
            if manifest.run_id is not None and manifest.epoch is not None:
                return manifest.run_id, manifest.epoch
    return None


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders in `folder`, oldest first. `folder` is one that `list_checkpoints` takes.

    Raises BadInput if it is not a folder.
    """
    if not folder.is_dir():
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = nearest(folder.name, siblings)
        raise BadInput(f"{folder} is not a folder" + (f"; nearest: {folder.parent / hint}" if hint else ""))
    if has_commit(folder) or candidate_step(folder) is not None:
        return [folder]
    return candidates(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)[::-1]


def check_sizes(path: Path, manifest: CheckpointManifest) -> list[Damage]:
    """Return the damage of files that are missing, too short, too long, or not in the manifest."""
    damage: list[Damage] = []
    try:
        with os.scandir(path) as entries:
            unexpected = {entry.name: entry for entry in entries}
    except OSError as error:
        if not unreadable(error):
            raise
        return [Damage(".", None, "missing", f"the folder cannot be listed: {error.strerror}")]
    for name, record in manifest.files.items():
        entry = unexpected.pop(name, None)
        if entry is None or not entry.is_file(follow_symlinks=False):
            damage.append(Damage(name, None, "missing", "" if entry is None else "not a regular file"))
            continue
        size = entry.stat(follow_symlinks=False).st_size
        if size < record.bytes:
            damage.append(Damage(name, size, "truncated", f"{record.bytes} bytes were written"))
        elif size > record.bytes:
            damage.append(Damage(name, record.bytes, "extra", f"{size - record.bytes} bytes more than were written"))
    return damage + [
        Damage(name, None, "extra", "not in the manifest") for name in unexpected if name not in (MANIFEST, COMMITTED)
    ]


@dataclass(frozen=True)
class FileBlock:
    """Block number `index` of a file. Ranks and threads divide the verification of a checkpoint into blocks."""

    file: str
    index: int


def blocks_to_check(manifest: CheckpointManifest, known_damage: Sequence[Damage] = ()) -> list[FileBlock]:
    """Return all blocks of the files without `known_damage`, in the order of the manifest."""
    skipped = {damage.file for damage in known_damage}
    files = ((name, record) for name, record in manifest.files.items() if name not in skipped)
    return [FileBlock(name, index) for name, record in files for index in range(len(record.blocks))]


def check_blocks(path: Path, manifest: CheckpointManifest, blocks: Sequence[FileBlock]) -> list[Damage]:
    """Read `blocks` with several threads. Return the first damaged block of each file."""

    def check(block: FileBlock) -> Damage | None:
        return _check_block(path, manifest, block)

    with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(blocks), usable_cores()))) as pool:
        damaged_blocks = [damage for damage in pool.map(check, blocks) if damage is not None]
    first_of_file: dict[str, Damage] = {}
    for damage in sorted(damaged_blocks, key=lambda damage: damage.offset or 0):
        first_of_file.setdefault(damage.file, damage)
    return list(first_of_file.values())


def read_verified(path: Path, manifest: CheckpointManifest, file: str, limit: int) -> bytes:
    """Read a small file of the checkpoint at `path`, and compare it with its digests.

    Raises DamagedCheckpoint if it differs from what was written, and Damaged if it has more than `limit` bytes.
    """
    try:
        data = read_small(path / file, limit)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, [Damage(file, None, "missing")]) from error
    except OSError as error:
        if not unreadable(error):
            raise
        raise DamagedCheckpoint(path, [Damage(file, 0, "digest", f"unreadable: {error.strerror}")]) from error
    record = manifest.files[file]
    if len(data) != record.bytes:
        raise DamagedCheckpoint(
            path, [Damage(file, min(len(data), record.bytes), "truncated", "changed while it was read")]
        )
    for index, digest in enumerate(record.blocks):
        start = index * BLOCK_BYTES
        if xxhash.xxh3_64(memoryview(data)[start : start + BLOCK_BYTES]).hexdigest() != digest:
            raise DamagedCheckpoint(path, [Damage(file, start, "digest")])
    return data


def _check_block(path: Path, manifest: CheckpointManifest, block: FileBlock) -> Damage | None:
    """Return the damage of one block, or None if it matches its digest."""
    record = manifest.files[block.file]
    offset = block.index * BLOCK_BYTES
    data = bytearray(min(BLOCK_BYTES, record.bytes - offset))
    try:
        descriptor = open_regular(path / block.file)
        try:
            read_range(descriptor, data, offset, path / block.file)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, Damaged) as error:
        return Damage(block.file, offset, "digest", f"changed while it was verified: {error}")
    except OSError as error:
        if not unreadable(error):
            raise
        return Damage(block.file, offset, "digest", f"unreadable: {error.strerror}")
    same = block_digest(memoryview(data)) == record.blocks[block.index]
    return None if same else Damage(block.file, offset, "digest")


def _checkpoint_record(path: Path, contents: bool, run_id: str | None) -> dict[str, Any]:
    """Return the record of one checkpoint; see `list_checkpoints`."""
    damage = damage_of(path, run_id, contents=contents)
    damaged = [{"file": entry.file, "offset": entry.offset, "kind": entry.kind} for entry in damage]
    step = candidate_step(path)
    committed = has_commit(path)
    if step is None and not damage:
        step = read_manifest(path).step
    return {"path": str(path), "step": step, "committed": committed, "ok": not damage, "damaged": damaged}
