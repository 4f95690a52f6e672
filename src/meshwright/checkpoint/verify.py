"""Is this checkpoint what was written? Names and sizes at once, contents block by block in parallel.

Torch-free: `checkpoint verify`, the launcher and every loading rank use the same few functions.
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

from meshwright.checkpoint.files import BLOCK_BYTES, open_regular, read_range, read_small, unreadable
from meshwright.checkpoint.manifest import (
    COMMITTED,
    MANIFEST,
    Damage,
    DamagedCheckpoint,
    Manifest,
    has_commit,
    read_manifest,
    read_own_manifest,
    step_name,
    step_of,
    steps_in,
)
from meshwright.durable.lease import LEASE, read_lease
from meshwright.spec.errors import BadInput, Damaged, nearest

MAX_THREADS = 8
"""Readers of one process; more gain nothing on the disks we know and take memory (one block each)."""


def verify(path: Path, run_id: str | None = None) -> list[Damage]:
    """Everything wrong with the checkpoint in `path`; empty means every byte is what was written.

    With `run_id`, a checkpoint of another run is `foreign`. Raises BadInput when `path` is not a folder.
    """
    try:
        manifest = read_own_manifest(path, run_id)
    except DamagedCheckpoint as error:
        return list(error.damage)
    damage = check_sizes(path, manifest)
    return damage + check_blocks(path, manifest, blocks_to_check(manifest, damage))


def list_checkpoints(folder: Path, *, contents: bool = True) -> list[dict[str, Any]]:
    """The checkpoints a run folder, its `checkpoints` folder or one checkpoint's own folder holds, oldest first.

    Each as `{path, step, committed, ok, damaged: [{file, offset, kind}]}`. `contents=False` trusts the digests and
    looks at names, sizes and the manifest only, which is quick. `ok` is false for a folder that was never committed:
    nothing loads it.
    """
    run_id = run_id_of(folder)
    return [_checkpoint_record(path, contents, run_id) for path in find_checkpoints(folder)]


def run_id_of(folder: Path) -> str | None:
    """The run that a run folder or its `checkpoints` folder belongs to, by its lease; None for a checkpoint's own folder."""
    run = folder.parent if folder.name == "checkpoints" else folder
    lease = read_lease(run) if (run / LEASE).is_file() else None
    return None if lease is None else lease.run_id


def newest_checkpoint(folder: Path, *, contents: bool = True) -> Path:
    """The newest good checkpoint that a run folder, a `checkpoints` folder or a checkpoint's own folder stands for.

    `contents=False` looks at names and sizes only; reading verifies what it reads anyway. Raises BadInput when there is
    none, Damaged when all of them are.
    """
    records = list_checkpoints(folder, contents=contents)
    for record in reversed(records):
        if record["ok"]:
            return Path(record["path"])
    if any(record["committed"] for record in records):
        raise Damaged(f"every checkpoint in {folder} is damaged; `meshwright checkpoint verify {folder}` says where")
    raise BadInput(f"{folder} holds no committed checkpoint")


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint in a run's folder whose names and sizes are right; 0 where there is none."""
    return max((record["step"] for record in list_checkpoints(folder, contents=False) if record["ok"]), default=0)


def newest_commit(checkpoints: Path) -> tuple[str, int] | None:
    """Run id and epoch of the newest checkpoint whose manifest is readable and names them; None where there is none."""
    for path in reversed(steps_in(checkpoints)):
        with suppress(DamagedCheckpoint):
            manifest = read_manifest(path)
            if manifest.run_id is not None and manifest.epoch is not None:
                return manifest.run_id, manifest.epoch
    return None


