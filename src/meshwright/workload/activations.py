"""Elements and bytes of activations: kept by a block's forward for its backward, and held during the backward.

Counts what autograd keeps of a block whose element-wise work is fused: every matrix product's input, what attention
reads and writes, the two residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import stage_table
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import RECOMPUTES_PRODUCTS, Linear, Plan, Recompute
from meshwright.workload.dtypes import bytes_of, low_share
from meshwright.workload.groups import context_size, experts_over

Array = Any
"""A number or an array of numbers."""


def activation_bytes(
    model: ModelSpec, train: TrainSpec, plan: Plan, *, host_offloaded: bool = False
) -> tuple[float, ...]:
    """Bytes that one forward of each virtual stage keeps until its backward, in the order of a micro-batch.

    On the device, or offloaded to host memory.
    """
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    stages = sorted((stage for row in table for stage in row), key=lambda stage: stage.start)
    elements, strategies = saved_elements_by_layer(model, plan), plan.strategies(model.layers)
    left = [
        kept if one.activations_offloaded == host_offloaded else 0.0
        for kept, one in zip(elements, strategies, strict=True)
    ]
    each = tokens_of(train, plan) * bytes_of(plan.precision.compute)
    return tuple(each * sum(left[stage.start : stage.stop]) for stage in stages)


def saved_elements_by_layer(model: ModelSpec, plan: Plan) -> list[float]:
    """By layer, the elements of one token that a forward saves for its backward, on the device or in host memory."""
    per_token = elements_per_token(model, plan)
    return [per_token(layer)[0] for layer in range(model.layers)]


def elements_per_token(model: ModelSpec, plan: Plan) -> Callable[[int], tuple[float, float]]:
    """A function of a layer: elements of one token that its forward saves, and temporary elements of its backward."""
    spread, strategies = experts_over(plan) * plan.axis_size("tensor"), plan.strategies(model.layers)
    known = dict[tuple[bool, Recompute, Linear | None], tuple[float, float]]()

    def per_token(layer: int) -> tuple[float, float]:
        mode = strategies[layer].recompute
        key = model.routed(layer), mode, strategies[layer].linear
        if key not in known:
            low = low_share(plan.precision, plan.linear(layer, model.layers))
            kept = saved_elements(model, layer, mode, low) + exchanged_expert_elements(model, layer, mode, spread)
            known[key] = kept, backward_elements(model, layer, mode, low)
        return known[key]

    return per_token


def tokens_of(train: TrainSpec, plan: Plan) -> float:
    """Tokens of a micro-batch whose activations one rank stores: context and tensor ranks share them."""
    return plan.batch.micro_batch * train.seq_len / (context_size(plan) * plan.axis_size("tensor"))


def saved_elements(model: ModelSpec, layer: int, recompute: Recompute, low: float = 1.0) -> float:
    """Elements of one token that autograd saves in block `layer`; inputs of products count `low`."""
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    joined = query + 2 * kv
    if recompute in RECOMPUTES_PRODUCTS:
        return model.hidden + (query if recompute == "all_but_attention" else 0)
    wide, inner, routed = _feed_forward(model, layer)
    if recompute == "selective":
        # What experts are given is gathered again; what they gave is the result of a product.
        return 2 * model.hidden + query + joined + wide + routed - _copied(model, layer)
    # Each norm with what it reads and makes: a parallel block has one, and nothing keeps the sums of its two branches.
    norms = 1 if model.parallel_block else 2
    # Values are a view into the joined projection, which therefore stays whole beside the turned queries and keys.
    turned = query + kv if model.positions == "rope" else 0
    # Attention keeps its own result as it is: in fp8 the product behind it has a copy.
    again = low * query if low < 1 else 0
    return (1 + low) * norms * model.hidden + query + again + joined + turned + wide + low * inner + routed


def exchanged_expert_elements(model: ModelSpec, layer: int, recompute: Recompute, ranks: int) -> float:
    """Further elements of one token that are saved if its experts are on `ranks` ranks.

    Selective recompute does not exchange tokens twice: it saves the experts' outputs as they were sent and as they were received.
    """
    again = recompute == "selective" and ranks > 1
    return 2 * _copied(model, layer) if again else 0.0


def backward_elements(model: ModelSpec, layer: int, recompute: Recompute, low: float = 1.0) -> float:
    """Temporary elements of one token in a block's backward, beside what its forward saved.

    They are the gradients of the feed-forward's wide half and of the residual stream, and recomputed activations. An expert's input and
    output do not exist at once: the backward frees the output before it gathers the input again.
    """
    wide, _, _ = _feed_forward(model, layer)
    made = wide + model.hidden
    if recompute == "none":
        return made
    again = saved_elements(model, layer, "none", low) - saved_elements(model, layer, recompute, low)
    return made + again - _copied(model, layer)


def received_elements(model: ModelSpec, tensor: Array, context: Array) -> Array:
    """Elements of one token that the computing block received: its gathered input with the gradient; queries, keys and values."""
    gathered = np.where(np.asarray(tensor) > 1, 2.0 * np.asarray(tensor) * model.hidden, 0.0)
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    return gathered + np.where(np.asarray(context) > 1, heads, 0)


def _feed_forward(model: ModelSpec, layer: int) -> tuple[float, float, float]:
    """Elements of one token before and after the activation, and of routing: copies for and of its experts, and choices."""
    width, routed = model.ffn_hidden, 0.0
    if model.routed(layer):
        width = model.experts_per_token * model.expert_hidden + model.shared_expert_hidden
        routed = 2 * _copied(model, layer) + model.experts
    return (2 * width if model.mlp == "swiglu" else width), width, routed


def _copied(model: ModelSpec, layer: int) -> float:
    """Elements of a token's copies, one for each of its experts; 0 in a block without."""
    return float(model.experts_per_token * model.hidden) if model.routed(layer) else 0.0
