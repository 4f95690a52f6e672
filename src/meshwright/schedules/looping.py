"""Schedules with several stages on each rank, placed round-robin: interleaved 1F1B, breadth-first, forward-only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meshwright.schedules.action import Action, Op
from meshwright.schedules.phrases import warm_then_alternate
from meshwright.schedules.schedule import ComputeOrder, Placement, Schedule, evaluated, looped


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> ComputeOrder:
    """Interleaved 1F1B: a group of micro-batches visits the rank's stages in turn (Narayanan et al., arXiv 2104.04473 §2.2).

        The paper requires groups of `ranks` micro-batches. Otherwise groups are as even as possible and have at least
    `ranks` micro-batches (one group when there are fewer micro-batches than ranks).
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
        warm_up = min(len(forwards), 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * len(groups[0]))
        compute.append(warm_then_alternate(forwards, backwards, warm_up))
    return placement, compute


def breadth_first(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> ComputeOrder:
    """Layered accumulation: all micro-batches run through a stage before the next (arXiv 2106.02679, 2211.05953).

    Parameters of a stage are used once in each direction and its gradient is complete after one stretch, so they are
    gathered and reduced once a step. With a stage for every layer it is the modular pipeline; with one rank, layered
    gradient accumulation alone. All micro-batches are in flight when the backward starts.
    """
    placement = looped(ranks, stages_per_rank)
    compute = [
        _sweep("forward", stages, micro_batches) + _sweep("backward", stages[::-1], micro_batches)
        for stages in placement
    ]
    return placement, compute


def forward_only(placement: Placement, micro_batches: int) -> Schedule:
    """A pass without backward, for validation and inference, on the placement of any schedule."""
    compute = [_sweep("forward_only", stages, micro_batches) for stages in placement]
    return evaluated("forward_only", micro_batches, placement, compute)


def groups_of(ranks: int, micro_batches: int) -> list[range]:
    """Groups of at least `ranks` micro-batches, as even as possible, larger groups first."""
    count = max(1, micro_batches // ranks)
    size, longer = divmod(micro_batches, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _sweep(op: Op, stages: Sequence[int], micro_batches: int) -> list[Action]:
    return [Action(op, stage, micro_batch) for stage in stages for micro_batch in range(micro_batches)]
