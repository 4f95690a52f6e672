"""Matrix products of a model's layers with their shapes on one rank, for numbers and arrays alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.workload.arrays import Array
from meshwright.workload.model_shape import Role, Shape
from meshwright.workload.step_shape import StepShape


@dataclass(frozen=True)
class Product:
    """`count` equal products (m, k) × (k, n) in one launch of a layer's forward; backward has two more each."""

    role: Role
    """As in `LinearColumns`."""
    m: Array
    k: Array
    n: Array
    layers: Array
    """Layers of the model that have it."""
    count: Array = 1.0


def layer_products(shape: Shape, step: StepShape, width: Array) -> Iterator[Product]:
    """The products of one micro-batch in the forward of all layers on one of `width` tensor ranks."""
    tokens = step.tokens
    for linear in shape.linears:
        if not np.any(linear.layers):
            continue
        inputs, outputs, layers = linear.inputs, linear.outputs, linear.layers
        if linear.role == "expert":
            yield Product("expert", step.expert_rows, inputs, outputs, layers, step.experts)
        elif linear.role == "expert_adapter":
            yield Product("adapter", step.expert_rows * step.experts, inputs, outputs, layers)
        elif linear.split == "rows":
            yield Product(linear.role, tokens, inputs, outputs / width, layers)
        elif linear.split == "columns":
            yield Product(linear.role, tokens, inputs / width, outputs, layers)
        else:  # each rank computes its own tokens
            yield Product(linear.role, tokens / width, inputs, outputs, layers)
