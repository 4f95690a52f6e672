"""Guesses a setting that nanotron's sweep does not print: whether tensor ranks split activations by sequence.

The measured memory shows that both values occur: with 8 or more tensor ranks, it is near one of two values that differ
by 1.5 elements per token, layer and hidden element. Times differ too: in runs that split, each step of a ring takes 0.3
ms, and pipelines across many nodes stall. The rule below is right for about 85% of the runs in which the memory shows
the setting (docs/design/cost-model.md).
"""

from __future__ import annotations

from meshwright.costs.device_rates import Machine
from meshwright.costs.stack_footprint import MemoryConstants, footprint
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape

UNSPLIT_CONSTANTS = MemoryConstants(
    held=7.0,
    owned=13.0,
    sharding=0.0,
    wide=1.5,
    hidden=9.0,
    narrow=1.0,
    live=2.5,
    logits=14.0,
    gathered=0.0,
    slack=0.0,
    base=0.25,
    base_rank=0.0,
)
"""Memory constants of a run whose activations are not split: bf16 weights, fp32 gradients and states, 16-bit
activations.
"""
FAILING_SHARE = 0.88
"""Runs of the sweep failed if they needed more than this share of a device's memory."""


def splits_sequence(shape: Shape, machine: Machine, layout: Layouts) -> bool:
    """Return whether a run of the sweep split activations by sequence.

    It did if it would be too large otherwise. Most large pipelines split too.
    """
    unsplit_bytes = float(sum(footprint(shape, layout, UNSPLIT_CONSTANTS).values()))
    if layout.tensor > 1 and unsplit_bytes > FAILING_SHARE * machine.memory:
        return True
    stage_ranks = layout.tensor * layout.data
    if layout.pipeline == 1:
        return bool(stage_ranks >= 512 and layout.tensor < 32)
    is_large_pipeline = layout.tensor >= 32 or (layout.pipeline == 2 and layout.tensor >= 8)
    return bool(is_large_pipeline or stage_ranks >= 64 or layout.ranks >= 512)
