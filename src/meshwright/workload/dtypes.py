"""Bytes of weights, gradients and optimizer state in the dtypes of a plan, and rules for gradient accumulation."""

from __future__ import annotations

from meshwright.spec.plan import Accumulation, LayerStrategy, Linear, Plan, Precision
from meshwright.workload.buffers import STAGING_BUFFERS, staged_elements
from meshwright.workload.groups import shard_size

GB = 1e9
"""Bytes of a gigabyte, as plans count them."""
MOMENT_BLOCK = 256
"""Elements of a block of 8-bit moments (`optim/packing.py`), which has one byte beside."""
COMPUTE_BYTES = 2.0
"""Bytes of a number in the compute dtype (bf16) where the closed form does not know the plan's."""


def bytes_of(number_format: str) -> int:
    """Bytes of one number."""
    return {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[number_format]


def gathered_width(plan: Plan, layer: int | None, layers: int) -> int:
    """Bytes of a gathered weight of block `layer`, or of an end of the model if that is None."""
    low = plan.precision.gather == "fp8" and layer is not None and plan.linear(layer, layers) == "fp8_tensorwise"
    return 1 if low else bytes_of(plan.precision.compute)


def state_bytes(precision: Precision) -> float:
    """Bytes of a parameter's state in host memory: two moments, and 16 bits of a master weight that is not on the device.

    Two fp32 moments and 2 bytes of the master weight; two moments of 1 + 1/256 bytes and 2 bytes of the master
    weight:

    >>> state_bytes(Precision(moments="fp32")), state_bytes(Precision(moments="int8"))
    (10.0, 4.0078125)
    """
    moment = {"fp32": bytes_of(precision.stored), "bf16": 2, "int8": 1 + 1 / MOMENT_BLOCK}[precision.moments]
    return 2.0 * (moment + (precision.resident != precision.stored))


def staging_bytes(gigabytes: float, precision: Precision) -> float:
    """Bytes of the staging buffers for `plan.offload_staging` gigabytes: at least those of six chunks (`optim/host.py`)."""
    record = state_bytes(precision)
    return max(GB * gigabytes, STAGING_BUFFERS * float(staged_elements(record)) * record)


def summed_bytes(precision: Precision, accumulation: Accumulation) -> int:
    """Bytes of a gradient shard that is summed over micro-batches."""
    return bytes_of("bf16" if accumulation == "bf16" else precision.stored)


def low_share(precision: Precision, linear: Linear) -> float:
    """Bytes of a linear layer's input as saved for backward, relative to the compute dtype."""
    return 1.0 if linear == "compute" else 1 / bytes_of(precision.compute)


def accumulates_before_reduction(plan: Plan, strategy: LayerStrategy) -> bool:
    """Whether a rank accumulates gradients in the reduction's dtype before it reduces them over shards."""
    return plan.batch.accumulate > 1 and (plan.layered or plan.paired or strategy.gradients == "whole")


def matmuls_accumulate_gradients(plan: Plan, layer: int, layers: int) -> bool:
    """Whether the weight-gradient matmuls of a block's linear layers add to the gradients of earlier micro-batches.

    Those of a feed-forward network in tiles are sums over tiles.
    """
    summed = accumulates_before_reduction(plan, plan.strategy(layer, layers)) or (
        plan.batch.accumulate > 1 and shard_size(plan) == 1
    )
    return summed and plan.linear(layer, layers) == "compute" and not plan.tile(layer, layers)
