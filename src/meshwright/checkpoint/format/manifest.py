"""Reads and writes the two files that make a folder a checkpoint: `manifest.json`, and `COMMITTED` with its digest.

The manifest has the size of every other file, and a digest of each of its blocks.
This module does not import torch, so that the launcher and the command line start quickly.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import xxhash

from meshwright.checkpoint.format.files import BLOCK_BYTES, FileRecord, plain_name, read_small, unreadable
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.folder_files import parse_json

FORMAT = 1
"""Version of the contents of a checkpoint folder. A reader refuses any other version."""
MANIFEST = "manifest.json"
"""File with the size of all other files, the digests of their blocks, and facts about the save."""
COMMITTED = "COMMITTED"
"""File with the digest of the manifest. It is written last; a folder without it is no checkpoint."""
CONTENTS = "metadata.json"
"""File that lists the tensors (`contents.py`)."""
STATE = "state.json"
"""File with the step, samples and tokens (`plain_files.py`)."""

_MANIFEST_LIMIT = 1 << 30
_STEP_NAME = re.compile(r"step-(\d{8,12})")
REPLACED = re.compile(r"\.replaced-(step-\d{8,12})\.[0-9a-f]+")
"""Name that a checkpoint gets just before another checkpoint of the same step replaces it."""
_COMMIT_LINE = re.compile(rb"[0-9a-f]{32}\n")
_BLOCK_DIGEST = re.compile(r"[0-9a-f]{16}")

DamageType = Literal["missing", "truncated", "digest", "extra", "manifest", "commit", "foreign", "format"]
"""How a file differs from what was written:

