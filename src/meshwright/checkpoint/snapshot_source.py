"""Where a rank reads a snapshot from when its run resumes: its own arena, or the snapshot server of a host. Torch-free."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from meshwright.checkpoint.arena import Arena
from meshwright.checkpoint.file_image import FileImage
from meshwright.checkpoint.snapshot_record import SnapshotName, SnapshotRecord
from meshwright.checkpoint.snapshot_transport import SnapshotClient, TransportFailure
from meshwright.spec.errors import Damaged


@dataclass(frozen=True)
class RankOffer:
    """The complete snapshots that a rank sees: its own arena's, and on one rank of each host those of its server."""

    own: SnapshotName | None
    address: str | None = None
    """HOST:PORT of its host's server, if there is one."""
    listed: tuple[SnapshotName, ...] = ()


@dataclass(frozen=True)
class SnapshotLocation:
    """A snapshot in the arena of its rank or, with an `address`, on the server there."""

    name: SnapshotName
    address: str | None = None


def newest_complete(offers: Sequence[RankOffer], run_id: str | None) -> list[SnapshotLocation] | None:
    """The newest save of the run for which every rank's snapshot is offered: their locations in rank order; None without one.

    If a snapshot is offered at several locations, the rank's own arena comes first, then its own host, then any other.
    Saves with another number of ranks are left out.
    """
    candidates: dict[tuple[tuple[int, int], int], dict[int, list[SnapshotLocation]]] = {}
    for rank, offer in enumerate(offers):
        locations = [SnapshotLocation(name, offer.address) for name in offer.listed]
        if offer.own is not None and offer.own.rank == rank:
            locations.append(SnapshotLocation(offer.own))
        for location in locations:
            name = location.name
            if (name.run_id, name.ranks) == (run_id, len(offers)):
                # `order` is (epoch of the lease, number of the save): the newest save has the greatest.
                by_rank = candidates.setdefault((name.order, name.step), {})
                by_rank.setdefault(name.rank, []).append(location)
    complete = [save for save, by_rank in candidates.items() if len(by_rank) == len(offers)]
    if not complete:
        return None
    by_rank = candidates[max(complete)]

    def distance(rank: int, location: SnapshotLocation) -> tuple[int, str]:
        if location.address is None:
            return 0, ""
        return (1 if location.address == offers[rank].address else 2), location.address

    return [min(by_rank[rank], key=lambda location: distance(rank, location)) for rank in range(len(offers))]


class SnapshotSource(Protocol):
    """One rank's snapshot, read as the bytes of a checkpoint file.

    `read` is thread-safe and raises Damaged if they cannot be read.
    """

    record: SnapshotRecord

    def read(self, start: int, target: memoryview) -> None: ...

    def discard(self) -> None:
        """Do not offer the snapshot to later starts."""
        ...

    def close(self) -> None: ...


class ArenaSource:
    """The snapshot in this rank's arena."""

    def __init__(self, arena: Arena, record: SnapshotRecord) -> None:
        self.record = record
        self._arena, self._image = arena, FileImage(record.headers, arena.data)

    def read(self, start: int, target: memoryview) -> None:
        self._image.read(start, target)

    def discard(self) -> None:
        self._arena.begin_snapshot()  # marks the arena's data as incomplete

    def close(self) -> None:
        self._arena.close()


class ServerSource:
    """A snapshot on a snapshot server; each thread that reads has a connection of its own."""

    def __init__(self, address: str, token: str, name: SnapshotName) -> None:
        """Raises Damaged if the server does not have it."""
        self._address, self._token, self._name = address, token, name
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
