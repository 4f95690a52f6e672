"""Elements and bytes of activations: saved by a block's forward for its backward, and allocated during the backward.

In a block with fused element-wise operations autograd saves what backwards read: the input of every matmul and norm,
the inputs and outputs of attention (`spec.blocks.memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import stage_table
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import RECOMPUTE_MODES, Linear, Plan, Recompute
from meshwright.spec.score_memory import SCORE_BYTES, score_bytes
from meshwright.workload.arrays import Array
from meshwright.workload.dtypes import COMPUTE_BYTES, bytes_of, low_share
from meshwright.workload.expected_loads import expected_busiest, received_room
from meshwright.workload.groups import all_present, context_size, experts_over
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape, shape_of

SAVED_DIMENSIONS = 4
"""Dimensions of `Shape.saved` of one model; arrays of models have one more in front."""


def activation_bytes(
    model: ModelSpec, train: TrainSpec, plan: Plan, *, host_offloaded: bool = False
) -> tuple[float, ...]:
    """Bytes that one forward of each virtual stage saves for its backward, by stage in order of the layers.

    Those on the device, or those offloaded to host memory.
    """
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    stages = sorted((stage for rank_stages in table for stage in rank_stages), key=lambda stage: stage.start)
    per_token = elements_per_token(model, plan, busiest_rows(model, train, plan))
    strategies = plan.strategies(model.layers)
    elements = [per_token(layer)[0] for layer in range(model.layers)]
    saved = [
        count if strategy.activations_offloaded == host_offloaded else 0.0
        for count, strategy in zip(elements, strategies, strict=True)
    ]
    token_bytes = tokens_of(train, plan) * bytes_of(plan.precision.compute)
    return tuple(token_bytes * sum(saved[stage.start : stage.stop]) for stage in stages)


def saved_elements_by_layer(model: ModelSpec, plan: Plan) -> list[float]:
    """By layer, the elements of one token that a forward saves for its backward, on the device or in host memory."""
    per_token = elements_per_token(model, plan)
    return [per_token(layer)[0] for layer in range(model.layers)]


def busiest_rows(model: ModelSpec, train: TrainSpec, plan: Plan) -> float:
    """Rows that the busiest expert rank stores relative to the mean, as `train.expert_load` or a static exchange says.

    Copies of experts do not change it, unless all are present: a run's first steps have none.
    """
    if all_present(model, plan):
        return 1.0
    room = exchange_room(model, plan)
    return room or float(expected_busiest(model, train, experts_over(plan) * plan.axis_size("tensor")).stored_rows)


def exchange_room(model: ModelSpec, plan: Plan) -> float:
    """`received_room` of a plan; 0 if all experts are present, so that no rows are exchanged."""
    experts = plan.experts
    ranks = experts_over(plan) * plan.axis_size("tensor")
    if experts is None or all_present(model, plan):
        return 0.0
    return float(received_room(experts.exchange, experts.receive_bound, ranks))


def elements_per_token(
    model: ModelSpec, plan: Plan, busiest: float = 1.0, tokens: float = 0.0
) -> Callable[[int], tuple[float, float]]:
    """A function of a layer: elements of one token that its forward saves, and temporary elements of its backward.

    `busiest` is that of `mean_saved_elements`. The sums over tiles of the feed-forward are spread over the `tokens` of a micro-batch.
    """
    expert_ranks = experts_over(plan) * plan.axis_size("tensor")
    strategies = plan.strategies(model.layers)
    element = bytes_of(plan.precision.compute)
    share = float(tile_share(plan.mlp_tile, tokens)) if tokens else 1.0
    sum_bytes_of_element = element * max(tokens, 1.0)
    by_block = dict[tuple[int, Recompute, Linear | None], tuple[float, float]]()

    def per_token(layer: int) -> tuple[float, float]:
        mode = strategies[layer].recompute
        key = model.kind(layer), mode, strategies[layer].linear
        if key not in by_block:
            low = low_share(plan.precision, plan.linear(layer, model.layers))
            saved, temporary, sums = _elements(*_block(model, layer, mode), low, expert_ranks, busiest, share, element)
            by_block[key] = saved, temporary + sums / sum_bytes_of_element
        return by_block[key]

    return per_token


@lru_cache(maxsize=1024)
def _elements(
    shape: Shape, mode: int, low: float, expert_ranks: int, busiest: float, share: float, element: int
) -> tuple[float, float, float]:
    """Elements of one token that a forward saves and a backward adds; and bytes of sums over tiles, of a whole micro-batch."""
    saved = mean_saved_elements(shape, mode, low, expert_ranks, busiest)
    temporary = mean_backward_elements(shape, mode, low, expert_ranks, busiest, share)
    return float(saved), float(temporary), float(tile_sum_bytes(shape, mode, share, element))


def tokens_of(train: TrainSpec, plan: Plan) -> float:
    """Tokens of a micro-batch whose activations one rank stores: context and tensor ranks share them."""
    return plan.batch.micro_batch * train.seq_len / (context_size(plan) * plan.axis_size("tensor"))


def saved_elements(model: ModelSpec, layer: int, recompute: Recompute, low: float = 1.0) -> float:
    """Elements of one token that autograd saves in block `layer` if its experts are on one rank; see `mean_saved_elements`.

    Llama-3-8B saves its block's input (4,096 elements a token) in mode `full`:

    >>> from meshwright.config.presets import MODEL_PRESETS
    >>> from meshwright.spec.fields import from_plain
    >>> llama = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
    >>> [saved_elements(llama, 0, mode) for mode in ("full", "selective", "none")]
    [4096.0, 47104.0, 74752.0]
    """
    return float(mean_saved_elements(*_block(model, layer, recompute), low))


def mean_saved_elements(
    shape: Shape, recompute: Array, low: Array = 1.0, expert_ranks: Array = 1.0, busiest: Array = 1.0
) -> Array:
    """Elements of one token that autograd saves in a block, mean over the layers of `shape`.

    `recompute` is the index of the mode in `RECOMPUTE_MODES`. A saved input of a linear layer counts `low` elements, one of routed experts,
    whose weight gradients are not in fp8, a whole one. With several `expert_ranks` experts' rows are exchanged. The experts of the rank
    have `busiest` times the mean rows. What is saved follows from the block's table (`spec.blocks.memory`).
    """
    low = np.asarray(low)
    busiest = np.asarray(busiest)
    index = np.broadcast_arrays(
        np.asarray(recompute, dtype=np.int64),
        (low < 1).astype(np.int64),
        (np.asarray(expert_ranks) > 1).astype(np.int64),
    )
    models = (np.arange(len(shape.saved)),) if np.ndim(shape.saved) > SAVED_DIMENSIONS else ()
    elements = shape.saved[(*models, *index)]
    return elements[..., 0] + low * elements[..., 1] + busiest * elements[..., 2]


def mean_backward_elements(
    shape: Shape, recompute: Array, low: Array = 1.0, expert_ranks: Array = 1.0, busiest: Array = 1.0, tile: Array = 1.0
) -> Array:
    """Temporary elements of one token in a block's backward, beside what its forward saved; mean over the layers of `shape`.

    They are the gradients of the feed-forward's wide half and of the residual stream, recomputed activations, and the experts' inputs or
    the gradients of these, with fp8 copies of gradients that experts multiply. Distributed experts have the latter in place of their saved
    outputs, which the backward frees before. Of a dense feed-forward's wide tensors the share `tile` exists at a time (`tile_share`).
    """
    mode = np.asarray(recompute)
    received = busiest * shape.expert_rows
    in_experts = busiest * shape.expert_activated
    recomputed = (
        mean_saved_elements(shape, 0, low, busiest=busiest)
        - mean_saved_elements(shape, recompute, low, busiest=busiest)
        - received
    )
    repeats_matmuls = mode >= RECOMPUTE_MODES.index("all_but_attention")
    rounded = np.where(low < 1, low * in_experts, 0.0)
    inputs = np.where((np.asarray(expert_ranks) > 1) & ~repeats_matmuls, 0.0, received)
    in_tiles = np.where(repeats_matmuls, (1 - np.asarray(tile)) * shape.tiled, 0.0)
    gradients = shape.activated + in_experts + shape.hidden
    return gradients + inputs + rounded + np.where(mode > 0, recomputed, 0.0) - in_tiles


def tile_share(tile: Array, tokens: Array) -> Array:
    """Share of `tokens` that a tile of `tile` tokens has; 1 without tiles."""
    return np.where(np.asarray(tile) > 0, np.minimum(1.0, tile / np.maximum(tokens, 1.0)), 1.0)


def tile_sum_bytes(shape: Shape, recompute: Array, share: Array, element: Array) -> Array:
    """Bytes of a dense feed-forward's weight gradients: sums over tiles, and those of one tile in the compute dtype."""
    tiled = (np.asarray(recompute) >= RECOMPUTE_MODES.index("all_but_attention")) & (np.asarray(share) < 1)
    return np.where(tiled, shape.tiled_weights * (np.maximum(4.0, element) + element), 0.0)


