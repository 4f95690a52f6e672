"""Matmuls of a model's layers with their shapes on one rank, for one plan or for arrays of plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.workload.arrays import Array
from meshwright.workload.model_shape import Role, Shape
from meshwright.workload.step_shape import StepShape


@dataclass(frozen=True)
class Matmul:
    """`count` equal matmuls (m, k) × (k, n) in one kernel launch of a layer's forward.

    The backward has two for each of them.
    """

    role: Role
    """Kind of the linear layer, as in `LinearColumns`."""
    m: Array
    """Rows of the first matrix and of the result."""
    k: Array
    """Columns of the first matrix, rows of the second."""
    n: Array
    """Columns of the second matrix and of the result."""
    layers: Array
    """Number of the model's layers that have this matmul."""
    count: Array = 1.0
    """Number of equal matmuls in one launch."""


def layer_matmuls(shape: Shape, step: StepShape, width: Array) -> Iterator[Matmul]:
    """Yield the matmuls of one micro-batch in the forward of all layers, on one of `width` tensor ranks.

    The linear layers of Llama-3-8B on one of 2 tensor ranks, as (inputs, outputs):

    >>> from meshwright.config.presets import MODEL_PRESETS
    >>> from meshwright.spec.fields import from_plain
    >>> from meshwright.spec.job import TrainSpec
    >>> from meshwright.spec.model import ModelSpec
    >>> from meshwright.spec.plan import BatchPlan, MeshAxis, Plan
    >>> from meshwright.workload.layouts import layout_of
    >>> from meshwright.workload.model_shape import shape_of
    >>> from meshwright.workload.step_shape import step_shape
    >>> llama = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
    >>> batch = BatchPlan(global_batch=1, micro_batch=1, accumulate=1)
    >>> plan = Plan(mesh=(MeshAxis(axis="tensor", size=2),), batch=batch)
    >>> layout = layout_of(llama, TrainSpec(steps=1, global_batch=1, seq_len=4096), plan)
    >>> shape = shape_of(llama, 4096)
    >>> found = layer_matmuls(shape, step_shape(shape, layout), layout.tensor)
    >>> [(float(each.k), float(each.n)) for each in found]
    [(4096.0, 3072.0), (2048.0, 4096.0), (4096.0, 14336.0), (7168.0, 4096.0)]
    """
    tokens = step.tokens
    for linear in shape.linears:
        if not np.any(linear.layers):
            continue
        inputs = linear.inputs
        outputs = linear.outputs
        layers = linear.layers
        if linear.role == "expert":
            yield Matmul("expert", step.expert_rows, inputs, outputs, layers, step.experts)
        elif linear.role == "expert_adapter":
            yield Matmul("adapter", step.expert_rows * step.experts, inputs, outputs, layers)
        elif linear.split == "rows":
            yield Matmul(linear.role, tokens, inputs, outputs / width, layers)
        elif linear.split == "columns":
            yield Matmul(linear.role, tokens, inputs / width, outputs, layers)
        else:  # the weight is whole on every tensor rank, and each rank computes its own tokens
            yield Matmul(linear.role, tokens / width, inputs, outputs, layers)
