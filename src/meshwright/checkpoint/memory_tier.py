"""The memory tier: the newest complete snapshot in the arenas of the hosts, loaded without storage.

An arena outlives its rank in a memfd that the launcher keeps (`checkpoint.arena`). Its snapshot counts if every rank has
its part of the same save, with the number of ranks that saved it. Blocks are verified with the digests of the file that
the writer wrote from the arena. Each rank reads its own arena and sends blocks that other ranks need (replicas, tied
weights) as a load from storage does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.arena import DATA_OFFSET, Arena
from meshwright.checkpoint.block_reader import BlockFiles
from meshwright.checkpoint.files import BLOCK_BYTES, FileRecord, read_range
from meshwright.checkpoint.header import TensorHeader, encode_header
from meshwright.checkpoint.load import OpenCheckpoint, load_tensors
from meshwright.checkpoint.manifest import STATE, Manifest, step_name
from meshwright.checkpoint.ranks import Ranks
from meshwright.checkpoint.snapshot_record import SnapshotRecord
from meshwright.checkpoint.state import decode_state
from meshwright.checkpoint.storage import shard_name
from meshwright.checkpoint.writer import decoded_contents
from meshwright.events.span import Recorder
from meshwright.spec.errors import Damaged
from meshwright.state.parts import StateParts

WRITER_SECONDS, POLL_SECONDS = 5.0, 0.02
"""How long a rank waits for the writer of its predecessor that makes no progress, and between two looks at it."""

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class MemorySnapshot:
    """A snapshot that is complete in the arenas of all ranks; this rank's is `arena`."""

    arena: Arena
    record: SnapshotRecord
    file_bytes: tuple[int | None, ...]
    """Bytes of each rank's file, in rank order; None for a rank without a file."""
    contents: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.record.step

    def load(
        self,
        ranks: Ranks,
        tensors: Mapping[str, Tensor | StateParts],
        recorder: Recorder,
        device_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Fill `tensors` and return the run's state. Collective over `ranks`; `device_group` as in `load_tensors`.

        Raises Damaged on all ranks if a block on any does not match its digest; then no rank offers this snapshot again.
        """
        blocks = self._blocks()
        opened = OpenCheckpoint(blocks.path, blocks.manifest, decoded_contents(dict(self.contents)), dict(self.state))
        owners = {shard_name(rank): rank for rank in range(ranks.size)}
        try:
            load_tensors(
                ranks, opened, tensors, recorder, prefix="", convert=False, activity=f"loading {blocks.path}",
                device_group=device_group, files=blocks, owners=owners,
            )  # fmt: skip
        except Damaged:
            self.arena.begin_snapshot()
            raise
        return opened.state

    def verify(self, ranks: Ranks) -> None:
        """Raise Damaged on all ranks if a block on any does not match its digest; nothing is filled. Collective."""
        blocks, buffer = self._blocks(), bytearray(BLOCK_BYTES)

        def check() -> None:
            for index in range(0 if self.record.file is None else len(self.record.file.blocks)):
                file = shard_name(self.record.rank)
                blocks.read(file, index, memoryview(buffer)[: blocks.block_bytes(file, index)])

        try:
            ranks.run_on_all(f"verifying {blocks.path}", check)
        except Damaged:
            self.arena.begin_snapshot()
            raise

    def _blocks(self) -> _ArenaFile:
        files = {
            shard_name(rank): FileRecord(size, "", ())  # each rank verifies its own file only
            for rank, size in enumerate(self.file_bytes)
            if size is not None
        }
        if self.record.file is not None:
            files[shard_name(self.record.rank)] = self.record.file
        manifest = Manifest(self.step, len(self.file_bytes), self.record.attempt, "", {}, files)
        return _ArenaFile(Path(f"host memory of {step_name(self.step)}"), manifest, self.arena, self.record.headers)


def find_snapshot(ranks: Ranks, run_id: str | None) -> MemorySnapshot | None:
    """The snapshot that the arenas of all ranks hold; None if any of them has none, or that of another save. Collective."""
    activity = "looking for a snapshot in host memory"
    arena = Arena.of_last_process()
    record = None if arena is None else _own_record(arena, ranks, run_id)

    def offer() -> tuple[str, int, int | None] | None:
        return None if record is None else (record.attempt, record.step, record.file.bytes if record.file else None)

    offers = ranks.run_on_all(activity, offer)
    complete = [offer for offer in offers if offer is not None]
    if arena is None or record is None or len({offer[:2] for offer in complete}) != 1 or len(complete) < ranks.size:
        if complete and ranks.is_first:
            log.info("%d of %d ranks have a snapshot in host memory; it is not used", len(complete), ranks.size)
        if arena is not None:
            arena.close()
        return None
    contents, text = ranks.run_on_first(activity, lambda: (record.contents, record.state or "{}"))
    state = decode_state(text.encode(), Path(STATE))
    return MemorySnapshot(arena, record, tuple(size for _, _, size in complete), contents, state)


def _own_record(arena: Arena, ranks: Ranks, run_id: str | None) -> SnapshotRecord | None:
    """The record of this rank's arena, if it is of this run and of a job of as many ranks. Waits for a writer that works."""
    _await_writer(arena)
    data = arena.read_record()
    record = None if data is None else SnapshotRecord.decode(data)
    same = record is not None and (record.run_id, record.rank, record.ranks) == (run_id, ranks.rank, ranks.size)
    return record if same else None


def _await_writer(arena: Arena) -> None:
    """Return once no writer of an earlier process completes the record of the snapshot, or none makes progress."""
    seen, since = -1, time.monotonic()
    while (written := arena.saved_bytes) is not None and time.monotonic() - since < WRITER_SECONDS:
        if written != seen:
            seen, since = written, time.monotonic()
        time.sleep(POLL_SECONDS)


class _ArenaFile(BlockFiles):
    """This rank's file as its header and arena make it; the rank reads no other."""

    def __init__(self, path: Path, manifest: Manifest, arena: Arena, headers: list[Any]) -> None:
        super().__init__(path, manifest)
        self._arena = arena
        self._header = encode_header([TensorHeader(key, dtype, tuple(shape)) for key, dtype, shape in headers])

    def read_header(self, file: str, read: Callable[[int, Path], bytes]) -> bytes:
        del file, read
        return self._header

    def read_unverified(self, file: str, offset: int, target: memoryview) -> None:
        header = self._header[offset : offset + len(target)]
        target[: len(header)] = header
        start = offset + len(header) - len(self._header)
        # Copied by the kernel, which unlike a copy in Python lets other threads copy meanwhile.
        read_range(self._arena.descriptor, target[len(header) :], DATA_OFFSET + start, self.path)
