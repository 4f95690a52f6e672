"""The ring file with a rank's spans: records of fixed size, of which the newest are kept. Does not import torch.

The file, little-endian, begins with a header of `HEADER_BYTES`: magic, version, bytes of a record, capacity, the two indices below, and the
length and text of a JSON object. After it come `capacity` records. Record number i is in slot i mod capacity.

A writer first stores in `reserved` up to which record number it is going to write, then writes the records, and then stores their number in
`count`. A reader reads `count` first and `reserved` last. So it knows which records are complete, both while the writer runs and after the
writer has died. Each record also has a checksum over its words and its number, because after a crash of the host, different pages of the
file may have been saved at different times.

The writer is a thread that calls pwrite. Stores to mapped memory would be faster. But if the storage hangs, a page fault would block all of
Python, and on a full disk it would kill the process.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.events.span import SPAN_PHASES, SpanRecord

MAGIC = b"MWSPANS\0"
VERSION = 1
HEADER_BYTES = 4096
KEPT_STEPS = 1000
"""A file has space for the records of this many steps that are like the first one."""
LARGEST_BYTES = 8 << 20
"""Largest file, in bytes."""
FEWEST_RECORDS = 256
"""A file has space for at least this many records."""
KEPT_STARTS = 4
"""Number of starts of the ranks whose files are kept."""
QUEUED_BATCHES = 256
"""Batches that may wait for slow storage. Further batches are dropped."""
CLOSE_SECONDS = 2.0

RECORD = np.dtype(
    [
        ("start_ns", "<i8"),
        ("duration_ns", "<i8"),
        ("amount", "<i8"),
        ("step", "<u4"),
        ("action", "<i4"),
        ("stage", "<i2"),
        ("micro_batch", "<i2"),
        ("unit", "<i2"),
        ("peer", "<i2"),
        ("count", "<u2"),
        ("phase", "u1"),
        ("reserved", "u1"),
        ("check", "<u4"),
    ]
)
"""A record: the fields of `events.span.SpanRecord`, with `phase` as an index into `SPAN_PHASES`, and a checksum."""
_PACK = struct.Struct("<qqqIihhhhHBBI")
_INDICES = struct.Struct("<QQQ")
FIXED_HEADER = struct.Struct("<8sIIQQQI")
"""Magic, version, bytes of a record, capacity, reserved, count, length of the JSON text."""
_RESERVED_OFFSET = 24
_COUNT_OFFSET = 32
_TEXT_OFFSET = 64
_SALT = 0x9E3779B9
_PHASE_CODES: Mapping[str, int] = {name: code for code, name in enumerate(SPAN_PHASES)}

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class RankSpans:
    """The records of one rank in one start, oldest first.

    `header` has rank, ranks, host, epoch, attempt, and coordinates by axis. `overwritten` counts records that the ring no longer has.
    `damaged` counts records with a wrong checksum, which are left out.
    """

    path: Path
    header: Mapping[str, Any]
    records: np.ndarray
    overwritten: int
    damaged: int

    @property
    def rank(self) -> int:
        return self.header["rank"]

    def of_phase(self, *phases: str) -> np.ndarray:
        """The records of these phases."""
        return self.records[np.isin(self.records["phase"], [_PHASE_CODES[phase] for phase in phases])]


class SpanRing:
    """A ring file open for writing. Raises OSError if the disk is full or the file cannot be written."""

    def __init__(self, path: Path, header: Mapping[str, Any], capacity: int) -> None:
        text = json.dumps(dict(header)).encode()
        if len(text) > HEADER_BYTES - _TEXT_OFFSET:
            raise ValueError(f"the header of {path} has {len(text)} bytes; {HEADER_BYTES - _TEXT_OFFSET} fit")
        self.capacity = capacity
        self._count = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(self._descriptor, 0, HEADER_BYTES + capacity * RECORD.itemsize)
            fixed = FIXED_HEADER.pack(MAGIC, VERSION, RECORD.itemsize, capacity, 0, 0, len(text))
            os.pwrite(self._descriptor, fixed.ljust(_TEXT_OFFSET, b"\0") + text, 0)
        except OSError:
            self.close()
            raise

    def append(self, records: Iterable[SpanRecord]) -> None:
        """Write records and make them visible to readers. If there are more than `capacity`, only the newest are written."""
        data = bytearray().join(_PACK.pack(*record[:-1], _PHASE_CODES[record.phase], 0, 0) for record in records)
        words = np.frombuffer(data, "<u4").reshape(-1, RECORD.itemsize // 4)
        first = self._count
        end = self._count + len(words)
        words[:, -1] = record_checks(words, first)
        os.pwrite(self._descriptor, end.to_bytes(8, "little"), _RESERVED_OFFSET)
        written = max(first, end - self.capacity)
        while written < end:
            slot = written % self.capacity
            until = min(end, written + self.capacity - slot)
            os.pwrite(self._descriptor, words[written - first : until - first].tobytes(), _offset(slot))
            written = until
        os.pwrite(self._descriptor, end.to_bytes(8, "little"), _COUNT_OFFSET)
        self._count = end

    def close(self) -> None:
        os.close(self._descriptor)


def read_ring(path: Path) -> RankSpans:
    """The complete records of a ring file. Raises ValueError if it is not a ring file of this version."""
    with path.open("rb", buffering=0) as file:
        head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES or head[:8] != MAGIC:
            raise ValueError(f"{path} is not a file of spans")
        _, version, record_bytes, capacity, _, count, length = FIXED_HEADER.unpack_from(head)
        if (version, record_bytes) != (VERSION, RECORD.itemsize):
            raise ValueError(f"{path} has version {version} of the format; this release reads version {VERSION}")
        header = json.loads(head[_TEXT_OFFSET : _TEXT_OFFSET + length])
        data = file.read(capacity * record_bytes)
        file.seek(_RESERVED_OFFSET)
        reserved = int.from_bytes(file.read(8), "little")
    slots = np.frombuffer(data, "<u4", count=len(data) // record_bytes * (record_bytes // 4)).reshape(
        -1, record_bytes // 4
    )
    numbers = np.arange(max(0, reserved - capacity), count)
    numbers = numbers[numbers % max(capacity, 1) < len(slots)]
    words = slots[numbers % max(capacity, 1)]
    whole = words[:, -1] == record_checks(words, numbers)
    records = np.ascontiguousarray(words[whole]).view(RECORD)[:, 0]
    return RankSpans(path, header, records, int(max(0, reserved - capacity)), int((~whole).sum()))


def ring_path(folder: Path, epoch: int, attempt: int, rank: int) -> Path:
    """The file with a rank's spans in a run's folder. Each start of the ranks has a folder of its own."""
    return folder / "spans" / f"{epoch:05d}-{attempt:03d}" / f"rank-{rank:05d}.ring"


def starts_with_spans(folder: Path) -> list[Path]:
    """The folders of a run's starts that have spans, oldest first."""
    return sorted(path for path in (folder / "spans").glob("*-*") if path.is_dir())


