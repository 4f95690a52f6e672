"""Layers of pipeline ranks: those of a plan, or where a layout does not say them those that published stacks choose."""

from __future__ import annotations

import numpy as np

from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape


def stage_layers(shape: Shape, layout: Layouts) -> tuple[Array, Array]:
    """Layers of the fullest stage and of the last one, which also has the head: the layout's, or by a published stack's rule.

    Even: layers divided by stages, the head on top; when they do not divide, embedding and head count as a layer each.
    Balanced: the head counts as the layers whose multiplications it equals, and a stage takes layers until the sum passes its share
    of the whole, so the first one is the fullest.
    """
    chunks = layout.pipeline * layout.virtual
    each = shape.layers / chunks
    divides = np.abs(each - np.round(each)) < 1e-6
    counted = np.ceil((shape.layers + 2) / chunks - 1e-9) * layout.virtual
    even = np.where(divides, shape.layers / layout.pipeline, counted)
    head = shape.table_params * shape.layers / (shape.dense_params + shape.expert_params)
    share = (shape.layers + head) / layout.pipeline
    balanced = np.floor(share + 1e-9) + 1
    full = np.minimum(shape.layers, np.where(layout.balanced > 0, balanced, even))
    before = np.where(
        layout.balanced > 0,
        np.floor(share * (layout.pipeline - 1) + 1e-9) + 1,
        full * (layout.pipeline - 1),
    )
    last = np.where((layout.balanced > 0) | ~divides, np.maximum(0.0, shape.layers - before), full)
    planned = np.asarray(layout.fullest_layers) > 0
    return np.where(planned, layout.fullest_layers, full), np.where(planned, layout.head_layers, last)
