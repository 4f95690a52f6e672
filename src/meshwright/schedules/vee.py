"""ZBV: two stages per rank, placed in a V, so that the first rank also has the last stage.

In a phrase, index 0 is the rank's stage on the way from rank 0 to the last rank, and index 1 its stage on the way back. The
phrases are written for at least as many micro-batches as fill the pipeline. If there are fewer, the actions of the
other micro-batches are removed, which keeps the order valid.
"""

from __future__ import annotations

from meshwright.schedules.action import Action
from meshwright.schedules.phrases import ComputeWriter, truncate
from meshwright.schedules.schedule import ComputeOrder, vee


def zbv(ranks: int, micro_batches: int) -> ComputeOrder:
    """Return the zero-bubble schedule in a V (Qi et al., arXiv 2401.10241 §6).

    If forward, input half and weight half take equal time, no rank idles between its first forward and its last weight half.
    The memory is that of 1F1B.
    """
    filled = max(micro_batches, 2 * ranks - 1)
    compute = [truncate(_zbv_rank(rank, ranks, filled), micro_batches) for rank in range(ranks)]
    return vee(ranks), compute


def _zbv_rank(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return the actions of one rank for at least 2 · ranks - 1 micro-batches."""
    ranks_below = ranks - rank
    writer = ComputeWriter(vee(ranks)[rank])
    writer.write("F0", 2 * ranks_below - 1)  # until the first micro-batch comes back from the last rank
    writer.write("F1 F0", rank)  # until the gradient of the first micro-batch arrives
    writer.write("F1 I1 W1", ranks_below)
    writer.write("F0 I0 W0 F1 I1 W1", micro_batches - writer.forwards(0))
    writer.write("I0 W0 F1 I1 W1", micro_batches - writer.forwards(1))
    writer.write("I0 I1", rank)  # the weight halves are deferred, because other ranks wait for the gradients
    writer.write("I0 W0", ranks_below)
    writer.write("W1", rank)
    writer.write("W0", rank)
    return writer.actions
