"""Record of a snapshot in a snapshot buffer, with which another process than its writer can load it. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.checkpoint.format.files import FileRecord
from meshwright.checkpoint.format.header import TensorHeader

VERSION = 3


@dataclass(frozen=True)
class SnapshotName:
    """Identity of a snapshot: of `step` on `rank` of `ranks`, part of the save `attempt` of the run `run_id`."""

    run_id: str | None
    attempt: str
    step: int
    rank: int
    ranks: int

    @property
    def order(self) -> tuple[int, int]:
        """Later saves of a run have a greater order: the epoch of the lease, then the number of the save.

        Raises ValueError if `attempt` is no name of a save.
        """
        epoch, _, number = self.attempt.partition("-")
        return int(epoch), int(number, 16)


@dataclass(frozen=True)
class SnapshotRecord:
    """The snapshot of `step` on `rank` of `ranks`, part of the save `attempt` of the run `run_id`.

    `headers` are (key, dtype, shape) of the tensors in the snapshot buffer. `file` has the size and the digests of the safetensors file
    that the buffer makes with them, None if the rank writes no file. `contents` and `state` are those of the checkpoint, on the first rank.
    `replica` describes the snapshot of another rank, whose data follow in the same buffer.
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
        """The snapshots in the snapshot buffer: the rank's own, and that of its replica."""
        own = SnapshotPart(self, 0)
        return (own,) if self.replica is None else (own, SnapshotPart(self.replica, _data_bytes(self.headers)))

    @property
    def name(self) -> SnapshotName:
        return SnapshotName(self.run_id, self.attempt, self.step, self.rank, self.ranks)

    def encode(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> SnapshotRecord | None:
        """The record in `data`; None if another version wrote it."""
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
    """A snapshot in a snapshot buffer: its record, and the byte of the buffer's data where its own begin."""

    record: SnapshotRecord
    start: int


def _data_bytes(headers: Sequence[Any]) -> int:
    return sum(TensorHeader(key, dtype, tuple(shape)).bytes for key, dtype, shape in headers)
