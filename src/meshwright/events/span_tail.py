"""Reads new spans from the ring files of a start's ranks, with a limit of bytes for each call. Does not import torch.

The first call reads the newest records, and later calls read older ones, so that a first picture of a large job is available soon.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.events.span import SPAN_PHASES
from meshwright.events.span_ring import FIXED_HEADER, HEADER_BYTES, MAGIC, RECORD, VERSION, record_checks

STEP = SPAN_PHASES.index("step")
FEWEST_RECORDS = 64
"""Records of each rank that a call reads, at least, if there are as many."""


@dataclass(frozen=True)
class SpanBatch:
    """Records that one call has read, in the order in which each rank wrote them.

    `rank` is the rank of each record. `segment` numbers the contiguous parts of files from which records were read. The first record of a
    segment is the first of a step; its last records may belong to a step that is not complete.
    """

    records: np.ndarray
    rank: np.ndarray
    segment: np.ndarray
    newest: np.ndarray
    """For each record, whether it was written since the last call (and is not an older record that was read later)."""


@dataclass
class _Position:
    """Which records of a file have been read: numbers `low` … `next` − 1."""

    path: str
    rank: int
    low: int = -1
    next: int = -1
    size: int = FEWEST_RECORDS
    """Least number of records to read when going back to older ones. It must exceed the records of one step."""


@dataclass(frozen=True)
class _Part:
    """Bytes of a file, starting with record number `first`."""

    position: _Position
    first: int
    data: bytes
    newest: bool
    is_oldest: bool
    """Whether the file has no records before this part."""


@dataclass
class SpanTail:
    """The ring files in the folder of one start. `header` is the header of any rank's file; empty before a file exists."""

    start: Path
    header: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False
    """Whether the last call has read all records that the files have."""
    _positions: dict[str, _Position] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Ranks of the start; 0 before the first file exists."""
        return self.header.get("ranks", 0)

    def read(self, most_bytes: int) -> SpanBatch:
        """Read new records of all ranks, then older ones, about `most_bytes` in total."""
        self._find_files()
        share = max(FEWEST_RECORDS, most_bytes // (RECORD.itemsize * max(1, len(self._positions))))
        parts: list[_Part] = []
        self.complete = True
        for position in self._positions.values():
            try:
                self._read_file(position, share, parts)
            except OSError:  # the file is gone: a later start has removed it
                continue
        return self._batch(parts)

    def _find_files(self) -> None:
        if self.header and len(self._positions) >= self.ranks:
            return
        try:
            entries = [entry for entry in os.scandir(self.start) if entry.name.endswith(".ring")]
        except OSError:
            return
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name not in self._positions and entry.name[5:-5].isdigit():
                if not self.header:
                    self.header = _header(entry.path)
                self._positions[entry.name] = _Position(entry.path, int(entry.name[5:-5]))

    def _read_file(self, position: _Position, share: int, parts: list[_Part]) -> None:
        """Append two parts of a file: the new records, and records just before those already read."""
        descriptor = os.open(position.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = os.pread(descriptor, FIXED_HEADER.size, 0)
            if len(head) < FIXED_HEADER.size or head[:8] != MAGIC:
                return
            _, version, record_bytes, capacity, reserved, count, _ = FIXED_HEADER.unpack(head)
            if (version, record_bytes) != (VERSION, RECORD.itemsize) or not capacity:
                return
            oldest = max(0, reserved - capacity)
            if position.next < 0 or count < position.next or count - position.next > share:
                position.low = position.next = count
            if position.next < count:
                data = _pread(descriptor, position.next, count, capacity)
                parts.append(_Part(position, position.next, data, newest=True, is_oldest=False))
                share -= count - position.next
                position.next = count
            if position.low > oldest and share > 0:
                first = max(oldest, position.low - max(share, position.size))
                data = _pread(descriptor, first, position.low, capacity)
                newest = position.low == count
                parts.append(_Part(position, first, data, newest=newest, is_oldest=first == oldest))
                self.complete &= first == oldest
        finally:
            os.close(descriptor)

    def _batch(self, parts: list[_Part]) -> SpanBatch:
        """The complete records of the parts. A step that began before its part is left out."""
        words = np.frombuffer(b"".join(part.data for part in parts), "<u4").reshape(-1, RECORD.itemsize // 4)
        counts = np.array([len(part.data) // RECORD.itemsize for part in parts], dtype=np.int64)
        begins = np.cumsum(counts) - counts
        firsts = np.array([part.first for part in parts], dtype=np.int64)
        numbers = np.arange(len(words)) + np.repeat(firsts - begins, counts)
        keep = words[:, -1] == record_checks(words, numbers)
        records = words.view(RECORD)[:, 0]
        steps = np.flatnonzero(keep & (records["phase"] == STEP))
        following = np.append(steps, len(words))[np.searchsorted(steps, begins)]
        for part, begin, count, step in zip(parts, begins.tolist(), counts.tolist(), following.tolist(), strict=True):
            cut = self._cut(part, min(step + 1 - begin, count))
            keep[begin : begin + cut] = False
        segment = np.repeat(np.arange(len(parts)), counts)
        newest = np.repeat(np.array([part.newest for part in parts], dtype=bool), counts)
        rank = np.repeat(np.array([part.position.rank for part in parts], dtype=np.int64), counts)
        return SpanBatch(records[keep], rank[keep], segment[keep], newest[keep])

    def _cut(self, part: _Part, until_step: int) -> int:
        """How many records at the start of a part to leave out. `until_step` is the number of records up to the end of the first step."""
        position = part.position
        if part.first >= position.low:  # written since the last call, in whole steps
            return 0
        cut = 0 if part.first == 0 else until_step
        if part.is_oldest:
            position.low = 0
        elif until_step == len(part.data) // RECORD.itemsize:  # one step has more records than the part
            position.size *= 2
        else:
            position.low = part.first + cut
        return cut


def _pread(descriptor: int, first: int, end: int, capacity: int) -> bytes:
    """The bytes of the records `first` … `end` − 1."""
    slot = first % capacity
    count = end - first
    until = min(count, capacity - slot)
    data = os.pread(descriptor, until * RECORD.itemsize, HEADER_BYTES + slot * RECORD.itemsize)
    if until < count:
        data += os.pread(descriptor, (count - until) * RECORD.itemsize, HEADER_BYTES)
    return data[: len(data) // RECORD.itemsize * RECORD.itemsize]


def _header(path: str) -> Mapping[str, Any]:
    """The JSON object in a file's header; empty if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(HEADER_BYTES)
        length = FIXED_HEADER.unpack_from(head)[-1]
        value = json.loads(head[64 : 64 + length])
    except (OSError, ValueError, struct.error):
        return {}
    return value if isinstance(value, dict) else {}
