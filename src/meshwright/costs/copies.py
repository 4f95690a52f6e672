"""Seconds in which this program's engine copies weights and gradients between shards and communication buffers.

FSDP2 gathers into one buffer and copies every weight out of it, and copies gradients into the buffer that it reduces. Gradient
accumulation reads and writes the whole gradient for each micro-batch. Device memory bandwidth limits all of these copies.
`Constants.copies` is 0 for other stacks.
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
UNSHARDED, SHARD = 16.0, 12.0
"""Bytes per parameter on another stream: an unsharded rank's two further copies; a reduced shard added to its sum."""


def copies(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> tuple[Array, Array]:
    """Seconds of copies per micro-batch, and once per step, over all layers, the embedding and the head."""
    several = layout.micro_batches > 1
    once = (layout.layered > 0) | (layout.reduce_once > 0) | ~several
    unsharded = layout.shards <= 1
    casts_once = unsharded & (k.lone_copies == 0)
    further = np.where(unsharded, UNSHARDED * k.lone_copies, 0.0)
    routed = shape.expert_params / np.maximum(layout.expert, 1.0)
    ends = (2 - shape.tied) * shape.table_params
    weights = shape.dense_params + routed + ends
    gathered = (shape.dense_params * layout.gathered_bytes + (routed + ends) * COMPUTE_BYTES) / weights
    # Copies out of the gathered buffer read and write. On another stream, the shard is cast and copied in.
    cast = MASTER + gathered
    out = np.where(casts_once, cast, 2 * gathered + k.side_copies * cast / layout.shards)
    shard = np.where(once | casts_once, 0.0, SHARD / layout.shards)
    packed = IN * (1 + (1 / k.packing - 1) * (1 - routed / weights))
    by_products = np.where(machine.low > 0, 1.0, k.product_sums)
    added = ADD * (shape.dense_params * by_products + routed + ends) / weights
    own = np.where(
        casts_once & layout.gradients_final_in_backward(shape.tied), 0.0, np.where(casts_once & ~once, added, IN)
    )
    into = np.where(unsharded, own, packed) + k.side_copies * (further + shard)
    gathers = 2.0 - layout.keep_gathered
    kept = np.where((layout.layered > 0) | (layout.gather_once > 0), 1.0, 0.0)
    each = (1 - kept) * gathers * out + np.where(once, np.where(several, added, 0.0), into)
    once_per_step = kept * np.where(layout.layered > 0, gathers, 1.0) * out + np.where(once, into, 0.0)
    seconds = k.copies * weights / layout.tensor / (machine.hbm * k.hbm)
    return each * seconds, once_per_step * seconds
