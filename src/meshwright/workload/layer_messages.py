"""Collectives and messages of one rank: inside layers for one micro-batch, and of sharded weights for one step.

Functions take numbers or arrays. A layout's recompute mode says what a backward sends again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwright.spec.profile import Operation
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import ALL_BUT_ATTENTION, FULL, Layouts
from meshwright.workload.model_shape import Shape
from meshwright.workload.step_shape import StepShape

END_EXCHANGES = 2
"""Tensor collectives of embedding and head for one micro-batch: one forward and one backward each, over all its tokens."""


@dataclass(frozen=True)
class LayerMessage:
    """Equal collectives of one group, for one micro-batch over all layers."""

    op: Operation
    axis: Literal["tensor", "context_ulysses", "context_ring", "expert"]
    ranks: Array
    """Ranks of the group; `p2p` messages go from each to the next in a ring of so many."""
    bytes: Array
    """The gathered result, the input of a sum, all that one rank sends in an all-to-all, or one p2p message."""
    forward: Array
    backward: Array
    """Numbers of these collectives in the forward and in the backward of all layers."""

    @property
    def count(self) -> Array:
        return self.forward + self.backward


def layer_messages(
    shape: Shape,
    layout: Layouts,
    step: StepShape,
    *,
    element: Array = 2.0,
    masked: bool = False,
    compiled: bool = False,
) -> Iterator[LayerMessage]:
    """Messages of a rank inside layers, with `element` bytes per number; see `context_messages`."""
    yield from tensor_messages(shape, layout, step, element)
    if np.any(shape.summed_norms):
        yield norm_message(shape, layout, step, element)
    if np.any(shape.narrow_gathers):
        yield from latent_messages(shape, layout, step, element)
    yield from context_messages(shape, layout, step, element, masked=masked, compiled=compiled)
    if np.any(shape.moe_layers):
        yield expert_message(shape, layout, step, element)


def tensor_messages(
    shape: Shape, layout: Layouts, step: StepShape, element: Array = 2.0
) -> tuple[LayerMessage, LayerMessage]:
    """Gathers of tokens before and scattered sums behind each exchange; a backward gathers again for the weight gradients.

    Without those of latents before attention (`latent_messages`).

    Llama-3-8B on 2 tensor ranks: attention and the feed-forward network of 32 layers gather 4,096 tokens of 4,096
    numbers once each in the forward.

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
    >>> gather, scatter = tensor_messages(shape, layout, step_shape(shape, layout))
    >>> float(gather.forward), float(gather.bytes) / (4096 * 4096 * 2)
    (64.0, 1.0)
    """
    repeats = np.where(np.asarray(layout.recompute) >= ALL_BUT_ATTENTION, 1.0, 0.0)
    stream = step.tokens * shape.hidden * element
    gathers = shape.gathers
    scatters = shape.scatters
    return (
        LayerMessage("all_gather", "tensor", layout.tensor, stream, gathers, scatters + gathers * (1 + repeats)),
        LayerMessage("reduce_scatter", "tensor", layout.tensor, stream, scatters, gathers + scatters * repeats),
    )


def latent_messages(
    shape: Shape, layout: Layouts, step: StepShape, element: Array = 2.0
) -> tuple[LayerMessage, LayerMessage]:
    """Gathers of the narrow inputs of latent attention's projections by head, and the scattered sums of their gradients."""
    repeats = np.where(np.asarray(layout.recompute) >= ALL_BUT_ATTENTION, 1.0, 0.0)
    stream = step.tokens * shape.narrow_width * element
    gathers = shape.narrow_gathers
    return (
        LayerMessage("all_gather", "tensor", layout.tensor, stream, gathers, gathers * (1 + repeats)),
        LayerMessage("reduce_scatter", "tensor", layout.tensor, stream, 0.0, gathers),
    )


def norm_message(shape: Shape, layout: Layouts, step: StepShape, element: Array = 2.0) -> LayerMessage:
    """Sums of squares of queries and keys, two numbers a token in fp32 at least, where norms are over all heads together."""
    repeats = np.where(np.asarray(layout.recompute) >= ALL_BUT_ATTENTION, 1.0, 0.0)
    layers = shape.summed_norms
    squares = step.tokens * 2 * np.maximum(4.0, element)
    return LayerMessage("all_reduce", "tensor", layout.tensor, squares, layers, layers * (1 + repeats))


def context_messages(
    shape: Shape,
    layout: Layouts,
    step: StepShape,
    element: Array = 2.0,
    *,
    masked: bool = False,
    compiled: bool = False,
) -> tuple[LayerMessage, LayerMessage, LayerMessage]:
    """Messages of heads before and after attention, of keys and values round the ring, and of their gradients.

    The gradients are fp32 and take one more ring step, to the rank that owns the keys and values. `masked` sequences all-gather keys and
    values instead of the ring, a `compiled` block again in its backward, and reduce-scatter the gradients.
    """
    mode = np.asarray(layout.recompute)
    layers = shape.attention_layers
    ring = layout.ring
    # With fewer key/value heads than ranks, several ranks receive the same head.
    kv = np.maximum((shape.kv_width + shape.padding) / layout.tensor, layout.ulysses * shape.kv_head_width)
    heads = step.tokens * ((shape.query_width + shape.value_width + shape.padding) / layout.tensor + kv) * element
    repeats = np.where(mode > 0, 1.0, 0.0)
    exchange = LayerMessage("all_to_all", "context_ulysses", layout.ulysses, heads, layers, layers * (1 + repeats))
    local = step.tokens * kv
    ring_steps = ring - 1
    if masked:
        backward_repeats = layers * np.where((mode > 0) | compiled, 1.0, 0.0)
        gathers = LayerMessage("all_gather", "context_ring", ring, ring * local * element, layers, backward_repeats)
        return (
            exchange,
            gathers,
            LayerMessage("reduce_scatter", "context_ring", ring, ring * local * element, 0.0, layers),
        )
    backward_repeats = 1 + np.where(mode == FULL, 1.0, 0.0)
    passes = LayerMessage(
        "p2p", "context_ring", ring, local * element, ring_steps * layers, ring_steps * layers * backward_repeats
    )
    sums = np.where(ring_steps > 0, ring * layers, 0.0)
    return exchange, passes, LayerMessage("p2p", "context_ring", ring, local * np.maximum(4.0, element), 0.0, sums)


def expert_message(shape: Shape, layout: Layouts, step: StepShape, element: Array = 2.0) -> LayerMessage:
    """Dispatch of each routed token to its experts, and combine."""
    repeats = np.where(np.asarray(layout.recompute) >= ALL_BUT_ATTENTION, 1.0, 0.0)
    copies = step.tokens / layout.tensor * shape.top_k * shape.expert_in * element
    return LayerMessage(
        "all_to_all", "expert", layout.expert, copies, 2.0 * shape.moe_layers, 2.0 * shape.moe_layers * (1 + repeats)
    )


def weight_collectives(layout: Layouts) -> tuple[Array, Array]:
    """Gathers of a sharded unit's weights and reductions of its gradients in one step."""
    runs = np.where(np.asarray(layout.layered) > 0, 1.0, layout.micro_batches / (1.0 + np.asarray(layout.paired)))
    gathers = np.where(np.asarray(layout.gather_once) > 0, 1.0, (2.0 - layout.keep_gathered) * runs)
    return gathers, np.where(np.asarray(layout.reduce_once) > 0, 1.0, runs)
