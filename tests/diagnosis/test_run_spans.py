"""Operations from recorded spans: waits, sampled waits, garbage collections, steps that are left out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from meshwright.diagnosis.operations import OperationTable
from meshwright.diagnosis.run_folder import _without_first_step
from meshwright.diagnosis.run_spans import RankRecords, table_of_spans
from meshwright.events.span_ring import RankSpans
from meshwright.spec.errors import BadInput
from tests.diagnosis.played import PHASES, RECORD, Faults, Job, play

Span = tuple[str, int, int]


def record(
    phase: str,
    start: int,
    duration: int,
    *,
    step: int = 1,
    stage: int = 0,
    micro_batch: int = 0,
    count: int = 1,
    amount: int = 0,
) -> tuple:
    """The record of a span. Without a stage it has no action either: both are -1."""
    values = {
        "start_ns": start,
        "duration_ns": duration,
        "amount": amount,
        "step": step,
        "action": 0 if stage >= 0 else -1,
        "stage": stage,
        "micro_batch": micro_batch,
        "unit": -1,
        "peer": -1,
        "count": count,
        "phase": PHASES.index(phase),
    }
    return tuple(values[name] for name in RECORD.names or ())


def one_rank(*records: tuple) -> RankRecords:
    return RankRecords(0, 0, 0, "here", np.array(list(records), dtype=RECORD), PHASES)


def durations(table: OperationTable, name: str) -> list[int]:
    return table.duration_ns[table.is_type(name)].tolist()


def two_forwards(step: int = 1, at: int = 0) -> list[tuple]:
    """A step of 1000 ns with two forwards of 300 ns."""
    return [
        record("step", at, 1000, step=step, stage=-1),
        record("forward", at + 100, 300, step=step),
        record("forward", at + 500, 300, step=step, micro_batch=1),
    ]


def test_waits_inside_a_span_are_taken_out_of_it_and_those_before_it_are_not() -> None:
    waits = (record("collective_wait", 450, 40), record("collective_wait", 600, 50), record("collective_wait", 700, 10))
    table = table_of_spans([one_rank(*two_forwards(), *waits)], 1)
    assert durations(table, "forward-compute") == [300, 240]
    assert durations(table, "collective-wait") == [100]
    forward, wait = table.is_type("forward-compute"), table.is_type("collective-wait")
    assert table.start_ns[forward].tolist() == [100, 560], "as if the operation had waited first"
    assert table.sequence[wait].tolist() == [1], "the second compute operation waits"


def test_a_measured_wait_that_stands_for_four_is_spread_over_its_phase() -> None:
    table = table_of_spans([one_rank(*two_forwards(), record("collective_wait", 600, 20, count=4))], 1)
    assert durations(table, "forward-compute") == [260, 260]
    assert durations(table, "collective-wait") == [40, 40]


def test_waits_outside_of_stages_become_step_all_reduces() -> None:
    waits = (record("collective_wait", 10, 30, stage=-1), record("collective_wait", 900, 60, stage=-1))
    table = table_of_spans([one_rank(*two_forwards(), *waits)], 1)
    assert durations(table, "step-all-reduce") == [30, 60]
    assert durations(table, "forward-compute") == [300, 300]


def test_a_garbage_collection_costs_the_excess_of_the_operation_around_it() -> None:
    steps = [entry for step in range(1, 6) for entry in two_forwards(step, 1000 * step)]
    slower = record("forward", 3500, 350, step=3, micro_batch=1)
    steps[steps.index(record("forward", 3500, 300, step=3, micro_batch=1))] = slower
    hidden = record("garbage_collection", 4550, 80, step=4, stage=-1)
    costly = record("garbage_collection", 3550, 80, step=3, stage=-1)
    table = table_of_spans([one_rank(*steps, costly, hidden)], 5)
    assert durations(table, "garbage-collection") == [50, 0]
    assert durations(table, "forward-compute") == [300] * 10


def test_attention_work_belongs_to_the_operations_of_its_step_and_micro_batch() -> None:
    steps = [entry for step in (1, 2) for entry in two_forwards(step, 1000 * step)]
    work = [
        record("attention_work", 1000 * step, 0, step=step, stage=-1, micro_batch=number, amount=10 * step + number)
        for step, number in ((2, 1), (1, 0), (2, 0))
    ]
    table = table_of_spans([one_rank(*steps, *work, record("optimizer", 2900, 9, step=2, micro_batch=-1))], 2)
    assert table.attention_work[table.is_type("forward-compute")].tolist() == [20, 21], "step 1 has no update"


def test_spans_of_a_release_without_attention_work_are_read() -> None:
    rank = replace(one_rank(*two_forwards()), phases=PHASES[: PHASES.index("attention_work")])
    assert set(table_of_spans([rank], 1).attention_work) == {-1}


def test_steps_with_other_operations_than_the_last_are_left_out() -> None:
    first = [record("step", 0, 1000, stage=-1), record("forward", 100, 300, micro_batch=1), record("forward", 500, 300)]
    rank = one_rank(*first, *two_forwards(2, 1000), *two_forwards(3, 2000), record("forward", 3100, 300, step=4))
    assert table_of_spans([rank], 9).steps.tolist() == [2, 3]
    assert table_of_spans([rank], 1).steps.tolist() == [3]
    behind = replace(rank, rank=1, dp=1, records=rank.records[rank.records["step"] < 3])
    assert table_of_spans([rank, behind], 9).steps.tolist() == [2]


def test_validation_and_checkpoints_are_no_part_of_the_step() -> None:
    later = (
        record("checkpoint", 1200, 500, stage=-1),
        record("validation", 1700, 500, stage=-1),
        record("forward", 1800, 9),
    )
    table = table_of_spans([one_rank(*two_forwards(), *later)], 1)
    assert durations(table, "forward-compute") == [300, 300]
    assert len(table) == 2


def test_ranks_without_a_common_step_are_refused() -> None:
    rank = one_rank(*two_forwards(1))
    other = replace(one_rank(*two_forwards(2)), rank=1, dp=1)
    with pytest.raises(BadInput, match="no complete step in common"):
        table_of_spans([rank, other], 1)


def test_messages_have_the_direction_of_their_payload() -> None:
    spans = play(Job("1f1b", pipeline=2, dp=1, micro_batches=2), steps=1, faults=lambda step, random: Faults())
    table = table_of_spans(spans, 1)
    for name, stage in (("forward-send", 0), ("forward-recv", 1), ("backward-send", 1), ("backward-recv", 0)):
        assert table.stage[table.is_type(name)].tolist() == [stage, stage]


def test_the_first_step_is_left_out_also_after_records_from_before_it() -> None:
    collection = record("garbage_collection", 0, 50, step=0, stage=-1)
    records = one_rank(collection, *two_forwards(1), *two_forwards(2, at=2000)).records
    spans = SimpleNamespace(records=records, overwritten=0, header={"phases": PHASES})
    assert set(_without_first_step(cast(RankSpans, spans))["step"]) == {2}
