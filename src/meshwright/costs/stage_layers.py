"""How layers fall on pipeline stages: of published stacks, for time and memory alike, and of this program's plans, for time."""

from __future__ import annotations

import numpy as np

from meshwright.costs.inputs import Array, Layouts, Shape


def stage_layers(shape: Shape, layout: Layouts) -> tuple[Array, Array]:
    """Layers of the fullest stage and of the last one, which also has the head.

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
    return full, last


def dealt_layers(shape: Shape, layout: Layouts, head: Array) -> tuple[Array, Array]:
    """The same as `spec.layout.balanced_stages` deals them, to ranks alike, with a head that takes as long as `head` layers: the rank that
    has it takes fewer, and what does not divide makes the slowest rank no slower than it must.

    In closed form, as a head's time differs from layout to layout; memory asks `balanced_stages` itself (`footprint.planned`).
    """
    ranks, others = layout.pipeline, np.maximum(1.0, layout.pipeline - 1)
    most = np.maximum(layout.virtual, shape.layers - others * layout.virtual)
    fewer = np.clip(np.floor((shape.layers + head) / ranks - head + 1e-9), layout.virtual, most)
    more = np.minimum(fewer + 1, most)

    def slowest(last: Array) -> Array:
        return np.maximum(np.ceil((shape.layers - last) / others - 1e-9), last + head)

    last = np.where(slowest(fewer) <= slowest(more), fewer, more)
    return np.ceil((shape.layers - last) / others - 1e-9), last
