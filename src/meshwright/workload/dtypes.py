"""Bytes of weights, gradients and optimizer state in the formats that a plan gives them, and where gradients are summed."""

from __future__ import annotations

from typing import Any

from meshwright.spec.plan import LayerStrategy, Linear, Plan, Precision
from meshwright.workload.groups import shard_size

Array = Any
"""A number or an array of numbers."""


def bytes_of(number_format: str) -> int:
    return {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[number_format]


def gathered_width(plan: Plan, layer: int | None, layers: int) -> int:
    """Bytes of a weight of block `layer`, or with None of one of the model's ends, while it is gathered."""
    low = plan.precision.gather == "fp8" and layer is not None and plan.linear(layer, layers) == "fp8_tensorwise"
    return 1 if low else bytes_of(plan.precision.compute)


def state_bytes(precision: Precision) -> float:
    """Bytes of a parameter's state where its optimizer is in host memory: two moments, and the master weight unless that stays."""
    return (8.0 if precision.stored == "fp64" else 4.0) * (2 + (precision.resident != precision.stored))


def low_share(precision: Precision, linear: Linear) -> float:
    """Bytes of a linear layer's input as it is kept for backward, over those in the compute format."""
    return 1.0 if linear == "compute" else 1 / bytes_of(precision.compute)


def accumulates_before_reduction(plan: Plan, strategy: LayerStrategy) -> bool:
    """Whether a rank adds several micro-batches' gradients up, in the format of the sum, before they are summed over shards."""
    return plan.batch.accumulate > 1 and (plan.layered or strategy.gradients == "whole")


def accumulated_by_products(plan: Plan, layer: int, layers: int) -> bool:
    """Whether the products that make the weight gradients of a block's linear layers add them to those of earlier micro-batches."""
    summed = accumulates_before_reduction(plan, plan.strategy(layer, layers)) or (
        plan.batch.accumulate > 1 and shard_size(plan) == 1
    )
    return summed and plan.linear(layer, layers) == "compute"