`missing`      the file is not there or is not a regular file
`truncated`    it is shorter than written
`digest`       its contents differ, or cannot be read
`extra`        it is longer than written, or is not in the manifest
`manifest`     manifest.json is invalid
`commit`       COMMITTED is invalid
`foreign`      the checkpoint belongs to another run
`format`       a later release wrote the checkpoint; it is not damaged, but cannot be read
"""


@dataclass(frozen=True)
class Damage:
    """How one file of a checkpoint differs from what was written.

    `offset` is the first byte concerned: the end of the file for `truncated`, the first byte of the first 16 MiB block
    that differs for `digest`, and None if the whole file is missing or extra. `note` is a text for the user.
    """

    file: str
    offset: int | None
    kind: DamageType
    note: str = ""

    def __str__(self) -> str:
        prefix = f"in the {BLOCK_BYTES >> 20} MiB from byte" if self.kind == "digest" else "at byte"
        position = "" if self.offset is None else f" {prefix} {self.offset:,}"
        return f"{self.file}: {self.kind}{position}" + (f" ({self.note})" if self.note else "")


class DamagedCheckpoint(Damaged):
    """The error for a checkpoint that does not match its manifest. `damage` lists the differences."""

    def __init__(self, path: Path, damage: Sequence[Damage]) -> None:
        self.damage = tuple(damage)
        more = f" and {len(self.damage) - 5} more" if len(self.damage) > 5 else ""
        state = "does not belong here" if all(entry.kind == "foreign" for entry in self.damage) else "is damaged"
        super().__init__(f"checkpoint {path} {state}: {'; '.join(map(str, self.damage[:5]))}{more}")


class NewerFormat(BadInput):
    """The error for a checkpoint that a later release wrote in a format that this release cannot read.

    `damage` says the same for functions that return lists of damage.
    """

    def __init__(self, path: Path, damage: Sequence[Damage]) -> None:
        self.damage = tuple(damage)
        super().__init__(
            f"checkpoint {path} is of a newer format: {self.damage[0].note}; use the release that wrote it. No older "
            "checkpoint is used instead"
        )


@dataclass(frozen=True)
class CheckpointManifest:
    """The contents of `manifest.json`: what was saved and by whom, and the records of all other files but COMMITTED.

    `step` is the training step, `world_size` the number of ranks. `attempt` names the save (`checkpoint.write.attempt`).
    `written` is its time (UTC, ISO 8601). `versions` are versions of packages by name. `files` has a record of each file.
    """

    step: int
    world_size: int
    attempt: str
    written: str
    versions: dict[str, str]
    files: dict[str, FileRecord]
    run_id: str | None = None
    """Id of the run that wrote the checkpoint; None in a run folder without a lease (`durable.lease`)."""
    epoch: int | None = None
    """Number of the start (launch) of the run that wrote the checkpoint; None without a lease."""
    parent: int | None = None
    """Step of the checkpoint from which that start continued; None for the first start of a run."""
    finite: bool | None = None
    """Whether the step's loss and gradient norm were finite; None if no training step was checked."""
    seconds: dict[str, float] | None = None
    """Duration of each phase of the save (`staging`, `writing`, `commit`) in seconds; None if not measured."""

    @property
    def total_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def encode(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        return (json.dumps({"format": FORMAT, "block_bytes": BLOCK_BYTES, **asdict(self)}, indent=1) + "\n").encode()


def tensor_file(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"tensors-{rank:05d}.safetensors"


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint folder: `step-00000100`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint folder's name, or None for another name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoint folders in `folder`, committed or not, by step; empty when `folder` does not exist."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if step_of(path.name) is not None and path.is_dir()]
    return sorted(paths, key=lambda path: step_of(path.name) or 0)


def candidates(checkpoints: Path) -> list[Path]:
    """Return the folders to resume from, newest first.

    A checkpoint is renamed just before another one of the same step replaces it. If a crash has prevented the
    replacement, the renamed folder is included.
    """
    path_of = {path.name: path for path in steps_in(checkpoints)}
    for path, match in matching(checkpoints, REPLACED):
        path_of.setdefault(match[1], path)
    return [path_of[name] for name in sorted(path_of, key=lambda name: step_of(name) or 0, reverse=True)]


def candidate_step(path: Path) -> int | None:
    """Return the step in the name of a folder that `candidates` returned; None for any other name."""
    match = REPLACED.fullmatch(path.name)
    return step_of(match[1] if match else path.name)


def matching(checkpoints: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """Return the entries of a folder whose names match a pattern, with the match, by name; empty when the folder does not exist."""
    if not checkpoints.is_dir():
        return []
    pairs = ((path, pattern.fullmatch(path.name)) for path in sorted(checkpoints.iterdir()))
    return [(path, match) for path, match in pairs if match is not None]


def has_commit(path: Path) -> bool:
    """Return whether the folder has a COMMITTED file, or this cannot be found out. `verify` checks its contents."""
    try:
        os.lstat(path / COMMITTED)
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def commit_line(manifest: bytes) -> bytes:
    """Return the contents of COMMITTED for the bytes of `manifest.json`: their xxh3_128 digest in hexadecimal."""
    return xxhash.xxh3_128(manifest).hexdigest().encode() + b"\n"


def read_manifest(path: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint in folder `path`.

    Raises DamagedCheckpoint if COMMITTED or manifest.json is missing or unreadable, or if they do not match; NewerFormat
    if a later release wrote it; BadInput if `path` is not a folder.
    """
    return parse_manifest(path, read_committed(path))


def read_committed(path: Path) -> bytes:
    """Return the bytes of `manifest.json` after comparing them with the digest in COMMITTED.

    Raises DamagedCheckpoint and BadInput like `read_manifest`.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; expected a checkpoint such as RUN/checkpoints/{step_name(100)}")
    commit = _read(path, COMMITTED, 64, "commit")
    data = _read(path, MANIFEST, _MANIFEST_LIMIT, "manifest")
    if not _COMMIT_LINE.fullmatch(commit):
        raise DamagedCheckpoint(path, [Damage(COMMITTED, 0, "commit", "is not a digest")])
    if commit != commit_line(data):
        raise DamagedCheckpoint(path, [Damage(MANIFEST, 0, "manifest", "does not match COMMITTED")])
    return data


def parse_manifest(path: Path, data: bytes) -> CheckpointManifest:
    """Parse `data`, the contents of `manifest.json` in the folder `path`.

    Raises DamagedCheckpoint if it is invalid, and NewerFormat if a later release wrote it.
    """
    try:
        table = parse_json(data, path / MANIFEST, own=True)
        check_format(table, path, MANIFEST)
        manifest = _parse(table, path / MANIFEST)
    except Damaged as error:
        raise DamagedCheckpoint(path, [Damage(MANIFEST, 0, "manifest", str(error))]) from error
    # The folder may have the name that `SaveAttempt.commit` gives to a checkpoint that is about to be replaced.
    step_in_name = step_of(path.name.removeprefix(".replaced-").partition(".")[0])
    if step_in_name not in (None, manifest.step):
        raise DamagedCheckpoint(path, [Damage(MANIFEST, 0, "manifest", f"is that of step {manifest.step}")])
    return manifest


def check_format(table: Any, path: Path, file: str) -> None:
    """Raise NewerFormat if `table`, the parsed JSON file `file` of the checkpoint `path`, has a later format than FORMAT."""
    version = table.get("format") if isinstance(table, dict) else None
    if not _is_whole_number(version) or version <= FORMAT:
        return
    versions = table.get("versions")
    release = versions.get("meshwright") if isinstance(versions, dict) else None
    writer = f", written by meshwright {release:.40}" if isinstance(release, str) else ""
    note = f"format {version}{writer}; this release reads format {FORMAT}"
    raise NewerFormat(path, [Damage(file, 0, "format", note)])


def read_own_manifest(path: Path, run_id: str | None) -> CheckpointManifest:
    """Return the manifest of a checkpoint of the run `run_id`; raises errors like `read_manifest`.

    Raises DamagedCheckpoint with damage `foreign` for a checkpoint of another run. A manifest without a run id passes, and
    every manifest passes if `run_id` is None.
    """
    manifest = read_manifest(path)
    check_run(path, manifest, run_id)
    return manifest


def check_run(path: Path, manifest: CheckpointManifest, run_id: str | None) -> None:
    """Raise DamagedCheckpoint, with damage `foreign`, when the manifest names another run than `run_id`."""
    if run_id is not None and manifest.run_id not in (None, run_id):
        note = f"it was written by run {manifest.run_id}, this folder is that of run {run_id}"
        raise DamagedCheckpoint(path, [Damage(MANIFEST, 0, "foreign", note)])


def _read(path: Path, name: str, limit: int, damage_type: DamageType) -> bytes:
    """Return the file `name`, of at most `limit` bytes. Raises DamagedCheckpoint with `damage_type` if it is unreadable."""
    try:
        return read_small(path / name, limit)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, [Damage(name, None, "missing")]) from error
    except Damaged as error:
        raise DamagedCheckpoint(path, [Damage(name, 0, damage_type, str(error))]) from error
    except OSError as error:
        if not unreadable(error):
            raise
        raise DamagedCheckpoint(path, [Damage(name, 0, damage_type, f"unreadable: {error.strerror}")]) from error


def _parse(data: Any, path: Path) -> CheckpointManifest:
    """Return the manifest in the JSON value `data`.

    Every field is checked, because a digest does not prove who wrote the file.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("block_bytes") != BLOCK_BYTES:
        version = data.get("format") if isinstance(data, dict) else data
        raise Damaged(f"{path}: this version cannot read format {version!r:.40} (expected {FORMAT})")
    step, world_size, file_entries, versions = (data.get(key) for key in ("step", "world_size", "files", "versions"))
    attempt, written, run_id, epoch = (data.get(key) for key in ("attempt", "written", "run_id", "epoch"))
    numbers_valid = _is_whole_number(step) and _is_whole_number(world_size)
    tables_valid = isinstance(file_entries, dict) and isinstance(versions, dict)
    if not (numbers_valid and tables_valid and isinstance(attempt, str) and isinstance(written, str)):
        raise Damaged(f"{path}: step, world_size, attempt, written, versions or files is missing or of the wrong type")
    if not (run_id is None or plain_name(run_id)) or not (epoch is None or _is_whole_number(epoch)):
        raise Damaged(f"{path}: run_id is not a plain name, or epoch not a whole number")
    parent, finite, seconds = (data.get(key) for key in ("parent", "finite", "seconds"))
    if not (parent is None or _is_whole_number(parent)) or not (finite is None or isinstance(finite, bool)):
        raise Damaged(f"{path}: parent is not a step, or finite not a boolean")
    if not (seconds is None or _is_duration_table(seconds)):
        raise Damaged(f"{path}: seconds is not a table of durations")
    files = {name: _parse_record(name, entry, path) for name, entry in file_entries.items()}
    return CheckpointManifest(
        step, world_size, attempt, written, versions, files, run_id, epoch, parent, finite, seconds
    )


def _parse_record(name: str, entry: Any, path: Path) -> FileRecord:
    """Return the record of file `name` in the JSON value `entry`. Raises Damaged if it is invalid."""
    if plain_name(name) is None or name in (MANIFEST, COMMITTED):
        raise Damaged(f"{path}: {name!r:.80} is not a plain file name")
    size, blocks = (entry.get(key) if isinstance(entry, dict) else None for key in ("bytes", "blocks"))
    if not _is_whole_number(size) or not isinstance(blocks, list):
        raise Damaged(f"{path}: the record of {name} lacks bytes or blocks")
    if len(blocks) != -(-size // BLOCK_BYTES) or not all(_is_digest(block) for block in blocks):
        raise Damaged(f"{path}: the blocks of {name} do not fit its {size} bytes")
    return FileRecord(size, tuple(blocks))


def _is_whole_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_duration_table(value: Any) -> TypeGuard[dict[str, float]]:
    return isinstance(value, dict) and all(
        isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds < math.inf
        for seconds in value.values()
    )


def _is_digest(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and _BLOCK_DIGEST.fullmatch(value) is not None
