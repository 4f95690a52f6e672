"""Schedules that place two stages on each rank in a V, so that the rank that starts a micro-batch also ends it: ZBV, DualPipeV.

Word 0 of a phrase is the rank's stage on the way down, word 1 the one on the way up. Both are written for as many
micro-batches as fill the pipeline; with fewer, those that do not exist are struck out, which keeps the order sound.
"""

from __future__ import annotations

from meshwright.schedules.action import Action
from meshwright.schedules.phrases import Row, keep
from meshwright.schedules.schedule import ComputeOrder, vee


def zbv(ranks: int, micro_batches: int) -> ComputeOrder:
    """Zero bubble in a V: no rank idles between its first forward and its last weight half when forward, input half and
    weight half take equal time, at 1F1B's memory (Qi et al., arXiv 2401.10241 §6).
    """
    filled = max(micro_batches, 2 * ranks - 1)
    compute = [keep(_zbv_row(rank, ranks, filled), micro_batches) for rank in range(ranks)]
    return vee(ranks), compute


def dualpipe_v(ranks: int, micro_batches: int) -> ComputeOrder:
    """DeepSeek's DualPipe folded into a V: in the steady state a forward of one stage runs into a backward of the other,
    so that the communication of each hides under the compute of the other (DeepSeek-V3, arXiv 2412.19437; deepseek-ai/DualPipe).
    """
    compute = [_dualpipe_row(rank, ranks, micro_batches) for rank in range(ranks)]
    return vee(ranks), compute


def _zbv_row(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    below = ranks - rank
    row = Row(vee(ranks)[rank])
    row.write("F0", 2 * below - 1)  # until the first micro-batch is back from the last rank
    row.write("F1 F0", rank)  # until its gradient arrives
    row.write("F1 I1 W1", below)
    row.write("F0 I0 W0 F1 I1 W1", micro_batches - row.forwards(0))
    row.write("I0 W0 F1 I1 W1", micro_batches - row.forwards(1))
    row.write("I0 I1", rank)  # the weight halves wait: the ranks above need the gradients
    row.write("I0 W0", below)
    row.write("W1", rank)
    row.write("W0", rank)
    return row.actions


def _dualpipe_row(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    below = ranks - 1 - rank
    row = Row(vee(ranks)[rank])
    row.write("F0", 2 * below)
    row.write("F0 F1", rank + 1)
    row.write("I1 W F1", below)
    steady = micro_batches - 2 * ranks + rank + 1
    if rank == ranks - 1:
        row.write("F0 B1 F1&B0")  # this pair would hold back the first gradient of every rank
        steady -= 1
    row.write("F0&B1 F1&B0", steady)
    row.write("B1 F1&B0", below)
    for step in range(2 * (rank + 1)):  # the second half split, so that gradients leave early
        row.write(f"{'I' if step > rank else 'B'}{1 - step % 2}")
    row.write("W I0", below)
    row.write_owed()
    return row.actions
