"""Seconds in which this program's engine copies parameters and gradients between shards and communication buffers.

FSDP2 gathers parameters into one buffer, and copies each of them out of the buffer. It copies gradients into the buffer of a reduction.
Gradient accumulation reads and writes all gradients for each micro-batch. The bandwidth of device memory limits all of these copies.
For other stacks the results are 0 (`Constants.own_engine`), because their constants include such copies.
"""

from __future__ import annotations

import numpy as np

from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.workload.arrays import Array
from meshwright.workload.dtypes import COMPUTE_BYTES
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape, embedding_at_both_ends

MASTER_READ = 4.0
"""Bytes read per parameter to cast its fp32 master weight to the gathered dtype."""
COPY_IN = 6.0
"""Bytes read and written per parameter to copy its bf16 gradient into the fp32 reduction buffer."""
ACCUMULATE = 10.0
"""Bytes read and written per parameter to add its bf16 gradient to an fp32 sum."""
UNSHARDED_SCALING = 16.0
"""Bytes per parameter that another stream moves without sharding: FSDP2 scales gradients into a second buffer, and copies that buffer."""
SHARD_ACCUMULATE = 12.0
"""Bytes per parameter of a shard that another stream moves to add the reduced gradient to the sum over micro-batches."""


def copy_seconds(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> tuple[Array, Array]:
    """Return the seconds of copies over all layers, the embedding and the head: (for each micro-batch, once per step)."""
    accumulates = layout.micro_batches > 1
    reduces_once = (layout.layered > 0) | (layout.reduce_once > 0) | ~accumulates
    unsharded = layout.shards <= 1
    # Without sharding there may be no buffer: the cast then directly writes the weights that compute reads.
    casts_in_place = unsharded & (k.lone_copies == 0)
    end_parameters = shape.end_params / layout.tensor
    block_parameters = shape.inner_dense_params / layout.tensor
    expert_parameters = shape.inner_expert_params / np.maximum(layout.expert, 1.0)
    parameters = block_parameters + expert_parameters + end_parameters

    gathered_bytes = (
        block_parameters * layout.gathered_bytes + (expert_parameters + end_parameters) * COMPUTE_BYTES
    ) / parameters
    cast = MASTER_READ + gathered_bytes
    copy_out = np.where(casts_in_place, cast, 2 * gathered_bytes + k.side_copies * cast / layout.shards)

    by_matmuls = np.where(machine.matmul_format > 0, 1.0, k.matmul_sums)
    accumulate = ACCUMULATE * (block_parameters * by_matmuls + expert_parameters + end_parameters) / parameters
    padded = COPY_IN * (1 + (1 / k.packing - 1) * (1 - expert_parameters / parameters))
    # A single micro-batch's gradient is cast to the shard's format. A sum over micro-batches has that format already.
    in_place = np.where(casts_in_place & accumulates, np.where(reduces_once, 0.0, accumulate), COPY_IN)
    in_place = np.where(
        casts_in_place & layout.gradients_final_in_backward(embedding_at_both_ends(shape)), 0.0, in_place
    )
    on_side_stream = np.where(unsharded, UNSHARDED_SCALING * k.lone_copies, 0.0)
    on_side_stream = on_side_stream + np.where(reduces_once | casts_in_place, 0.0, SHARD_ACCUMULATE / layout.shards)
    copy_in = np.where(unsharded, in_place, padded) + k.side_copies * on_side_stream

    # Frozen weights have no gradients. Without sharding they are used where they are; with sharding they are gathered.
    copy_in = copy_in * shape.trained
    accumulate = accumulate * shape.trained
    copy_out = copy_out * np.where(unsharded, shape.trained, 1.0)
    gathers = 2.0 - layout.keep_gathered
    gathers_once = np.where((layout.layered > 0) | (layout.gather_once > 0), 1.0, 0.0)
    per_micro_batch = (1 - gathers_once) * gathers * copy_out
    per_micro_batch = per_micro_batch + np.where(reduces_once, np.where(accumulates, accumulate, 0.0), copy_in)
    per_step = gathers_once * np.where(layout.layered > 0, gathers, 1.0) * copy_out
    per_step = per_step + np.where(reduces_once, copy_in, 0.0)
    seconds_per_byte = k.own_engine * parameters / (machine.hbm * k.hbm)
    return per_micro_batch * seconds_per_byte, per_step * seconds_per_byte
