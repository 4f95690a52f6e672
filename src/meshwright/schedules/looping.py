"""Schedules with several stages per rank, placed round-robin: interleaved 1F1B, breadth-first, and forward-only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meshwright.schedules.action import Action, Op
from meshwright.schedules.phrases import warm_then_alternate
from meshwright.schedules.schedule import ComputeOrder, Placement, Schedule, evaluated, looped


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> ComputeOrder:
    """Return interleaved 1F1B: a group of micro-batches visits the rank's stages in turn.

    Source: Narayanan et al., arXiv 2104.04473 §2.2. There a group has exactly `ranks` micro-batches. Here the groups are as
    even as possible and have at least `ranks` micro-batches. There is one group if there are fewer micro-batches.
    """
    groups = groups_of(ranks, micro_batches)
    placement = looped(ranks, stages_per_rank)
    compute = []
    for rank, stages in enumerate(placement):
        forwards = [
            Action("forward", stage, micro_batch) for group in groups for stage in stages for micro_batch in group
        ]
        backwards = [
            Action("backward", stage, micro_batch)
            for group in groups
            for stage in stages[::-1]
            for micro_batch in group
        ]
        # A forward of the last stage must be done before the first backward; later ranks need fewer forwards until then.
        warm_up = min(len(forwards), 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * len(groups[0]))
        compute.append(warm_then_alternate(forwards, backwards, warm_up))
    return placement, compute


def breadth_first(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> ComputeOrder:
    """Return layered accumulation: all micro-batches run through a stage before the next (arXiv 2106.02679, 2211.05953).

    The parameters of a stage are used in one stretch of forwards and one stretch of backwards. So a step gathers the
    parameters twice, and reduces their gradients once, after the stretch of backwards. With one layer per stage it is the
    modular pipeline; with one rank it is layered gradient accumulation. All micro-batches are in flight when the backward
    starts.
    """
    placement = looped(ranks, stages_per_rank)
    compute = [
        _sweep("forward", stages, micro_batches) + _sweep("backward", stages[::-1], micro_batches)
        for stages in placement
    ]
    return placement, compute


def forward_only(placement: Placement, micro_batches: int) -> Schedule:
    """Return a pass without backward, for validation and inference, on the placement of any schedule."""
    compute = [_sweep("forward_only", stages, micro_batches) for stages in placement]
    return evaluated("forward_only", micro_batches, placement, compute)


def groups_of(ranks: int, micro_batches: int) -> list[range]:
    """Return groups of at least `ranks` micro-batches, as even as possible, larger groups first.

    Example: 2 ranks and 7 micro-batches give range(0, 3), range(3, 5) and range(5, 7).
    """
    count = max(1, micro_batches // ranks)
    size, longer = divmod(micro_batches, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _sweep(op: Op, stages: Sequence[int], micro_batches: int) -> list[Action]:
    """Return the actions of all micro-batches in the first stage, then in the second stage, and so on."""
    return [Action(op, stage, micro_batch) for stage in stages for micro_batch in range(micro_batches)]
