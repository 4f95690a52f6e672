"""Source of a rank's snapshot when its run resumes: its own snapshot buffer, or the snapshot server of a host. Torch-free."""

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
"""The name of snapshot buffers in messages."""


@dataclass(frozen=True)
class RankOffer:
    """The complete snapshots that a rank sees: its own snapshot buffer's, and on one rank of each host those of its server."""

    own: SnapshotName | None
    address: str | None = None
    """HOST:PORT of its host's server, if there is one."""
    listed: tuple[SnapshotName, ...] = ()
    """Snapshots in the snapshot buffers of its host."""
    copies: tuple[SnapshotName, ...] = ()
    """Copies of another host's snapshots in the memory of its host."""
    replica: SnapshotName | None = None
    """The snapshot of a replica on another host, in its own snapshot buffer."""

    @property
    def names(self) -> Iterator[SnapshotName]:
        """All of them; some more than once."""
        return (name for name in (self.own, self.replica, *self.listed, *self.copies) if name is not None)


@dataclass(frozen=True)
class SnapshotLocation:
    """A snapshot in the snapshot buffer of the rank `reader` or, with an `address`, in the memory of its host, whose server is there."""

    name: SnapshotName
    reader: int
    address: str | None = None
    is_copy: bool = False


def newest_complete(offers: Sequence[RankOffer], run_id: str | None) -> list[SnapshotLocation] | None:
    """Return the snapshots of the newest completely offered save, in the order of its ranks; None without one.

    Snapshots are found by what they are, so ranks and hosts may have other numbers than at the save, and be fewer or more. Each is
    read by a rank of a host that has it: from a snapshot buffer rather than from a copy, by its own rank where possible.
    """
    ranks_of_host: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        if offer.address is not None:
            ranks_of_host.setdefault(offer.address, []).append(rank)
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
                # `order` is (epoch of the lease, number of the save): the newest save has the greatest.
                by_rank = saves.setdefault((name.order, name.step, name.ranks), {})
                by_rank.setdefault(name.rank, []).append(location)
    complete = [save for save, by_rank in saves.items() if len(by_rank) == save[2]]
    if not complete:
        return None
    by_rank = saves[max(complete)]

    def distance(location: SnapshotLocation) -> tuple[bool, bool, bool, str, int]:
        is_other = location.reader != location.name.rank
        return location.is_copy, is_other, location.address is not None, location.address or "", location.reader

    return [min(by_rank[rank], key=distance) for rank in sorted(by_rank)]


class SnapshotSource(Protocol):
    """Snapshot of a rank, read as the bytes of a checkpoint file.

    `read` is thread-safe and raises Damaged if they cannot be read.
    """

    record: SnapshotRecord

    def read(self, start: int, target: memoryview) -> None: ...

    def discard(self) -> None:
        """Do not offer the snapshot to later starts."""
        ...

    def close(self) -> None: ...


class BufferSource:
    """A snapshot in this rank's snapshot buffer, whose data begin at `start`. Closes the buffer."""

    def __init__(self, buffer: SnapshotBuffer, record: SnapshotRecord, start: int = 0) -> None:
        self.record = record
        self._start = DATA_OFFSET + start
        self._buffer = buffer
        self._header = FileImage(record.headers, memoryview(b"")).header

    def read(self, start: int, target: memoryview) -> None:
        header = self._header[start : start + len(target)]
        target[: len(header)] = header
        # Copied by the kernel, which unlike a copy in Python lets other threads copy meanwhile.
        offset = self._start + start + len(header) - len(self._header)
        read_range(self._buffer.descriptor, target[len(header) :], offset, MEMORY)

    def discard(self) -> None:
        self._buffer.begin_snapshot()  # marks its data as incomplete

    def close(self) -> None:
        self._buffer.close()


class HostSource(BufferSource):
    """A snapshot in other memory of this host, which the host's server keeps."""

    def discard(self) -> None:
        """The memory is not this rank's; each start verifies it again."""


def open_in_buffer(name: SnapshotName) -> SnapshotSource:
    """The snapshot `name` in this rank's snapshot buffer. Raises Damaged if it is not there."""
    path = os.environ.get(BUFFER_VARIABLE)
    snapshot = None if path is None else open_snapshot(path, name)
    if snapshot is None:
        raise Damaged(f"the snapshot of step {name.step} on rank {name.rank} is no longer in the snapshot buffer")
    return BufferSource(snapshot.buffer, snapshot.record, snapshot.start)


def open_on_host(address: str, token: str, name: SnapshotName) -> SnapshotSource:
    """A snapshot that this host's server at `address` keeps, read from its memory.

    Where that cannot be mapped, the server sends it. Raises Damaged if the server does not have it.
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
    """A snapshot on a snapshot server; each thread that reads has a connection of its own."""

    def __init__(self, address: str, token: str, name: SnapshotName) -> None:
        """Raises Damaged if the server does not have it."""
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
        """A server keeps its copies; each start verifies them again."""

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
