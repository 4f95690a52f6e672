"""Blocks of one measured pipeline step, from the recorded spans of its ranks. The picture is shown next to the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.events.span import SPAN_PHASES
from meshwright.events.span_ring import RankSpans
from meshwright.observe.timeline_svg import TimelineBlock

COMPUTE_COLOURS = {"forward": "k0", "backward": "k4", "weight_gradient": "k1", "gradient_norm": "k6", "optimizer": "k6"}
"""Colour class of each phase of computation."""
WAIT_COLOURS = {"collective_wait": "k3", "receive": "k7"}
"""Colour class of each phase in which a rank waits for communication."""
LAST_STEPS = 100
"""Number of steps, the newest that all ranks have, among which the typical step is chosen."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step of one pipeline: the ranks whose coordinates on all other axes are equal.

    `seconds` is the duration of the step. Times of `blocks` are seconds from the first operation.
    """

    step: int
    ranks: tuple[int, ...]
    """Global rank of each pipeline stage."""
    seconds: float
    blocks: tuple[TimelineBlock, ...]


def typical_step(ranks: Sequence[RankSpans]) -> MeasuredStep | None:
    """Return the step of median duration among the newest steps that all ranks of the first pipeline have recorded.

    `ranks` are recordings whose times are on one clock. The first pipeline has the ranks whose coordinates on all other
    axes are 0. None if there is no such step.
    """
    column = sorted(
        (rank for rank in ranks if not any(i for axis, i in rank.header["coordinates"].items() if axis != "pipeline")),
        key=_stage,
    )
    steps = [dict(zip(*_lengths(rank), strict=True)) for rank in column]
    # The first common step is left out, because a first step is usually slower.
    common = sorted(set.intersection(*map(set, steps)))[1:][-LAST_STEPS:] if steps else []
    if not common or [_stage(rank) for rank in column] != list(range(len(column))):
        return None
    by_length = sorted(common, key=lambda step: max(lengths[step] for lengths in steps))
    step = by_length[len(by_length) // 2]
    records = [_of_step(rank, step) for rank in column]
    starts = [
        record["start_ns"] for stage in records for record in stage if SPAN_PHASES[record["phase"]] in COMPUTE_COLOURS
    ]
    if not starts:
        return None
    blocks = (block for stage, mine in enumerate(records) for block in _blocks(stage, mine, int(min(starts))))
    seconds = max(lengths[step] for lengths in steps) / 1e9
    return MeasuredStep(int(step), tuple(rank.rank for rank in column), seconds, tuple(blocks))


def _stage(rank: RankSpans) -> int:
    return rank.header["coordinates"].get("pipeline", 0)


def _lengths(rank: RankSpans) -> tuple[list[int], list[int]]:
    """Return the steps of a rank and their durations in ns. If a step ran twice, the last one wins in `typical_step`."""
    steps = rank.of_phase("step")
    return steps["step"].tolist(), steps["duration_ns"].tolist()


def _of_step(rank: RankSpans, step: int) -> np.ndarray:
    """Return the spans that began during the last run of `step`."""
    whole = rank.of_phase("step")
    whole = whole[whole["step"] == step][-1]
    records = rank.records[rank.records["step"] == step]
    begin = whole["start_ns"]
    end = whole["start_ns"] + whole["duration_ns"]
    return records[(records["start_ns"] >= begin) & (records["start_ns"] <= end)]


def _blocks(stage: int, records: np.ndarray, origin: int) -> list[TimelineBlock]:
    """Return the blocks of operations and waits that end after the time `origin` (ns)."""
    blocks = []
    for record in records:
        phase = SPAN_PHASES[record["phase"]]
        colour = COMPUTE_COLOURS.get(phase) or WAIT_COLOURS.get(phase)
        start = (int(record["start_ns"]) - origin) / 1e9
        end = start + int(record["duration_ns"]) / 1e9
        if colour is not None and end > max(start, 0.0):
            blocks.append(TimelineBlock(stage, phase in COMPUTE_COLOURS, colour, max(0.0, start), end))
    return blocks
