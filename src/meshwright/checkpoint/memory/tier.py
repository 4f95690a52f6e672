"""The memory tier: the newest snapshot that is complete in the memory of the hosts, loaded without storage.

A snapshot buffer outlives its rank in a memfd that the launcher keeps (`checkpoint.memory.snapshot_buffer`). With
`checkpoint.partner: host` each host also keeps copies of another host's snapshots: in slots or, of a replica, in the
buffers of its ranks. It serves all of its snapshots to ranks of other hosts (`checkpoint.memory.transport`).

Snapshots are found by run, save and rank. Which host has them does not matter, nor the numbers that ranks and hosts now
have. A save counts if the snapshots of all ranks that saved it are found. Blocks are verified with the digests of the
file that the buffer makes. A rank of the host that has a snapshot reads it and sends the blocks that other ranks need,
as a load from storage does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.format.contents import contents_of
from meshwright.checkpoint.format.files import BLOCK_BYTES, FileRecord
from meshwright.checkpoint.format.manifest import STATE, CheckpointManifest, step_name, tensor_file
from meshwright.checkpoint.format.plain_files import decode_state
from meshwright.checkpoint.memory.file_image import FileImage
from meshwright.checkpoint.memory.record import SnapshotRecord
from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer
from meshwright.checkpoint.memory.source import (
    RankOffer,
    SnapshotLocation,
    SnapshotSource,
    newest_complete,
    open_in_buffer,
    open_on_host,
)
from meshwright.checkpoint.memory.transport import SERVER_VARIABLE, SnapshotClient, TransportFailure
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.read.block_reader import BlockFiles
from meshwright.checkpoint.read.load import OpenCheckpoint, load_tensors
from meshwright.events.span import Recorder
from meshwright.spec.errors import Damaged
from meshwright.spec.job_token import job_token
from meshwright.state.parts import StateParts

WRITER_SECONDS = 5.0
"""How long a rank waits for its predecessor's writer while that makes no progress."""
POLL_SECONDS = 0.02
"""Seconds between two looks at that writer."""
LIST_SECONDS = 10.0
"""How long a rank waits for the list of its host's snapshots."""
MemoryTier = Literal["host memory", "partner memory"]
"""Whether all snapshots are in snapshot buffers of the hosts that made them, or some are copies for a partner host."""

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class MemorySnapshot:
    """A save whose snapshots of all ranks are complete in memory; this rank reads `sources`, by the rank that saved each."""

    step: int
    attempt: str
    sources: Mapping[int, SnapshotSource]
    tier: MemoryTier
    file_bytes: tuple[int | None, ...]
    """Bytes of each saved rank's file, in rank order; None for a rank without a file."""
    readers: tuple[int, ...]
    """The rank that reads each of them."""
    contents: Mapping[str, Any]
    state: Mapping[str, Any]

    def load(
        self,
        ranks: RankGroup,
        tensors: Mapping[str, Tensor | StateParts],
        recorder: Recorder,
        device_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Fill `tensors` and return the run's state. Collective over `ranks`; `device_group` as in `load_tensors`.

        Raises Damaged on all ranks if a block on any cannot be read or does not match its digest; then no buffer offers it again.
        """
        blocks = self._blocks()
        opened = OpenCheckpoint(blocks.path, blocks.manifest, contents_of(self.contents), dict(self.state))
        owners = {tensor_file(rank): reader for rank, reader in enumerate(self.readers)}
        try:
            load_tensors(
                ranks,
                opened,
                tensors,
                recorder,
                prefix="",
                convert=False,
                activity=f"loading {blocks.path}",
                device_group=device_group,
                files=blocks,
                owners=owners,
            )
        except Damaged:
            self._discard()
            raise
        return opened.state

    def verify(self, ranks: RankGroup) -> None:
        """Raise Damaged on all ranks if a block on any does not match its digest; nothing is filled. Collective."""
        blocks = self._blocks()
        buffer = bytearray(BLOCK_BYTES)

        def check() -> None:
            for rank, source in self.sources.items():
                file = tensor_file(rank)
                record = source.record.file
                for index in range(0 if record is None else len(record.blocks)):
                    blocks.read(file, index, memoryview(buffer)[: blocks.block_bytes(file, index)])

        try:
            ranks.run_on_all(f"verifying {blocks.path}", check)
        except Damaged:
            self._discard()
            raise

    def close(self) -> None:
        """Release the memory or the connections of this rank's sources."""
        for source in self.sources.values():
            source.close()

    def _discard(self) -> None:
        for source in self.sources.values():
            source.discard()

    def _blocks(self) -> _SnapshotFiles:
        files = {
            tensor_file(rank): FileRecord(size, ())  # each rank verifies the files that it reads
            for rank, size in enumerate(self.file_bytes)
            if size is not None
        }
        sources = {tensor_file(rank): source for rank, source in self.sources.items()}
        files |= {name: source.record.file for name, source in sources.items() if source.record.file is not None}
        manifest = CheckpointManifest(self.step, len(self.file_bytes), self.attempt, "", {}, files)
        return _SnapshotFiles(Path(f"{self.tier} of {step_name(self.step)}"), manifest, sources)


def find_snapshot(ranks: RankGroup, run_id: str | None) -> MemorySnapshot | None:
    """The newest save of the run of which every rank's snapshot is in the memory of some host; None without one. Collective."""
    activity = "looking for a snapshot in host memory"
    offers = ranks.run_on_all(activity, _own_offer)
    if any(offer.address is not None for offer in offers):  # the writers of all ranks have ended
        offers = ranks.run_on_all(activity, lambda: _with_list(offers[ranks.rank]))
    locations = newest_complete(offers, run_id)
    if locations is None:
        count = len({name.rank for offer in offers for name in offer.names})
        if count and ranks.is_first:
            log.info("%d of %d ranks have a snapshot in memory; it is not used", count, ranks.size)
        return None
    return _open(ranks, activity, locations)


def _open(ranks: RankGroup, activity: str, locations: list[SnapshotLocation]) -> MemorySnapshot | None:
    """The snapshot at `locations`; None, with a warning, if a server does not answer."""
    sources: dict[int, SnapshotSource] = {}

    def open_sources() -> dict[int, int | None]:
        for location in locations:
            if location.reader == ranks.rank:
                sources[location.name.rank] = _open_source(location)
        files = {rank: source.record.file for rank, source in sources.items()}
        return {rank: None if file is None else file.bytes for rank, file in files.items()}

    try:
        sizes = {rank: size for part in ranks.run_on_all(activity, open_sources) for rank, size in part.items()}
    except Damaged as error:
        if ranks.is_first:
            log.warning("%s; storage is used", error)
        for source in sources.values():
            source.close()
        return None

    def describe() -> tuple[dict[str, Any], str]:
        record = sources[0].record
        return record.contents, record.state or "{}"

    contents, text = ranks.run_on(locations[0].reader, activity, describe)
    tier: MemoryTier = "partner memory" if any(location.is_copy for location in locations) else "host memory"
    name = locations[0].name
    readers = tuple(location.reader for location in locations)
    file_bytes = tuple(sizes[location.name.rank] for location in locations)
    state = decode_state(text.encode(), Path(STATE))
    return MemorySnapshot(name.step, name.attempt, sources, tier, file_bytes, readers, contents, state)


def _open_source(location: SnapshotLocation) -> SnapshotSource:
    if location.address is None:
        return open_in_buffer(location.name)
    return open_on_host(location.address, job_token(), location.name)


def _own_offer() -> RankOffer:
    """The snapshots in this rank's snapshot buffer. Waits for a writer that works."""
    address = os.environ.get(SERVER_VARIABLE)
    buffer = SnapshotBuffer.of_last_process()
    if buffer is None:
        return RankOffer(None, address)
    with closing(buffer):
        _await_writer(buffer)
        data = buffer.read_record()
    record = None if data is None else SnapshotRecord.decode(data)
    if record is None:
        return RankOffer(None, address)
    return RankOffer(record.name, address, replica=None if record.replica is None else record.replica.name)


def _with_list(offer: RankOffer) -> RankOffer:
    """The offer of this rank with the snapshots of its host, if it is the first rank there."""
    if offer.address is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return offer
    try:
        with closing(SnapshotClient(offer.address, job_token(), seconds=LIST_SECONDS)) as client:
            listed, copies = client.names()
    except TransportFailure as error:
        log.warning("%s", error)
        return offer
    return replace(offer, listed=tuple(listed), copies=tuple(copies))


def _await_writer(buffer: SnapshotBuffer) -> None:
    """Return once no writer of an earlier process completes the record of the snapshot, or none makes progress."""
    seen = -1
    since = time.monotonic()
    while (written := buffer.saved_bytes) is not None and time.monotonic() - since < WRITER_SECONDS:
        if written != seen:
            seen = written
            since = time.monotonic()
        time.sleep(POLL_SECONDS)


class _SnapshotFiles(BlockFiles):
    """The files that this rank reads, as their snapshots make them."""

    def __init__(self, path: Path, manifest: CheckpointManifest, sources: Mapping[str, SnapshotSource]) -> None:
        super().__init__(path, manifest)
        self._sources = sources

    def read_header(self, file: str, read: Callable[[int, Path], bytes]) -> bytes:
        del read
        return FileImage(self._sources[file].record.headers, memoryview(b"")).header

    def reader(self, file: str) -> Callable[[int, memoryview], object]:
        return self._sources[file].read
