"""The record of a snapshot in a snapshot buffer. With it another process can load the snapshot.

This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.checkpoint.format.files import FileRecord
from meshwright.checkpoint.format.header import TensorHeader

VERSION = 3
"""Version of the record. A record of another version is ignored."""


@dataclass(frozen=True)
class SnapshotName:
    """The identity of one rank's snapshot.

    `run_id` is the run's id, `attempt` the name of the save (EPOCH-NUMBER, the number in hexadecimal), `step` the training
    step, and `rank` of `ranks` the rank at the save.
    """

    run_id: str | None
    attempt: str
    step: int
    rank: int
    ranks: int

    @property
    def order(self) -> tuple[int, int]:
        """(epoch of the lease, number of the save). Later saves of a run have a greater order.

        Raises ValueError if `attempt` is not the name of a save.
        """
        epoch, _, number = self.attempt.partition("-")
        return int(epoch), int(number, 16)


@dataclass(frozen=True)
class SnapshotRecord:
    """What another process needs to load one rank's snapshot. `run_id` to `ranks` are those of `SnapshotName`.

    `headers`: (key, dtype, shape) of the tensors in the snapshot buffer, in the order of the data.
    `file`: size and digests of the safetensors file that the buffer makes with these headers; None if the rank writes no
        file.
    `contents`, `state`: the checkpoint's contents and state, on the first rank only.
    `replica`: the record of another rank's snapshot, whose data follow in the same buffer; or None.
    """

    run_id: str | None
    attempt: str
    step: int
    rank: int
    ranks: int
    headers: list[Any]
    file: FileRecord | None
    contents: dict[str, Any]
    state: str | None
    replica: SnapshotRecord | None = None

    @property
    def parts(self) -> tuple[SnapshotPart, ...]:
        """The snapshots in the snapshot buffer: the rank's own, then the one of `replica`, if there is one."""
        own = SnapshotPart(self, 0)
        return (own,) if self.replica is None else (own, SnapshotPart(self.replica, _data_bytes(self.headers)))

    @property
    def name(self) -> SnapshotName:
        return SnapshotName(self.run_id, self.attempt, self.step, self.rank, self.ranks)

    def encode(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> SnapshotRecord | None:
        """Return the record in `data`, or None if another version of the format wrote it."""
        fields = json.loads(data)
        return cls._of_fields(fields) if fields.pop("version") == VERSION else None

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> SnapshotRecord:
        file = fields.pop("file")
        replica = fields.pop("replica")
        record = None if file is None else FileRecord.from_plain(file)
        return cls(file=record, replica=None if replica is None else cls._of_fields(replica), **fields)


@dataclass(frozen=True)
class SnapshotPart:
    """A snapshot in a snapshot buffer: its record, and the offset in the buffer's data at which its own data begin."""

    record: SnapshotRecord
    start: int


def _data_bytes(headers: Sequence[Any]) -> int:
    """Return the total size of the tensors that `headers` describe."""
    return sum(TensorHeader(key, dtype, tuple(shape)).bytes for key, dtype, shape in headers)
