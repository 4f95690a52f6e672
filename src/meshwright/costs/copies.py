"""Seconds in which this program's engine copies weights and gradients between their shards and the buffers that travel.

FSDP2 gathers into one buffer and copies every weight out of it, and copies gradients into the buffer that it reduces; a sum over several
micro-batches reads and writes the whole gradient each time. All of it is bound by device memory (`Constants.copies` is 0 for other stacks).
"""

from __future__ import annotations

import numpy as np

from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.workload.arrays import Array
from meshwright.workload.dtypes import COMPUTE_BYTES
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape

MASTER, IN, ADD = 4.0, 6.0, 10.0
"""Bytes per parameter of each copy.

A master weight cast to the gathered dtype to it; a bf16 gradient into the fp32 one; a gradient added to an fp32 sum.
"""
LONE, SHARD = 16.0, 12.0
"""The same on another stream: a lone rank's two further copies; a reduced shard added to its sum."""


def copies(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> tuple[Array, Array]:
    """Of one micro-batch and of one step, over all layers and both ends of the model."""
    several = layout.micro_batches > 1
    once = (layout.layered > 0) | (layout.reduce_once > 0) | ~several
    alone = layout.shards <= 1
    casts_once = alone & (k.lone_copies == 0)
    lone = np.where(alone, LONE * k.lone_copies, 0.0)
    routed = shape.expert_params / np.maximum(layout.expert, 1.0)
    ends = (2 - shape.tied) * shape.table_params
    weights = shape.dense_params + routed + ends
    gathered = (shape.dense_params * layout.gathered_bytes + (routed + ends) * COMPUTE_BYTES) / weights
    # Out of the gathered buffer: read and written. On another stream the shard cast and put in.
    cast = MASTER + gathered
    out = np.where(casts_once, cast, 2 * gathered + k.side_copies * cast / layout.shards)
    shard = np.where(once | casts_once, 0.0, SHARD / layout.shards)
    laid = IN * (1 + (1 / k.packing - 1) * (1 - routed / weights))
    by_products = np.where(machine.low > 0, 1.0, k.product_sums)
    added = ADD * (shape.dense_params * by_products + routed + ends) / weights
    own = np.where(
        casts_once & layout.gradients_final_in_backward(shape.tied), 0.0, np.where(casts_once & ~once, added, IN)
    )
    into = np.where(alone, own, laid) + k.side_copies * (lone + shard)
    gathers = 2.0 - layout.keep_gathered
    kept = np.where((layout.layered > 0) | (layout.gather_once > 0), 1.0, 0.0)
    each = (1 - kept) * gathers * out + np.where(once, np.where(several, added, 0.0), into)
    rest = kept * np.where(layout.layered > 0, gathers, 1.0) * out + np.where(once, into, 0.0)
    seconds = k.copies * weights / layout.tensor / (machine.hbm * k.hbm)
    return each * seconds, rest * seconds