def where_it_continues(folder: Path) -> str:
    """What the same command does next with the run in `folder`, for people."""
    if step := newest_step(folder):
        return f"the same command (without --fresh) continues after step {step}, from {folder / 'checkpoints' / step_name(step)}"
    return f"there is no checkpoint in {folder} yet; the same command begins at step 1"


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders that `folder` stands for, oldest first: see `list_checkpoints`. Raises BadInput when it is
    no folder.
    """
    if not folder.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = nearest(folder.name, beside)
        raise BadInput(f"{folder} is not a folder" + (f"; nearest: {folder.parent / hint}" if hint else ""))
    if has_commit(folder) or step_of(folder.name) is not None:
        return [folder]
    return steps_in(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)


def check_sizes(path: Path, manifest: Manifest) -> list[Damage]:
    """Files missing, too short, too long, or not in the manifest."""
    damage: list[Damage] = []
    try:
        with os.scandir(path) as entries:
            found = {entry.name: entry for entry in entries}
    except OSError as error:
        if not unreadable(error):
            raise
        return [Damage(".", None, "missing", f"the folder cannot be listed: {error.strerror}")]
    for name, record in manifest.files.items():
        entry = found.pop(name, None)
        if entry is None or not entry.is_file(follow_symlinks=False):
            damage.append(Damage(name, None, "missing", "" if entry is None else "not a regular file"))
            continue
        size = entry.stat(follow_symlinks=False).st_size
        if size < record.bytes:
            damage.append(Damage(name, size, "truncated", f"{record.bytes} bytes were written"))
        elif size > record.bytes:
            damage.append(Damage(name, record.bytes, "extra", f"{size - record.bytes} bytes more than were written"))
    return damage + [
        Damage(name, None, "extra", "not in the manifest") for name in found if name not in (MANIFEST, COMMITTED)
    ]


@dataclass(frozen=True)
class Block:
    """Block `index` of a file: the unit of verification, and of sharing it among ranks."""

    file: str
    index: int


def blocks_to_check(manifest: Manifest, known: Sequence[Damage] = ()) -> list[Block]:
    """Every block of every file that is not already known to be damaged, in file order."""
    skipped = {damage.file for damage in known}
    files = ((name, record) for name, record in manifest.files.items() if name not in skipped)
    return [Block(name, index) for name, record in files for index in range(len(record.blocks))]


def check_blocks(path: Path, manifest: Manifest, blocks: Sequence[Block]) -> list[Damage]:
    """The first wrong block of each file among `blocks`, read by several threads."""

    def check(block: Block) -> Damage | None:
        return _check_block(path, manifest, block)

    with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(blocks), os.cpu_count() or 1))) as pool:
        found = [damage for damage in pool.map(check, blocks) if damage is not None]
    first: dict[str, Damage] = {}
    for damage in sorted(found, key=lambda each: each.offset or 0):
        first.setdefault(damage.file, damage)
    return list(first.values())


class Vouched:
    """The blocks of a checkpoint, each verified the first time it is about to be used. Thread-safe; keeps a few bytes
    per block.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._good: set[Block] = set()

    def need(self, file: str, start: int, end: int) -> None:
        """Bytes `start` to `end` of `file` are about to be used: raises DamagedCheckpoint unless they are what was
        written.
        """
        for index in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            block = Block(file, index)
            if block in self._good:
                continue
            damage = _check_block(self.path, self.manifest, block)
            if damage is not None:
                raise DamagedCheckpoint(self.path, [damage])
            self._good.add(block)

    def small(self, file: str, limit: int) -> bytes:
        """All of a small file, verified."""
        return read_verified(self.path, self.manifest, file, limit)


def read_verified(path: Path, manifest: Manifest, file: str, limit: int) -> bytes:
    """All of a small file, read once; raises DamagedCheckpoint unless it is what was written, and Damaged above `limit` bytes."""
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


def _check_block(path: Path, manifest: Manifest, block: Block) -> Damage | None:
    record, offset = manifest.files[block.file], block.index * BLOCK_BYTES
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
    same = xxhash.xxh3_64(data).hexdigest() == record.blocks[block.index]
    return None if same else Damage(block.file, offset, "digest")


def _checkpoint_record(path: Path, contents: bool, run_id: str | None) -> dict[str, Any]:
    if contents:
        damage = verify(path, run_id)
    else:
        try:
            damage = check_sizes(path, read_own_manifest(path, run_id))
        except DamagedCheckpoint as error:
            damage = list(error.damage)
    plain = [{"file": each.file, "offset": each.offset, "kind": each.kind} for each in damage]
    step, committed = step_of(path.name), has_commit(path)
    if step is None and not damage:
        step = read_manifest(path).step
    return {"path": str(path), "step": step, "committed": committed, "ok": not damage, "damaged": plain}