def offloaded_bytes(shape: Shape, layout: Layouts) -> Array:
    """Bytes of one layer and micro-batch that a rank copies to host memory and back, mean over layers."""
    tokens = layout.micro_batch * layout.seq / layout.context / layout.tensor
    return COMPUTE_BYTES * tokens * mean_saved_elements(shape, layout.recompute, 1.0, np.asarray(layout.expert))


def received_elements(model: ModelSpec, tensor: Array, context: Array) -> Array:
    """Elements of one token that the computing block received.

    Its input gathered over tensor ranks, and that input's gradient; queries, keys and values from context ranks.
    """
    gathered = np.where(np.asarray(tensor) > 1, 2.0 * np.asarray(tensor) * model.hidden, 0.0)
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim  # values are padded to the width of keys
    return gathered + np.where(np.asarray(context) > 1, heads, 0)


def score_gradient_bytes(model: ModelSpec, samples: Array, seq: Array, tensor: Array) -> Array:
    """Bytes of the gradients of attention's scores that exist at once, for `samples` with `seq` tokens on each of `tensor` ranks.

    Heads that share keys and values are computed together, as many of these groups as `SCORE_BYTES` holds.
    """
    of_group = score_bytes(seq, model.heads / model.kv_heads)
    groups = np.maximum(1.0, np.asarray(samples) * model.kv_heads / np.asarray(tensor))
    return of_group * np.minimum(groups, np.maximum(1.0, SCORE_BYTES // of_group))


def moving_elements(model: ModelSpec) -> float:
    """Elements of one token that expert ranks exchange during another micro-batch's compute: its rows sent and received."""
    return 2.0 * model.experts_per_token * model.hidden


def prediction_elements(model: ModelSpec, modules: Array, saved: Array, temporary: Array) -> Array:
    """Elements of one token in the backward of `modules` prediction modules, which all ran before it.

    A module saves what its block does, `saved`; the embedded token, the joined inputs, the block's output and its norm; and the gradient
    that the head has computed. The `temporary` elements of a block's backward exist once.
    """
    return modules * (saved + 6 * model.hidden) + np.where(np.asarray(modules) > 0, temporary, 0.0)


def _block(model: ModelSpec, layer: int, recompute: Recompute) -> tuple[Shape, int]:
    """The shape of a model whose blocks are all like block `layer`, and the index of the mode."""
    return shape_of(model, 1, kind=model.kind(layer)), RECOMPUTE_MODES.index(recompute)
