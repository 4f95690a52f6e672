"""Reads the recorded spans in the folder of a run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from meshwright.diagnosis.operations import MODEL_COMPUTE_TYPES, OperationTable
from meshwright.diagnosis.run_spans import RankRecords, table_of_spans
from meshwright.events.clock_alignment import on_one_clock
from meshwright.events.span_ring import RankSpans, read_spans, starts_with_spans
from meshwright.spec.errors import BadInput


def read_operations(folder: Path, last_steps: int) -> tuple[OperationTable, list[str]]:
    """Return the operations of the last `last_steps` steps of the run's newest start, and remarks on files and clocks.

    All times are on one clock. Raises BadInput if a rank's spans are missing, or if the ranks have no complete step in
    common.
    """
    starts = starts_with_spans(folder)
    if not starts:
        raise BadInput(f"{folder} has no spans/; they are recorded unless observe.spans is false")
    spans, notes = read_spans(starts[-1])
    expected = spans[0].header["ranks"] if spans else 1
    if len(spans) < expected:
        found = {rank_spans.rank for rank_spans in spans}
        missing = next(rank for rank in range(expected) if rank not in found)
        reason = f": {notes[0]}" if notes else ""
        raise BadInput(
            f"{starts[-1]} has the spans of {len(spans)} of {expected} ranks; rank {missing} is missing{reason}"
        )
    spans, alignment = on_one_clock(spans)
    notes += [
        f"rank {rank_spans.rank}: its host shares no message or collective with that of rank {spans[0].rank}; its times are not aligned"
        for rank_spans in spans
        if alignment.error_ns[rank_spans.header["host"]] is None
    ]
    return table_of_spans(_with_coordinates(spans), last_steps), notes


def compute_seconds(table: OperationTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the compute time of each rank in each step, without waits for other ranks, as (ranks, steps, seconds).

    `ranks` has shape (ranks,), `steps` shape (steps,), and `seconds` shape (ranks, steps).
    """
    compute = table.select(table.is_type(*MODEL_COMPUTE_TYPES))
    ranks, row = np.unique(compute.rank, return_inverse=True)
    steps, column = np.unique(compute.step, return_inverse=True)
    seconds = np.bincount(row * len(steps) + column, compute.duration_ns / 1e9, len(ranks) * len(steps))
    return ranks, steps, seconds.reshape(len(ranks), len(steps))


def _with_coordinates(spans: list[RankSpans]) -> list[RankRecords]:
    """Return the ranks' records with the stage of each rank, and its index among the ranks of that stage."""
    by_stage: dict[int, list[RankSpans]] = defaultdict(list)
    for rank_spans in spans:
        by_stage[rank_spans.header["coordinates"].get("pipeline", 0)].append(rank_spans)
    return [
        RankRecords(
            rank=rank_spans.rank,
            stage=stage,
            dp=dp,
            host=rank_spans.header["host"],
            records=_without_first_step(rank_spans),
            phases=rank_spans.header["phases"],
        )
        for stage, ranks in sorted(by_stage.items())
        for dp, rank_spans in enumerate(ranks)
    ]


def _without_first_step(spans: RankSpans) -> np.ndarray:
    """Return the records without the first step after the start, because that step also compiles, connects and
    allocates.

    """
    records = spans.records
    # Records from before the first step have the number of the step before it.
    steps = records["step"][records["phase"] == spans.header["phases"].index("step")]
    return records if spans.overwritten or not len(steps) else records[records["step"] > steps.min()]
