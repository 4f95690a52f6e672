"""ZBV: two stages per rank in a V, so that the first rank also has the last stage.

Word 0 of a phrase is the rank's stage on the way down, word 1 the one on the way up. Both are written for as many
micro-batches as fill the pipeline; with fewer, the actions of the others are removed, which keeps the order valid.
"""

from __future__ import annotations

from meshwright.schedules.action import Action
from meshwright.schedules.phrases import ComputeWriter, truncate
from meshwright.schedules.schedule import ComputeOrder, vee


def zbv(ranks: int, micro_batches: int) -> ComputeOrder:
    """Zero bubble in a V: no rank idles between its first forward and its last weight half when forward, input half and
    weight half take equal time, at 1F1B's memory (Qi et al., arXiv 2401.10241 §6).
    """
    filled = max(micro_batches, 2 * ranks - 1)
    compute = [truncate(_zbv_rank(rank, ranks, filled), micro_batches) for rank in range(ranks)]
    return vee(ranks), compute


def _zbv_rank(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ranks_below = ranks - rank
    writer = ComputeWriter(vee(ranks)[rank])
    writer.write("F0", 2 * ranks_below - 1)  # until the first micro-batch returns from the last rank
    writer.write("F1 F0", rank)  # until its gradient arrives
    writer.write("F1 I1 W1", ranks_below)
    writer.write("F0 I0 W0 F1 I1 W1", micro_batches - writer.forwards(0))
    writer.write("I0 W0 F1 I1 W1", micro_batches - writer.forwards(1))
    writer.write("I0 I1", rank)  # weight halves are deferred: other ranks need the gradients
    writer.write("I0 W0", ranks_below)
    writer.write("W1", rank)
    writer.write("W0", rank)
    return writer.actions
