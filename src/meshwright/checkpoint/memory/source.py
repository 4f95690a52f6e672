"""Sources of a rank's snapshot when its run resumes: its own snapshot buffer, or a host's snapshot server.

This module does not import torch.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshwright.checkpoint.format.files import read_range
from meshwright.checkpoint.memory.file_image import FileImage
from meshwright.checkpoint.memory.record import SnapshotName, SnapshotRecord
from meshwright.checkpoint.memory.snapshot_buffer import BUFFER_VARIABLE, DATA_OFFSET, SnapshotBuffer
from meshwright.checkpoint.memory.snapshots import open_snapshot
from meshwright.checkpoint.memory.transport import SnapshotClient, TransportFailure
from meshwright.spec.errors import Damaged

MEMORY = Path("host memory")
"""What error messages call a snapshot buffer in place of a file's path."""


@dataclass(frozen=True)
class RankOffer:
    """The complete snapshots that a rank can read.

    Every rank offers its own snapshot buffer. One rank of each host also offers what the host's snapshot server has.
    """

    own: SnapshotName | None
    """The rank's own snapshot in its snapshot buffer, if there is one."""
    address: str | None = None
    """HOST:PORT of the host's snapshot server, if there is one."""
    listed: tuple[SnapshotName, ...] = ()
    """Snapshots in the snapshot buffers of the host's ranks."""
    copies: tuple[SnapshotName, ...] = ()
    """Copies of another host's snapshots in the host's memory."""
    replica: SnapshotName | None = None
    """The snapshot of a replica on another host, in the rank's own snapshot buffer."""

    @property
    def names(self) -> Iterator[SnapshotName]:
        """All names that are offered. Some may appear more than once."""
        return (name for name in (self.own, self.replica, *self.listed, *self.copies) if name is not None)


@dataclass(frozen=True)
class SnapshotLocation:
    """Where a snapshot is read from.

    `reader` is the rank that reads it. Without `address` the snapshot is in that rank's snapshot buffer. With an `address`
    it is in the memory of that rank's host, and `address` is the host's snapshot server. `is_copy` tells a copy, or
    a replica's snapshot, from the memory of the snapshot's own host.
    """

    name: SnapshotName
    reader: int
    address: str | None = None
    is_copy: bool = False


def newest_complete(offers: Sequence[RankOffer], run_id: str | None) -> list[SnapshotLocation] | None:
    """Return where to read the newest save of which all ranks' snapshots are offered; None if there is none.

    `offers` has the offer of each rank. The result has one location for each rank of the save, in their order.

    Snapshots are identified by their names. So the number of ranks and hosts, and their numbering, may have changed since
    the save. Each snapshot is read by a rank of a host that has it: rather from a snapshot buffer than from a copy, and by
    the rank of the same number if possible.
    """
    ranks_of_host: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        if offer.address is not None:
            ranks_of_host.setdefault(offer.address, []).append(rank)
    # (order, step, ranks) of each save → rank at the save → where its snapshot can be read.
    saves: dict[tuple[tuple[int, int], int, int], dict[int, list[SnapshotLocation]]] = {}
    for rank, offer in enumerate(offers):
        locations = [] if offer.own is None else [SnapshotLocation(offer.own, rank)]
        if offer.replica is not None:
            locations.append(SnapshotLocation(offer.replica, rank, is_copy=True))
        for is_copy, names in ((False, offer.listed), (True, offer.copies)):
            for name in names:
                ranks = ranks_of_host.get(offer.address or "", [rank])
                reader = name.rank if name.rank in ranks else ranks[name.rank % len(ranks)]
                locations.append(SnapshotLocation(name, reader, offer.address, is_copy))
        for location in locations:
            name = location.name
            if name.run_id == run_id:
                # `order` is (epoch of the lease, number of the save); the newest save has the greatest order.
                by_rank = saves.setdefault((name.order, name.step, name.ranks), {})
                by_rank.setdefault(name.rank, []).append(location)
    complete = [save for save, by_rank in saves.items() if len(by_rank) == save[2]]
    if not complete:
        return None
    # The newest save has the greatest (order, step, ranks).
    by_rank = saves[max(complete)]

    def distance(location: SnapshotLocation) -> tuple[bool, bool, bool, str, int]:
        # False sorts before True. Preferred are: a snapshot buffer to a copy, then the rank of the same number to another rank,
        # then the rank's own buffer to the host's server.
        is_other = location.reader != location.name.rank
        return location.is_copy, is_other, location.address is not None, location.address or "", location.reader

    return [min(by_rank[rank], key=distance) for rank in sorted(by_rank)]


