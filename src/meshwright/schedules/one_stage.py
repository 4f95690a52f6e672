"""Schedules with one stage per rank: GPipe, 1F1B, ZB-H1 (which splits the backward), and paired micro-batches."""

from __future__ import annotations

from meshwright.schedules.action import Action, Op, together
from meshwright.schedules.phrases import ComputeWriter, warm_then_alternate
from meshwright.schedules.schedule import ComputeOrder, looped


def gpipe(ranks: int, micro_batches: int) -> ComputeOrder:
    """Return GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""
    return _alternating(ranks, micro_batches, [micro_batches] * ranks)


def one_f_one_b(ranks: int, micro_batches: int) -> ComputeOrder:
    """Return 1F1B: forwards until the first gradient arrives, then one backward and one forward in turn.

    It has the bubble of GPipe, but at most `ranks` micro-batches in flight. Source: PipeDream-Flush, Narayanan et al.,
    arXiv 2006.09503.
    """
    return _alternating(ranks, micro_batches, [min(micro_batches, ranks - 1 - rank) for rank in range(ranks)])


def zb_h1(ranks: int, micro_batches: int) -> ComputeOrder:
    """Return 1F1B with a split backward: rank r computes the weight half of a backward r micro-batches late.

    Source: Qi et al., arXiv 2401.10241 §2.1. A rank sends the gradient after the input half, and the deferred weight halves
    fill its idle time. Rank r holds the activations of r micro-batches more than with 1F1B, so all ranks hold as many as
    rank 0.
    """
    compute = []
    for rank in range(ranks):
        writer = ComputeWriter([rank])
        warm_up = min(micro_batches, ranks - 1 - rank)
        writer.write("F0", warm_up)
        for index in range(micro_batches):
            writer.write("F0", warm_up + index < micro_batches)
            writer.write("I0")
            writer.write("W", index >= rank)
        writer.write_pending_weights()
        compute.append(writer.actions)
    return looped(ranks), compute


def paired(micro_batches: int) -> ComputeOrder:
    """Return 1F1B on one rank with two micro-batches together; `micro_batches` is even."""

    def both(op: Op, first: int) -> Action:
        return together(Action(op, 0, first), Action(op, 0, first + 1))

    order = [both(op, first) for first in range(0, micro_batches, 2) for op in ("forward", "backward")]
    return looped(1), [order]


def _alternating(ranks: int, micro_batches: int, warm_up: list[int]) -> ComputeOrder:
    """Return for each rank `warm_up[rank]` forwards, then a forward and a backward in turn, then the other backwards."""
    compute = []
    for rank in range(ranks):
        forwards = [Action("forward", rank, micro_batch) for micro_batch in range(micro_batches)]
        backwards = [Action("backward", rank, micro_batch) for micro_batch in range(micro_batches)]
        compute.append(warm_then_alternate(forwards, backwards, warm_up[rank]))
    return looped(ranks), compute
