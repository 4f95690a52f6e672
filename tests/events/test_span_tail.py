"""Reading ring files bit by bit finds the records that reading them whole finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.events.span import SpanPhase, SpanRecord
from meshwright.events.span_ring import RECORD, SpanRing, read_ring
from meshwright.events.span_tail import FEWEST_RECORDS, STEP, SpanTail

PHASES: tuple[SpanPhase, ...] = ("data", "forward", "backward", "step")


def step(number: int, rank: int, phases: Sequence[SpanPhase] = PHASES) -> list[SpanRecord]:
    return [
        SpanRecord(1000 * number + place, 10 * rank + place, step=number, phase=p) for place, p in enumerate(phases)
    ]


def open_ring(folder: Path, rank: int, capacity: int) -> SpanRing:
    return SpanRing(folder / f"rank-{rank:05d}.ring", {"rank": rank, "ranks": 2}, capacity)


@pytest.mark.parametrize("capacity", [1000, 130])
def test_all_records_are_read_once_in_parts(tmp_path: Path, capacity: int) -> None:
    """Within 64 records a call: new ones first, then older ones until a step that is partly overwritten."""
    rings = [open_ring(tmp_path, rank, capacity) for rank in (0, 1)]
    tail, found = SpanTail(tmp_path), {0: list[tuple[int, int]](), 1: list[tuple[int, int]]()}
    for number in range(1, 61):
        for rank, ring in enumerate(rings):
            ring.append(step(number, rank))
        if number in (50, 53, 60):
            batch = tail.read(2 * FEWEST_RECORDS * RECORD.itemsize)
            assert len(batch.records) <= 4 * FEWEST_RECORDS, "at least as many older ones as new ones"
            for rank, record in zip(batch.rank.tolist(), batch.records, strict=True):
                found[rank].append((int(record["step"]), int(record["phase"])))
    for _ in range(6):
        batch = tail.read(2 * FEWEST_RECORDS * RECORD.itemsize)
        for rank, record in zip(batch.rank.tolist(), batch.records, strict=True):
            found[rank].append((int(record["step"]), int(record["phase"])))
    assert tail.complete and tail.ranks == 2
    for rank in (0, 1):
        assert len(found[rank]) == len(set(found[rank])), "none twice"
        records = read_ring(tmp_path / f"rank-{rank:05d}.ring").records
        whole = {int(record["step"]) for record in records if record["phase"] == 1}  # steps with their first record
        expected = {(int(r["step"]), int(r["phase"])) for r in records if int(r["step"]) in whole}
        assert expected <= set(found[rank])
    assert not len(tail.read(1 << 20).records), "nothing is new"


def test_a_step_longer_than_a_part_is_read_in_a_longer_part(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, 0, 5000)
    for number in (1, 2, 3):
        ring.append(step(number, 0, (*["forward"] * 500, "step")))
    tail, steps = SpanTail(tmp_path), set[int]()
    for _ in range(12):
        batch = tail.read(FEWEST_RECORDS * RECORD.itemsize)
        steps |= set(batch.records["step"][batch.records["phase"] == STEP].tolist())
    assert steps == {1, 2, 3} and tail.complete


def test_files_that_begin_later_are_found_and_others_are_passed_over(tmp_path: Path) -> None:
    tail = SpanTail(tmp_path / "spans")
    assert not len(tail.read(1 << 20).records) and tail.ranks == 0
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans" / "rank-00000.ring").write_bytes(b"something else")
    open_ring(tmp_path / "spans", 1, 100).append(step(1, 1))
    assert set(tail.read(1 << 20).rank.tolist()) == {1}