class SnapshotSource(Protocol):
    """A rank's snapshot, read as the bytes of a checkpoint file.

    `read(start, target)` fills `target` with the file's bytes from `start` on. It is thread-safe, and raises Damaged if
    they cannot be read.
    """

    record: SnapshotRecord

    def read(self, start: int, target: memoryview) -> None: ...

    def discard(self) -> None:
        """Do not offer the snapshot to later starts of the run."""
        ...

    def close(self) -> None: ...


class BufferSource:
    """A snapshot in this rank's snapshot buffer. Its data begin at byte `start` of the buffer's data.

    Closing the source closes the buffer.
    """

    def __init__(self, buffer: SnapshotBuffer, record: SnapshotRecord, start: int = 0) -> None:
        self.record = record
        self._start = DATA_OFFSET + start
        self._buffer = buffer
        self._header = FileImage(record.headers, memoryview(b"")).header

    def read(self, start: int, target: memoryview) -> None:
        header = self._header[start : start + len(target)]
        target[: len(header)] = header
        # The kernel copies the data. Unlike a copy in Python, it lets other threads copy at the same time.
        offset = self._start + start + len(header) - len(self._header)
        read_range(self._buffer.descriptor, target[len(header) :], offset, MEMORY)

    def discard(self) -> None:
        self._buffer.begin_snapshot()  # marks its data as incomplete

    def close(self) -> None:
        self._buffer.close()


class HostSource(BufferSource):
    """A snapshot in other memory of this host, of which the host's snapshot server knows."""

    def discard(self) -> None:
        """Do nothing: the memory does not belong to this rank, and each start verifies it again."""


def open_in_buffer(name: SnapshotName) -> SnapshotSource:
    """Return the snapshot `name` in this rank's snapshot buffer. Raises Damaged if it is not there."""
    path = os.environ.get(BUFFER_VARIABLE)
    snapshot = None if path is None else open_snapshot(path, name)
    if snapshot is None:
        raise Damaged(f"the snapshot of step {name.step} on rank {name.rank} is no longer in the snapshot buffer")
    return BufferSource(snapshot.buffer, snapshot.record, snapshot.start)


def open_on_host(address: str, token: str, name: SnapshotName) -> SnapshotSource:
    """Return the snapshot `name` that this host's server at `address` has. It is read from the host's memory.

    If this process cannot map that memory, the server sends the snapshot. Raises Damaged if the server does not have it.
    """
    try:
        with closing(SnapshotClient(address, token)) as client:
            path = client.path(name)
        snapshot = None if path is None else open_snapshot(path, name)
    except (TransportFailure, OSError):
        snapshot = None
    if snapshot is not None:
        return HostSource(snapshot.buffer, snapshot.record, snapshot.start)
    return ServerSource(address, token, name)


class ServerSource:
    """A snapshot that a snapshot server sends. Each reading thread has its own connection."""

    def __init__(self, address: str, token: str, name: SnapshotName) -> None:
        """Connect to the server. Raises Damaged if the server does not have the snapshot."""
        self._address = address
        self._token = token
        self._name = name
        self._clients: queue.SimpleQueue[SnapshotClient] = queue.SimpleQueue()
        try:
            client, self.record = self._connect()
        except TransportFailure as error:
            raise Damaged(str(error)) from error
        self._clients.put(client)

    def read(self, start: int, target: memoryview) -> None:
        try:
            client = self._clients.get_nowait()
        except queue.Empty:
            client = None
        try:
            client = client or self._connect()[0]
            client.read(start, target)
            self._clients.put(client)
        except TransportFailure as error:
            if client is not None:
                client.close()
            raise Damaged(str(error)) from error

    def discard(self) -> None:
        """Do nothing: a server keeps its copies, and each start verifies them again."""

    def close(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._clients.get_nowait().close()

    def _connect(self) -> tuple[SnapshotClient, SnapshotRecord]:
        client = SnapshotClient(self._address, self._token)
        try:
            return client, client.open(self._name)
        except BaseException:
            client.close()
            raise