def read_spans(start: Path) -> tuple[list[RankSpans], list[str]]:
    """The spans of every rank in the folder of one start, by rank, and a message for each file that cannot be read."""
    spans = []
    notes = []
    for path in sorted(start.glob("rank-*.ring")):
        try:
            spans.append(read_ring(path))
        except (OSError, ValueError) as error:
            notes.append(f"{path.name}: {error}")
    return sorted(spans, key=lambda rank_spans: rank_spans.rank), notes


@dataclass
class SpanWriter:
    """Writes a rank's records in a thread. If the storage fails or hangs, records are lost, but the rank is never delayed.

    The file is created when the first step is complete, with space for `KEPT_STEPS` steps like it.
    """

    path: Path
    header: Mapping[str, Any]
    dropped: int = 0
    """Records that were not written because the storage was too slow."""
    _batches: queue.Queue[Sequence[SpanRecord] | None] = field(default_factory=lambda: queue.Queue(QUEUED_BATCHES))
    _thread: threading.Thread | None = None

    def write(self, records: Sequence[SpanRecord]) -> None:
        """Pass records to the thread. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()
        try:
            self._batches.put_nowait(records)
        except queue.Full:
            self.dropped += len(records)

    def close(self) -> None:
        """Write the records passed so far and close the file. Takes at most `CLOSE_SECONDS`."""
        if self._thread is not None:
            try:
                self._batches.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:
                return
            self._thread.join(CLOSE_SECONDS)
            self._thread = None

    def _run(self) -> None:
        early: list[SpanRecord] = []
        ring: SpanRing | None = None
        try:
            while (records := self._batches.get()) is not None:
                if ring is None:
                    early += records
                    if any(record.phase == "step" for record in records):
                        ring = self._open(len(records))
                        ring.append(early)
                else:
                    ring.append(records)
            if ring is None and early:
                ring = self._open(len(early))
                ring.append(early)
        except OSError as error:
            log.warning("spans are not recorded any more: %s: %s", self.path, error.strerror or error)
            while self._batches.get() is not None:
                pass
        finally:
            if ring is not None:
                ring.close()

    def _open(self, records_of_step: int) -> SpanRing:
        for folder in (
            self.path.parents[1],
            self.path.parent,
        ):  # do not create the run's folder, which somebody may have deleted
            folder.mkdir(exist_ok=True)
        if self.header["rank"] == 0:
            self._remove_old_starts()
        most = (LARGEST_BYTES - HEADER_BYTES) // RECORD.itemsize
        return SpanRing(self.path, self.header, max(FEWEST_RECORDS, min(most, KEPT_STEPS * records_of_step)))

    def _remove_old_starts(self) -> None:
        for start in starts_with_spans(self.path.parents[2])[:-KEPT_STARTS]:
            for path in start.glob("rank-*.ring"):
                path.unlink(missing_ok=True)
            if not any(start.iterdir()):
                start.rmdir()


def _offset(slot: int) -> int:
    return HEADER_BYTES + slot * RECORD.itemsize


def record_checks(words: np.ndarray, numbers: np.ndarray | int) -> np.ndarray:
    """The checksum of each record, from its words `(records, words)` and its number. `numbers` may be the number of the first record."""
    if isinstance(numbers, int):
        numbers = np.arange(numbers, numbers + len(words))
    total = numbers.astype(np.uint32) + np.uint32(_SALT)
    for column in range(words.shape[1] - 1):  # `words.sum(1)` would take several times as long
        total += words[:, column]
    return total
