"""The ring file of a rank's spans: round trip, wrap-around, torn records, a reader beside the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.events import span_ring
from meshwright.events.span import SPAN_PHASES, SpanRecord
from meshwright.events.span_ring import (
    HEADER_BYTES,
    KEPT_STARTS,
    RECORD,
    SpanRing,
    SpanWriter,
    read_ring,
    read_spans,
    ring_path,
    starts_with_spans,
)

HEADER = {"rank": 3, "ranks": 8, "host": "a", "coordinates": {"shard": 3}}


def record(number: int, phase: str = "forward") -> SpanRecord:
    return SpanRecord(
        1_790_000_000_000_000_000 + number,
        number,
        number * 7,
        number,
        number % 1000,
        number % 5,
        number % 17,
        -1,
        number % 3,
        1,
        phase,
    )


def numbers(path: Path) -> list[int]:
    return read_ring(path).records["step"].tolist()


def test_every_field_survives_a_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "rank-00003.ring"
    records = [record(number, phase) for number, phase in enumerate(SPAN_PHASES)]
    records.append(SpanRecord(2**62, 2**61, 2**60, 2**32 - 1, 2**31 - 1, 2**15 - 1, 9, 8, 7, 2**16 - 1, "clock"))
    ring = SpanRing(file, HEADER, 64)
    ring.append(records)
    spans = read_ring(file)
    assert spans.header == HEADER and spans.rank == 3 and (spans.overwritten, spans.damaged) == (0, 0)
    for read, written in zip(spans.records, records, strict=True):
        for name in SpanRecord._fields:
            expected = getattr(written, name)
            assert read[name] == (SPAN_PHASES.index(expected) if name == "phase" else expected), name
    assert spans.of_phase("clock")["step"].tolist() == [SPAN_PHASES.index("clock"), 2**32 - 1]
    ring.close()


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 8))
def test_the_newest_records_are_kept_in_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], capacity: int
) -> None:
    file = tmp_path_factory.mktemp("ring") / "ring"
    ring, total = SpanRing(file, HEADER, capacity), 0
    for size in sizes:
        ring.append([record(number) for number in range(total, total + size)])
        total += size
        assert numbers(file) == list(range(max(0, total - capacity), total))
    assert read_ring(file).overwritten == max(0, total - capacity)
    assert file.stat().st_size == HEADER_BYTES + capacity * RECORD.itemsize
    ring.close()


@pytest.mark.parametrize(
    ("last_write", "visible"), [(1, range(8)), (2, range(3, 8)), (3, range(3, 8)), (4, range(3, 11))]
)
def test_a_reader_sees_only_whole_records_of_a_torn_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_write: int, visible: range
) -> None:
    """The writer dies in one of its writes: the reserved index, the records (half of them are written), the count."""
    file = tmp_path / "ring"
    ring = SpanRing(file, HEADER, 8)
    ring.append([record(number) for number in range(8)])
    pwrite, calls = os.pwrite, 0

    def interrupted(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == last_write:
            pwrite(descriptor, data[: len(data) // 2 if len(data) > 8 else 0], offset)
            raise KeyboardInterrupt
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(span_ring.os, "pwrite", interrupted)
    try:
        ring.append([record(number) for number in range(8, 11)])
    except KeyboardInterrupt:
        assert last_write < 4
    assert numbers(file) == list(visible)


def test_a_damaged_record_is_left_out_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "ring"
    SpanRing(file, HEADER, 8).append([record(number) for number in range(6)])
    with file.open("r+b") as stream:
        stream.seek(HEADER_BYTES + 2 * RECORD.itemsize + 5)
        stream.write(b"\xff")
        stream.seek(HEADER_BYTES + 4 * RECORD.itemsize)
        stream.write(bytes(RECORD.itemsize))  # a page that never reached the disk
    spans = read_ring(file)
    assert spans.records["step"].tolist() == [0, 1, 3, 5] and spans.damaged == 2


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rank-00000.ring"
    file.write_bytes(b"x" * 10_000)
    with pytest.raises(ValueError, match="is not a file of spans"):
        read_ring(file)
    SpanRing(tmp_path / "rank-00001.ring", HEADER | {"rank": 1}, 4)
    with (tmp_path / "rank-00001.ring").open("r+b") as stream:
        stream.seek(8)
        stream.write((2).to_bytes(4, "little"))
    with pytest.raises(ValueError, match="version 2 of the format; this release reads version 1"):
        read_ring(tmp_path / "rank-00001.ring")
    SpanRing(tmp_path / "rank-00002.ring", HEADER | {"rank": 2}, 4)
    spans, notes = read_spans(tmp_path)
    assert [rank.rank for rank in spans] == [2] and len(notes) == 2


CHILD = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from meshwright.events.span import SpanRecord
from meshwright.events.span_ring import SpanRing
ring, number = SpanRing(Path(sys.argv[1]), {"rank": 0}, 500), 0
print("ready", flush=True)
while True:
    ring.append([SpanRecord(i, i, i * i, i) for i in range(number, number + 37)])
    number += 37
"""


