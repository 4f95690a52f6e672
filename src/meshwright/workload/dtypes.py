"""Bytes of weights, gradients and optimizer state in the dtypes of a plan, and where gradients are accumulated."""

from __future__ import annotations

from meshwright.spec.plan import Accumulation, LayerStrategy, Linear, Plan, Precision
from meshwright.workload.buffers import STAGING_BUFFERS, staged_elements
from meshwright.workload.groups import shard_size

GB = 1e9
"""Bytes of a gigabyte, as plans count them."""
MOMENT_BLOCK = 256
"""Number of elements of an 8-bit moment that share one scale (`optim/packing.py`). The scale takes one more byte."""
COMPUTE_BYTES = 2.0
"""Bytes of a number in the compute dtype, where the closed form does not know the dtype of the plan: it assumes bf16.
"""


def bytes_of(number_format: str) -> int:
    """Return the bytes of one number in a format such as "bf16"."""
    return {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[number_format]


def gathered_width(plan: Plan, layer: int | None, layers: int) -> int:
    """Return the bytes of one weight when it is gathered.

    `layer` is the number of the weight's block, counted from 0, or None for embedding and head. `layers` is the number
    of blocks.
    """
    low = plan.precision.gather == "fp8" and layer is not None and plan.linear(layer, layers) == "fp8_tensorwise"
    return 1 if low else bytes_of(plan.precision.compute)


def state_bytes(precision: Precision) -> float:
    """Return the bytes per parameter of an offloaded optimizer's state in host memory.

    The state has two moments. If the device stores weights narrower than the master weights (`precision.resident`), the
    host also stores the other 16 bits of each master weight. Two fp32 moments and 2 bytes of the master weight are 10
    bytes. Two 8-bit moments (1 + 1/256 bytes each) and 2 bytes of the master weight are 4 + 2/256 bytes:

    >>> state_bytes(Precision(moments="fp32")), state_bytes(Precision(moments="int8"))
    (10.0, 4.0078125)
    """
    moment = {"fp32": bytes_of(precision.stored), "bf16": 2, "int8": 1 + 1 / MOMENT_BLOCK}[precision.moments]
    return 2.0 * (moment + (precision.resident != precision.stored))


def staging_bytes(gigabytes: float, precision: Precision) -> float:
    """Return the bytes of the device's buffers for an offloaded optimizer's chunks.

    `gigabytes` is `plan.offload_staging`. The buffers hold at least six chunks (`STAGING_BUFFERS`, optim/host.py).
    """
    record = state_bytes(precision)
    return max(GB * gigabytes, STAGING_BUFFERS * float(staged_elements(record)) * record)


def summed_bytes(precision: Precision, accumulation: Accumulation) -> int:
    """Return the bytes per element of a gradient shard that is summed over micro-batches."""
    return bytes_of("bf16" if accumulation == "bf16" else precision.stored)


def low_share(precision: Precision, linear: Linear) -> float:
    """Return the bytes of a linear layer's input that is saved for the backward, relative to the input in the compute
    dtype.
    """
    return 1.0 if linear == "compute" else 1 / bytes_of(precision.compute)


def accumulates_before_reduction(plan: Plan, strategy: LayerStrategy) -> bool:
    """Return whether a rank sums the gradients of several micro-batches before they are reduced over shard ranks."""
    return plan.batch.accumulate > 1 and (plan.layered or plan.paired or strategy.gradients == "whole")


def matmuls_accumulate_gradients(plan: Plan, layer: int, layers: int) -> bool:
    """Return whether the weight-gradient matmuls of block `layer` add their result to the sum over earlier
    micro-batches.

    `layers` is the number of blocks. A feed-forward network that computes in tiles is an exception, because its
    gradients are already sums over the tiles.
    """
    summed = accumulates_before_reduction(plan, plan.strategy(layer, layers)) or (
        plan.batch.accumulate > 1 and shard_size(plan) == 1
    )
    return summed and plan.linear(layer, layers) == "compute" and not plan.tile(layer, layers)
