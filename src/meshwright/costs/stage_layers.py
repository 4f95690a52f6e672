"""Numbers of layers on pipeline ranks: from the plan, or for published runs by the rule of their software."""

from __future__ import annotations

import numpy as np

from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape


def stage_layers(shape: Shape, layout: Layouts, planned: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the layers of the fullest pipeline rank, and of the last pipeline rank, which has the head.

    `planned` has these numbers in memory or in time, as the layout states them, and they are returned where they are not 0. Otherwise,
    one of two rules of published software applies:

    - Even: every rank has the same number of layers, and the last rank also has the head. If the layers cannot be divided evenly,
      embedding and head count as one layer each.
    - Balanced: the head counts as many layers as have its number of multiplications. Each rank gets layers until it has more than its
      share of the total, so the first rank has the most.
    """
    chunks = layout.pipeline * layout.virtual
    layers_per_chunk = shape.layers / chunks
    divides = np.abs(layers_per_chunk - np.round(layers_per_chunk)) < 1e-6
    with_ends = np.ceil((shape.layers + 2) / chunks - 1e-9) * layout.virtual
    even = np.where(divides, shape.layers / layout.pipeline, with_ends)
    head_layers = shape.outputs * shape.hidden * shape.layers / (shape.dense_params + shape.expert_params)
    layers_per_stage = (shape.layers + head_layers) / layout.pipeline
    balanced = np.floor(layers_per_stage + 1e-9) + 1
    first = np.minimum(shape.layers, np.where(layout.balanced > 0, balanced, even))
    layers_before = np.where(
        layout.balanced > 0,
        np.floor(layers_per_stage * (layout.pipeline - 1) + 1e-9) + 1,
        first * (layout.pipeline - 1),
    )
    last = np.where((layout.balanced > 0) | ~divides, np.maximum(0.0, shape.layers - layers_before), first)
    is_planned = np.asarray(planned[0]) > 0
    return np.where(is_planned, planned[0], first), np.where(is_planned, planned[1], last)
