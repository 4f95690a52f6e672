"""Schedules with two stages per rank in a V, so that the first rank also has the last stage: ZBV, DualPipeV.

Word 0 of a phrase is the rank's stage on the way down, word 1 the one on the way up. Both are written for as many
micro-batches as fill the pipeline; with fewer, those that do not exist are struck out, which keeps the order sound.
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


def dualpipe_v(ranks: int, micro_batches: int) -> ComputeOrder:
    """DeepSeek's DualPipe folded into a V: in the steady state a forward of one stage runs into a backward of the other,
    so that the communication of each hides under the compute of the other (DeepSeek-V3, arXiv 2412.19437; deepseek-ai/DualPipe).
    """
    compute = [_dualpipe_rank(rank, ranks, micro_batches) for rank in range(ranks)]
    return vee(ranks), compute


def _zbv_rank(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    below = ranks - rank
    writer = ComputeWriter(vee(ranks)[rank])
    writer.write("F0", 2 * below - 1)  # until the first micro-batch is back from the last rank
    writer.write("F1 F0", rank)  # until its gradient arrives
    writer.write("F1 I1 W1", below)
    writer.write("F0 I0 W0 F1 I1 W1", micro_batches - writer.forwards(0))
    writer.write("I0 W0 F1 I1 W1", micro_batches - writer.forwards(1))
    writer.write("I0 I1", rank)  # the weight halves wait: the ranks above need the gradients
    writer.write("I0 W0", below)
    writer.write("W1", rank)
    writer.write("W0", rank)
    return writer.actions


def _dualpipe_rank(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    below = ranks - 1 - rank
    writer = ComputeWriter(vee(ranks)[rank])
    writer.write("F0", 2 * below)
    writer.write("F0 F1", rank + 1)
    writer.write("I1 W F1", below)
    steady = micro_batches - 2 * ranks + rank + 1
    if rank == ranks - 1:
        writer.write("F0 B1 F1&B0")  # this pair would hold back the first gradient of every rank
        steady -= 1
    writer.write("F0&B1 F1&B0", steady)
    writer.write("B1 F1&B0", below)
    for step in range(2 * (rank + 1)):  # the second half split, so that gradients leave early
        writer.write(f"{'I' if step > rank else 'B'}{1 - step % 2}")
    writer.write("W I0", below)
    writer.write_pending_weights()
    return writer.actions
