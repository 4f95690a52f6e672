"""Memory of the fullest rank by category, in closed form, for other training software.

Each software has its own constants.

`workload.layout_bytes` instead counts the tensors of this program. Formulas and sources: docs/design/cost-model.md,
"Memory".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.costs.constants import table
from meshwright.costs.software import parent_of
from meshwright.costs.stage_layers import stage_layers
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import ALL_BUT_ATTENTION, Layouts
from meshwright.workload.model_shape import Shape
from meshwright.workload.unit_parameters import shard_parameters, stage_parameters

FITTING_SHARE = 0.89
"""A layout fits if its predicted memory is at most this share of a device's memory.

The rest is for memory that is not modelled.
"""


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """Bytes and elements that a training software stores per unit of work.

    Each field is an array with one element per case.
    """

    held: Array
    """Bytes per parameter that every replica stores: weights and gradients, with all their copies."""
    owned: Array
    """Bytes per parameter of master weights and optimizer moments."""
    sharding: Array
    """Further bytes per parameter of a sharded optimizer's shard: its gradients and communication buffers."""
    wide: Array
    """Saved elements per token, layer and hidden element that only sequence parallelism divides among tensor ranks."""
    hidden: Array
    """Saved elements per token, layer and hidden element that tensor ranks always divide."""
    narrow: Array
    """Saved elements per token, layer and element of the widths that tensor ranks divide (attention inputs,
    feed-forward).
    """
    live: Array
    """Elements of the layer that computes now, per token and hidden element: gathered inputs and their gradients.

    No rank divides them.
    """
    logits: Array
    """Bytes per logit of one micro-batch."""
    gathered: Array
    """Number of fully sharded layers whose whole weights exist at the same time."""
    slack: Array
    """Memory that the allocator loses to fragmentation, as a share of the activations."""
    base: Array
    """GiB of the framework, its kernels and its communicators."""
    base_rank: Array
    """GiB of communicators for each mesh axis with more than one rank."""


def memory_constants(stacks: list[str], values: dict[str, Any] | None = None) -> MemoryConstants:
    """Return the memory constants of several stacks, with arrays of length `len(stacks)`.

    A constant that a stack lacks comes from its parent (`costs.software.parent_of`), or else from `default`.
    """
    values = values or table()["memory"]
    columns = [{**values["default"], **values.get(parent_of(stack), {}), **values.get(stack, {})} for stack in stacks]
    return MemoryConstants(**{name: np.array([column[name] for column in columns]) for name in values["default"]})


def footprint(shape: Shape, layout: Layouts, k: MemoryConstants, first_only: Array = 0.0) -> dict[str, Array]:
    """Return the bytes by category of the first or the last pipeline stage, whichever needs more memory.

    Where `first_only` is 1, the result is for the first stage: some published runs report the memory of rank 0.
    """
    first = _stage(shape, layout, k, last=False)
    last = _stage(shape, layout, k, last=True)
    fuller = (sum(first.values()) > sum(last.values())) | (np.asarray(first_only) > 0)
    return {category: np.where(fuller, first[category], last[category]) for category in first}


def _stage(shape: Shape, layout: Layouts, k: MemoryConstants, *, last: bool) -> dict[str, Array]:
    """Return the bytes by category of a rank of the first pipeline stage, or with `last` of the last one."""
    tensor_ranks = layout.tensor
    stages = layout.pipeline
    single = stages == 1
    first_layers, final_layers = stage_layers(shape, layout, (layout.fullest_layers, layout.head_layers))
    layers = np.where(single, shape.layers, final_layers if last else first_layers)
    dense, experts = stage_parameters(shape, layout, layers / shape.layers)
    replicated, owned = (shard_parameters(layout, dense, experts, layout.zero >= stage) for stage in (3, 1))
    block = (shape.dense_params + shape.expert_params / np.maximum(layout.expert, 1.0)) / shape.layers / tensor_ranks
    gathered_layers = np.where(layout.keep_gathered > 0, layers, k.gathered)
    tokens = layout.micro_batch * layout.seq / layout.context
    micro_batches = layout.micro_batches
    in_flight = np.minimum(
        micro_batches,
        np.where(single | last, 1.0, stages * (1 + (stages - 1) / (stages * layout.virtual) * (layout.virtual > 1))),
    )
    saved_without_recompute = _saved_bytes_per_token(shape, layout, k)
    mode = np.asarray(layout.recompute, dtype=np.int64)
    attention_output = shape.attention_layers / shape.layers * shape.value_width
    saved_inputs = 2.0 * shape.hidden / tensor_ranks
    per_layer = np.choose(
        mode,
        np.broadcast_arrays(
            saved_without_recompute,
            0.8 * saved_without_recompute,
            saved_inputs + 2.0 * attention_output / tensor_ranks,
            saved_inputs,
        ),
    )
    working = np.where(mode >= ALL_BUT_ATTENTION, saved_without_recompute, 0.0)
    # With offload, the device stores the activations of two layers of one micro-batch: the layer that computes, and
    # the layer that is being copied.
    stored_layers = np.where(layout.offload_activations > 0, np.minimum(2.0, layers), layers * in_flight)
    activations = tokens * (per_layer * stored_layers + working + 2.0 * k.live * shape.hidden)
    final = single | last
    return {
        "weights_and_gradients": replicated * k.held,
        "optimizer": owned * (k.owned + np.where(layout.zero >= 1, k.sharding, 0.0)) * (1 - layout.offload),
        "gathered": np.where(
            layout.zero >= 3, (gathered_layers * block + shape.table_params / tensor_ranks) * 4.0, 0.0
        ),
        "activations": activations * (1 + k.slack),
        "logits": np.where(
            final, tokens * shape.vocab / tensor_ranks * k.logits * np.where(micro_batches > 1, 1.0, 0.6), 0.0
        ),
        "framework": (k.base + k.base_rank * _axes_in_use(layout)) * 2.0**30,
    }


def _saved_bytes_per_token(shape: Shape, layout: Layouts, k: MemoryConstants) -> Array:
    """Return the bytes that autograd saves for one token in one layer without recomputation, as a mean over layers."""
    attention = shape.attention_layers * (shape.query_width + shape.kv_width + shape.value_width)
    feed = shape.dense_layers * (2 + shape.gated) * shape.ffn
    experts = shape.moe_layers * (2 + shape.gated) * (shape.shared_ffn + shape.top_k * shape.expert_ffn)
    split = (attention + feed + experts) / shape.layers
    wide = np.where(layout.sequence > 0, k.wide / layout.tensor, k.wide)
    return 2.0 * (wide * shape.hidden + (k.hidden * shape.hidden + k.narrow * split) / layout.tensor)


def _axes_in_use(layout: Layouts) -> Array:
    """Return the number of axes with more than one rank."""
    sizes = (layout.tensor, layout.pipeline, layout.data, layout.context, layout.expert)
    return sum((np.asarray(size) > 1).astype(np.float64) for size in sizes)
