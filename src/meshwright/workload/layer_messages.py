"""Numbers and bytes of a rank's collectives: inside the layers for one micro-batch, and of sharded weights for one step.

All functions take numbers or arrays. With recomputation (`Layouts.recompute`), a backward repeats some collectives of its forward.
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
"""Collectives of tensor ranks for the embedding, and as many for the head, for one micro-batch: one in the forward, one in the backward.

Each of them has all tokens of the micro-batch.
"""


@dataclass(frozen=True)
class LayerMessage:
    """Collectives of one kind and size, for one micro-batch over all layers."""

    op: Operation
    axis: Literal["tensor", "context_ulysses", "context_ring", "expert"]
    ranks: Array
    """Number of ranks in the group. A `p2p` message goes from each rank to the next one in a ring of these ranks."""
    bytes: Array
    """Bytes of one collective. What they are depends on `op`:

    | op | bytes |
    |---|---|
    | all_gather | the gathered result |
    | reduce_scatter, all_reduce | the input of one rank |
    | all_to_all | all that one rank sends |
    | p2p | one message |
    """
    forward: Array
    """Number of these collectives in the forward of all layers."""
    backward: Array
    """Number of these collectives in the backward of all layers."""

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
    """Yield all collectives of a rank inside the layers, with `element` bytes per number.

    `masked` and `compiled` matter only for context ranks (`context_messages`).
    """
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
    """Return the all-gathers and reduce-scatters of tokens between tensor ranks, which divide the sequence outside of linear layers.

    In the forward, tokens are gathered before attention and before the feed-forward, and the results are reduce-scattered after each. The
    backward does the reverse, and gathers the inputs a second time for the weight gradients. Latent attention has further collectives
    (`latent_messages`).

    Llama-3-8B on 2 tensor ranks has 64 gathers in the forward: 2 in each of 32 layers, each of 4,096 tokens of 4,096 numbers:

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
    """Return the all-gathers of latents, and the reduce-scatters of their gradients, between tensor ranks.

    Latent attention projects narrow inputs (latents) to heads, and tensor ranks divide the heads, so each rank needs all latents.
    """
    repeats = np.where(np.asarray(layout.recompute) >= ALL_BUT_ATTENTION, 1.0, 0.0)
    stream = step.tokens * shape.narrow_width * element
    gathers = shape.narrow_gathers
    return (
        LayerMessage("all_gather", "tensor", layout.tensor, stream, gathers, gathers * (1 + repeats)),
        LayerMessage("reduce_scatter", "tensor", layout.tensor, stream, 0.0, gathers),
    )


def norm_message(shape: Shape, layout: Layouts, step: StepShape, element: Array = 2.0) -> LayerMessage:
    """Return the all-reduces of the sums of squares of queries and keys, in layers that normalise all heads together.

    Tensor ranks divide the heads, so each rank has only a part of the sum. Each token has two numbers, in fp32 or wider.
    """
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
    """Return the messages between context ranks: of heads, of keys and values, and of the gradients of keys and values.

    | message | usual | `masked` (attention limited to documents, or with a window) |
    |---|---|---|
    | heads, before and after attention | all-to-all of Ulysses ranks | the same |
    | keys and values | p2p around the ring | all-gather; repeated in the backward if it recomputes or is `compiled` |
    | their gradients | p2p around the ring in fp32, with one more step to the rank that owns them | reduce-scatter |
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
    """Return the all-to-alls between expert ranks: dispatch sends each token to its experts, and combine returns the results.

    `bytes` are those of a rank with the mean number of tokens.
    """
    repeats = np.where(np.asarray(layout.recompute) >= ALL_BUT_ATTENTION, 1.0, 0.0)
    copies = step.tokens / layout.tensor * shape.top_k * shape.expert_in * element
    return LayerMessage(
        "all_to_all", "expert", layout.expert, copies, 2.0 * shape.moe_layers, 2.0 * shape.moe_layers * (1 + repeats)
    )


def weight_collectives(layout: Layouts) -> tuple[Array, Array]:
    """Return how often a step gathers the weights of a sharded unit, and how often it reduces the unit's gradients.

    Without options, each micro-batch gathers twice (forward and backward) and reduces once. In layered order all micro-batches run through
    a layer before the next layer, so a step gathers twice and reduces once. With the paired schedule, two micro-batches share their
    gathers and their reduction.
    """
    runs = np.where(np.asarray(layout.layered) > 0, 1.0, layout.micro_batches / (1.0 + np.asarray(layout.paired)))
    gathers = np.where(np.asarray(layout.gather_once) > 0, 1.0, (2.0 - layout.keep_gathered) * runs)
    return gathers, np.where(np.asarray(layout.reduce_once) > 0, 1.0, runs)
