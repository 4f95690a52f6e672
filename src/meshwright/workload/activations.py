"""Memory of activations, in elements per token or in bytes.

There are two kinds: activations that a block's forward saves for its backward, and temporary tensors of the backward. If element-wise
operations are fused, autograd saves what the backward reads: the input of every matmul and norm, and the inputs and outputs of attention
(`spec.blocks.memory`).
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
"""Number of dimensions of `Shape.saved` for one model. For several models it has one more dimension, the first."""


def activation_bytes(
    model: ModelSpec, train: TrainSpec, plan: Plan, *, host_offloaded: bool = False
) -> tuple[float, ...]:
    """Return the bytes that one micro-batch's forward saves in each stage, with stages in order of their layers.

    The bytes are those on the device, or with `host_offloaded` those that are offloaded to host memory.
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
    """Return for each layer the elements per token that the forward saves for the backward, on the device or in host memory."""
    per_token = elements_per_token(model, plan)
    return [per_token(layer)[0] for layer in range(model.layers)]


def busiest_rows(model: ModelSpec, train: TrainSpec, plan: Plan) -> float:
    """Return the rows that the busiest expert rank stores, relative to the mean.

    It follows from `train.expert_load`, or from the fixed buffers of a static exchange. Copies of experts do not lower it, because the
    first steps of a run have no copies. It is 1 if all experts are present on all ranks.
    """
    if all_present(model, plan):
        return 1.0
    buffered_rows = exchange_room(model, plan)
    return buffered_rows or float(expected_busiest(model, train, _expert_ranks(plan)).stored_rows)


def exchange_room(model: ModelSpec, plan: Plan) -> float:
    """Return how many rows the receive buffers of a rank hold, as a multiple of the rows that the rank sends.

    It is 0 for an exchange without fixed buffers (`expected_loads.received_room`). It is also 0 if all experts are present on all ranks,
    because no rows are exchanged then.
    """
    experts = plan.experts
    if experts is None or all_present(model, plan):
        return 0.0
    return float(received_room(experts.exchange, experts.receive_bound, _expert_ranks(plan)))


def _expert_ranks(plan: Plan) -> int:
    """Return the number of ranks that divide the routed experts of a layer: expert ranks times tensor ranks."""
    return experts_over(plan) * plan.axis_size("tensor")


def elements_per_token(
    model: ModelSpec, plan: Plan, busiest: float = 1.0, tokens: float = 0.0
) -> Callable[[int], tuple[float, float]]:
    """Return a function that gives for a layer: (elements per token that its forward saves, temporary elements per token of its backward).

    `busiest` is explained in `mean_saved_elements`. If the feed-forward is computed in tiles, its gradient sums do not depend on the
    number of tokens; they are divided by the `tokens` of a micro-batch.
    """
    expert_ranks = _expert_ranks(plan)
    strategies = plan.strategies(model.layers)
    element = bytes_of(plan.precision.compute)
    share = float(tile_share(plan.mlp_tile, tokens)) if tokens else 1.0
    element_bytes_of_all_tokens = element * max(tokens, 1.0)
    by_block = dict[tuple[int, Recompute, Linear | None], tuple[float, float]]()
    by_layer = []
    for layer, (kind, strategy) in enumerate(zip(model.layer_kinds, strategies, strict=True)):
        key = kind, strategy.recompute, strategy.linear
        if key not in by_block:
            low = low_share(plan.precision, plan.linear(layer, model.layers))
            block = _block(model, layer, strategy.recompute)
            saved, temporary, sum_bytes = _elements(*block, low, expert_ranks, busiest, share, element)
            by_block[key] = saved, temporary + sum_bytes / element_bytes_of_all_tokens
        by_layer.append(by_block[key])
    return by_layer.__getitem__


@lru_cache(maxsize=1024)
def _elements(
    shape: Shape, mode: int, low: float, expert_ranks: int, busiest: float, share: float, element: int
) -> tuple[float, float, float]:
    """Return (elements per token that a forward saves, temporary elements per token of its backward, bytes of gradient sums over tiles).

    The third value is for a whole micro-batch.
    """
    saved = mean_saved_elements(shape, mode, low, expert_ranks, busiest)
    temporary = mean_backward_elements(shape, mode, low, expert_ranks, busiest, share)
    return float(saved), float(temporary), float(tile_sum_bytes(shape, mode, share, element))


def tokens_of(train: TrainSpec, plan: Plan) -> float:
    """Return the number of tokens of a micro-batch whose activations one rank stores. Context and tensor ranks divide the tokens."""
    return plan.batch.micro_batch * train.seq_len / (context_size(plan) * plan.axis_size("tensor"))


def saved_elements(model: ModelSpec, layer: int, recompute: Recompute, low: float = 1.0) -> float:
    """Return the elements per token that autograd saves in block `layer`, if all its experts are on one rank.

    `low` is explained in `mean_saved_elements`. In mode `full`, Llama-3-8B saves only the input of a block, 4,096 elements per token:

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
    """Return the elements per token that autograd saves in a block, mean over the layers of `shape`.

    What is saved follows from the block's table (`spec.blocks.memory`).

    - `recompute`: index of the mode in `RECOMPUTE_MODES`.
    - `low`: how many elements a saved input of a linear layer counts; below 1 if it is saved in fp8. Inputs of routed experts always count
      1, because the weight gradients of experts are not computed in fp8.
    - `expert_ranks`: with more than one, rows are exchanged between ranks, and other tensors are saved.
    - `busiest`: rows of this rank's experts, relative to the mean over ranks.
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
    # The last dimension has the fields of `spec.blocks.memory.Elements`.
    own = elements[..., 0]
    rounded = elements[..., 1]
    received = elements[..., 2]
    return own + low * rounded + busiest * received


