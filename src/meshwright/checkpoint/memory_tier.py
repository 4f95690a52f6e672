"""The memory tier: the newest snapshot that is complete in the memory of the hosts, loaded without storage.

An arena outlives its rank in a memfd that the launcher keeps (`checkpoint.arena`). With `checkpoint.partner: host` each host also keeps
copies of another host's snapshots, and serves all snapshots that it has to ranks of other hosts (`checkpoint.snapshot_transport`).
Snapshots are found by rank, whichever host has them. A save counts if every rank's snapshot of it is found, with the number of ranks that
saved it. Blocks are verified with the digests of the file that the arena makes. Each rank reads its own snapshot and sends blocks that
other ranks need (replicas, tied weights) as a load from storage does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.arena import Arena
from meshwright.checkpoint.block_reader import BlockFiles
from meshwright.checkpoint.file_image import FileImage
from meshwright.checkpoint.files import BLOCK_BYTES, FileRecord
from meshwright.checkpoint.load import OpenCheckpoint, load_tensors
from meshwright.checkpoint.manifest import STATE, Manifest, step_name
from meshwright.checkpoint.ranks import Ranks
from meshwright.checkpoint.snapshot_record import SnapshotName, SnapshotRecord
from meshwright.checkpoint.snapshot_source import (
    ArenaSource,
    RankOffer,
    ServerSource,
    SnapshotLocation,
    SnapshotSource,
    newest_complete,
)
from meshwright.checkpoint.snapshot_transport import SERVER_VARIABLE, SnapshotClient, TransportFailure
from meshwright.checkpoint.state import decode_state
from meshwright.checkpoint.storage import shard_name
from meshwright.checkpoint.writer import decoded_contents
from meshwright.events.span import Recorder
from meshwright.spec.errors import Damaged
from meshwright.spec.job_token import job_token
from meshwright.state.parts import StateParts

WRITER_SECONDS, POLL_SECONDS = 5.0, 0.02
"""How long a rank waits for the writer of its predecessor that makes no progress, and between two looks at it."""
LIST_SECONDS = 10.0
"""How long a rank waits for the list of its host's snapshots."""
MemoryTier = Literal["host memory", "partner memory"]
"""Whether each rank's snapshot is in its own arena, or some come from a snapshot server."""

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class MemorySnapshot:
    """A save whose snapshots of all ranks are complete in memory; this rank reads its own from `source`."""

    source: SnapshotSource
    tier: MemoryTier
    file_bytes: tuple[int | None, ...]
    """Bytes of each rank's file, in rank order; None for a rank without a file."""
    contents: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.source.record.step

    def load(
        self,
        ranks: Ranks,
        tensors: Mapping[str, Tensor | StateParts],
        recorder: Recorder,
        device_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Fill `tensors` and return the run's state. Collective over `ranks`; `device_group` as in `load_tensors`.

        Raises Damaged on all ranks if a block on any cannot be read or does not match its digest; then no arena offers it again.
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
            self.source.discard()
            raise
        return opened.state

    def verify(self, ranks: Ranks) -> None:
        """Raise Damaged on all ranks if a block on any does not match its digest; nothing is filled. Collective."""
        blocks, buffer, record = self._blocks(), bytearray(BLOCK_BYTES), self.source.record

        def check() -> None:
            for index in range(0 if record.file is None else len(record.file.blocks)):
                file = shard_name(record.rank)
                blocks.read(file, index, memoryview(buffer)[: blocks.block_bytes(file, index)])

        try:
            ranks.run_on_all(f"verifying {blocks.path}", check)
        except Damaged:
            self.source.discard()
            raise

    def close(self) -> None:
        """Release the memory or the connections of this rank's source."""
        self.source.close()

    def _blocks(self) -> _SnapshotFile:
        record = self.source.record
        files = {
            shard_name(rank): FileRecord(size, "", ())  # each rank verifies its own file only
            for rank, size in enumerate(self.file_bytes)
            if size is not None
        }
        if record.file is not None:
            files[shard_name(record.rank)] = record.file
        manifest = Manifest(self.step, len(self.file_bytes), record.attempt, "", {}, files)
        return _SnapshotFile(Path(f"{self.tier} of {step_name(self.step)}"), manifest, self.source)


def find_snapshot(ranks: Ranks, run_id: str | None) -> MemorySnapshot | None:
    """The newest save of the run of which every rank's snapshot is in the memory of some host; None without one. Collective."""
    activity = "looking for a snapshot in host memory"
    arena = Arena.of_last_process()
    record = None if arena is None else _record_of(arena)
    own = None if record is None else record.name
    offers = ranks.run_on_all(activity, lambda: RankOffer(own, os.environ.get(SERVER_VARIABLE)))
    if any(offer.address is not None for offer in offers):  # the writers of all ranks have ended
        offers = ranks.run_on_all(activity, lambda: _with_list(offers[ranks.rank]))
    locations = newest_complete(offers, run_id)
    source: SnapshotSource | None = None
    if arena is not None:
        if locations is not None and record is not None and locations[ranks.rank].address is None:
            source = ArenaSource(arena, record)
        else:
            arena.close()
    if locations is None:
        count = len({name.rank for offer in offers for name in (offer.own, *offer.listed) if name is not None})
        if count and ranks.is_first:
            log.info("%d of %d ranks have a snapshot in memory; it is not used", count, ranks.size)
        return None
    return _open(ranks, activity, locations, source)


def _open(
    ranks: Ranks, activity: str, locations: list[SnapshotLocation], source: SnapshotSource | None
) -> MemorySnapshot | None:
    """The snapshot at `locations`; None, with a warning, if a server does not answer.

    `source` is this rank's arena if its snapshot is there.
    """
    opened: list[SnapshotSource] = [] if source is None else [source]

    def open_source() -> int | None:
        location = locations[ranks.rank]
        if location.address is not None:
            opened.append(ServerSource(location.address, job_token(), location.name))
        file = opened[0].record.file
        return None if file is None else file.bytes

    try:
        sizes = ranks.run_on_all(activity, open_source)
    except Damaged as error:
        if ranks.is_first:
            log.warning("%s; storage is used", error)
        for part in opened:
            part.close()
        return None
    own = opened[0].record
    contents, text = ranks.run_on_first(activity, lambda: (own.contents, own.state or "{}"))
    tier: MemoryTier = "host memory" if all(location.address is None for location in locations) else "partner memory"
    return MemorySnapshot(opened[0], tier, tuple(sizes), contents, decode_state(text.encode(), Path(STATE)))


def _with_list(offer: RankOffer) -> RankOffer:
    """The offer of this rank with the snapshots of its host, if it is the first rank there."""
    if offer.address is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return offer
    names: list[SnapshotName] = []
    try:
        client = SnapshotClient(offer.address, job_token(), seconds=LIST_SECONDS)
        names = client.names()
        client.close()
    except TransportFailure as error:
        log.warning("%s", error)
    return RankOffer(offer.own, offer.address, tuple(names))


def _record_of(arena: Arena) -> SnapshotRecord | None:
    """The record of the arena's snapshot. Waits for a writer that works."""
    _await_writer(arena)
    data = arena.read_record()
    return None if data is None else SnapshotRecord.decode(data)


def _await_writer(arena: Arena) -> None:
    """Return once no writer of an earlier process completes the record of the snapshot, or none makes progress."""
    seen, since = -1, time.monotonic()
    while (written := arena.saved_bytes) is not None and time.monotonic() - since < WRITER_SECONDS:
        if written != seen:
            seen, since = written, time.monotonic()
        time.sleep(POLL_SECONDS)


class _SnapshotFile(BlockFiles):
    """This rank's file as its snapshot makes it; the rank reads no other."""

    def __init__(self, path: Path, manifest: Manifest, source: SnapshotSource) -> None:
        super().__init__(path, manifest)
        self._source = source

    def read_header(self, file: str, read: Callable[[int, Path], bytes]) -> bytes:
        del file, read
        return FileImage(self._source.record.headers, memoryview(b"")).header

    def reader(self, file: str) -> Callable[[int, memoryview], object]:
        del file
        return self._source.read