def test_a_reader_beside_the_writer_and_after_its_death_sees_consecutive_records(tmp_path: Path) -> None:
    file = tmp_path / "ring"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(file)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        deadline, last, reads = time.monotonic() + 20, 0, 0
        while (reads < 50 or last < 5000) and time.monotonic() < deadline:
            last, reads = check_consecutive(file, last), reads + 1
        child.send_signal(signal.SIGKILL)
    assert last >= 5000
    final = check_consecutive(file, last)
    assert final >= last and len(read_ring(file).records) > 400


def check_consecutive(file: Path, last: int) -> int:
    spans = read_ring(file)
    steps = spans.records["step"].astype(np.int64)
    assert spans.damaged == 0 and (np.diff(steps) == 1).all() and (spans.records["amount"] == steps * steps).all()
    return int(steps[-1]) if len(steps) else last


def test_the_writer_makes_space_for_many_steps_and_keeps_the_newest_starts(tmp_path: Path) -> None:
    for start in range(KEPT_STARTS + 2):
        writer = SpanWriter(ring_path(tmp_path, 1, start, 0), HEADER | {"rank": 0, "attempt": start})
        writer.write([record(0, "checkpoint")])
        for step in range(3):
            writer.write([record(step), record(step, "step")])
        writer.close()
    kept = starts_with_spans(tmp_path)
    assert [path.name for path in kept] == [f"00001-{start:03d}" for start in range(2, KEPT_STARTS + 2)]
    (spans,), notes = read_spans(kept[-1])
    assert not notes and spans.header["attempt"] == KEPT_STARTS + 1
    assert [SPAN_PHASES[code] for code in spans.records["phase"]] == ["checkpoint"] + ["forward", "step"] * 3
    assert spans.path.stat().st_size == HEADER_BYTES + 2 * span_ring.KEPT_STEPS * RECORD.itemsize


def test_a_full_disk_ends_the_recording_and_not_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(span_ring.os, "posix_fallocate", full)
    writer = SpanWriter(ring_path(tmp_path, 1, 1, 0), HEADER)
    for step in range(600):
        writer.write([record(step, "step")])
    writer.close()
    assert caplog.text.count("spans are not recorded any more") == 1 and "No space left" in caplog.text


def test_a_run_folder_that_was_deleted_is_not_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    writer = SpanWriter(ring_path(run, 1, 1, 0), HEADER)
    writer.write([record(0, "step")])
    writer.close()
    assert not run.exists() and "spans are not recorded any more" in caplog.text


def test_the_header_names_the_phases_by_code(tmp_path: Path) -> None:
    SpanRing(tmp_path / "ring", HEADER | {"phases": SPAN_PHASES}, 4)
    assert tuple(read_ring(tmp_path / "ring").header["phases"]) == SPAN_PHASES