def mean_backward_elements(
    shape: Shape, recompute: Array, low: Array = 1.0, expert_ranks: Array = 1.0, busiest: Array = 1.0, tile: Array = 1.0
) -> Array:
    """Return the temporary elements per token in a block's backward, in addition to what its forward saved; mean over the layers.

    They are the sum of these:

    - the gradients of the feed-forward's activations and of the residual stream;
    - recomputed activations;
    - the inputs of experts, or the gradients of these inputs. Without recomputed matmuls and with several expert ranks they do not count,
      because they are stored in place of the experts' saved outputs, which the backward has freed by then;
    - with fp8, rounded copies of the gradients that experts multiply.

    If a dense feed-forward is computed in tiles, only the share `tile` of its wide tensors exists at a time (`tile_share`). The other
    arguments are explained in `mean_saved_elements`.
    """
    mode = np.asarray(recompute)
    expert_inputs = busiest * shape.expert_rows
    in_experts = busiest * shape.expert_activated
    recomputed = (
        mean_saved_elements(shape, 0, low, busiest=busiest)
        - mean_saved_elements(shape, recompute, low, busiest=busiest)
        - expert_inputs
    )
    repeats_matmuls = mode >= RECOMPUTE_MODES.index("all_but_attention")
    rounded = np.where(low < 1, low * in_experts, 0.0)
    inputs = np.where((np.asarray(expert_ranks) > 1) & ~repeats_matmuls, 0.0, expert_inputs)
    in_tiles = np.where(repeats_matmuls, (1 - np.asarray(tile)) * shape.tiled, 0.0)
    gradients = shape.activated + in_experts + shape.hidden
    return gradients + inputs + rounded + np.where(mode > 0, recomputed, 0.0) - in_tiles


def tile_share(tile: Array, tokens: Array) -> Array:
    """Return the share of a micro-batch's `tokens` that is in one tile of `tile` tokens; 1 if there are no tiles (`tile` is 0)."""
    return np.where(np.asarray(tile) > 0, np.minimum(1.0, tile / np.maximum(tokens, 1.0)), 1.0)


def tile_sum_bytes(shape: Shape, recompute: Array, share: Array, element: Array) -> Array:
    """Return the bytes of weight gradients of a dense feed-forward in tiles: their sums, and those of one tile in the compute dtype.

    It is 0 where no tiles are used (`share` is 1), and where the backward does not recompute matmuls.
    """
    tiled = (np.asarray(recompute) >= RECOMPUTE_MODES.index("all_but_attention")) & (np.asarray(share) < 1)
    return np.where(tiled, shape.tiled_weights * (np.maximum(4.0, element) + element), 0.0)


def offloaded_bytes(shape: Shape, layout: Layouts) -> Array:
    """Return the bytes of one layer and micro-batch that a rank copies to host memory, and later back; mean over layers."""
    tokens = layout.micro_batch * layout.seq / layout.context / layout.tensor
    return COMPUTE_BYTES * tokens * mean_saved_elements(shape, layout.recompute, 1.0, np.asarray(layout.expert))


def received_elements(model: ModelSpec, tensor: Array, context: Array) -> Array:
    """Return the elements per token that the block in computation has received from other ranks.

    From tensor ranks: its gathered input, and the gradient of that input. From context ranks: queries, keys and values.
    """
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim  # values are padded to the width of keys
    return (tensor > 1) * 2.0 * tensor * model.hidden + (context > 1) * heads


def score_gradient_bytes(model: ModelSpec, samples: Array, seq: Array, tensor: Array) -> Array:
    """Return the bytes of gradients of attention scores that exist at the same time on a rank.

    The rank has `samples` sequences of `seq` tokens, and `tensor` ranks divide the heads. Heads that share keys and values form a group.
    As many groups are computed together as fit in `SCORE_BYTES`, but at least one.
    """
    group_bytes = score_bytes(seq, model.heads / model.kv_heads)
    groups = np.maximum(1.0, np.asarray(samples) * model.kv_heads / np.asarray(tensor))
    groups_that_fit = np.maximum(1.0, SCORE_BYTES // group_bytes)
    return group_bytes * np.minimum(groups, groups_that_fit)


def moving_elements(model: ModelSpec) -> float:
    """Return the elements per token that are exchanged while another micro-batch computes: the rows sent, and the rows received."""
    return 2.0 * model.experts_per_token * model.hidden


def prediction_elements(model: ModelSpec, modules: Array, saved: Array, temporary: Array) -> Array:
    """Return the elements per token that `modules` prediction modules have in memory when their backward begins.

    All modules have run forward by then. Each has saved what its block saves (`saved`), and six vectors of the hidden size: the embedded
    token, the joined inputs (two), the block's output, its norm, and the gradient from the head. The `temporary` elements of a block's
    backward exist only once.
    """
    return modules * (saved + 6 * model.hidden) + np.where(np.asarray(modules) > 0, temporary, 0.0)


def _block(model: ModelSpec, layer: int, recompute: Recompute) -> tuple[Shape, int]:
    """Return the shape of a model whose blocks are all like block `layer`, and the index of the recompute mode."""
    return shape_of(model, 1, kind=model.kind(layer)), RECOMPUTE_MODES.index(recompute)
