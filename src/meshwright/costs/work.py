"""What one step asks of one rank's device, counted from model and plan alone: products by shape, attention, bytes, collectives.

It is the least that any implementation with these layers and formats must do: nothing recomputed, no copy that a better buffer would
save, and every element-wise chain in one kernel that reads each tensor it needs once and writes each that it makes once. Over measured
rates it gives the time that the device needs (`observe.roofline`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.costs.memory import bytes_of
from meshwright.spec.errors import BadInput
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import Plan
from meshwright.spec.profile import Format, Operation

NORM, ROPE = 8.0, 4.0
"""Elements read and written, forward and backward: of a norm that is joined to the residual sum before it, per element of the stream; of
the rotary embedding, per element of queries and keys."""
SWIGLU, GELU = 8.0, 5.0
"""The same of the activation, per element of the feed-forward width."""
ENDS = 12.0
"""The same of embedding and final norm, per element of the stream."""
ROUND = 4.0
"""Bytes per rounded element: read once more, as the scale needs the largest first, and written in fp8 in both orders."""
CAST, SUM = 6.0, 6.0
"""Bytes per parameter: a master weight to the format that is multiplied; a gradient to the format that is summed."""
NORM_OF_GRADIENT = 4.0


@dataclass(frozen=True)
class LinearWork:
    """`count` linear layers in a step, each three products: forward (m, k) times (k, n), and both gradients."""

    m: int
    k: int
    n: int
    format: Format
    count: float

    @property
    def flops(self) -> float:
        return 6.0 * self.count * self.m * self.k * self.n


@dataclass(frozen=True)
class AttentionWork:
    """`count` causal attentions, forward and backward, over `tokens` tokens in sequences of `seq`."""

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    count: float


@dataclass(frozen=True)
class CollectiveWork:
    """`count` collectives of `bytes` (the gathered result, what is reduced) among `ranks`."""

    op: Operation
    ranks: int
    bytes: float
    count: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """One rank's step; with a pipeline the mean over its ranks."""

    linears: tuple[LinearWork, ...]
    attention: AttentionWork
    elementwise_bytes: float
    quantise_bytes: float
    loss_bytes: float
    copy_bytes: float
    parameters: float
    """That the rank's optimizer steps."""
    norm_bytes: float
    """Read for the gradient norm."""
    collectives: tuple[CollectiveWork, ...]

    @property
    def product_flops(self) -> float:
        return sum(linear.flops for linear in self.linears)


def step_work(model: ModelSpec, train: TrainSpec, plan: Plan) -> Work:
    """What one training step of `plan` asks of a rank. Raises BadInput for a model with experts or a sliding window, and for ranks that
    split a sequence."""
    if model.experts or model.sliding_window:
        raise BadInput(
            "a step's work is counted for dense models with full causal attention; this one has experts or a sliding window"
        )
    if plan.axis_size("context_ring") * plan.axis_size("context_ulysses") > 1:
        raise BadInput(
            "the work of a step is counted for whole sequences on each rank; the plan splits them over context ranks"
        )
    width, stages = plan.axis_size("tensor"), plan.axis_size("pipeline")
    tokens, times = plan.batch.micro_batch * train.seq_len, plan.batch.accumulate
    linears: defaultdict[LinearWork, float] = defaultdict(float)
    for linear in _linears(model, train, plan, tokens):
        linears[replace(linear, count=1.0)] += linear.count
    seen = tokens * times / width / stages
    """Token passes of the rank, the share of width that it has taken out."""
    held = sum(row.count for row in parameters(model)) / width / stages
    owned = held / plan.axis_size("shard")
    return Work(
        linears=tuple(replace(one, count=count * times / stages) for one, count in linears.items()),
        attention=AttentionWork(
            train.seq_len, model.heads // width, max(1, model.kv_heads // width), model.head_dim, tokens, times * model.layers / stages
        ),
        elementwise_bytes=seen * _elements(model) * bytes_of(plan.precision.compute),
        quantise_bytes=seen * _rounded(model, plan) * ROUND,
        loss_bytes=seen * model.vocab_size * 2 * bytes_of(plan.precision.compute),
        copy_bytes=owned * CAST + held * SUM,
        parameters=owned,
        norm_bytes=owned * NORM_OF_GRADIENT,
        collectives=tuple(_collectives(model, plan, held)),
    )  # fmt: skip


def _linears(model: ModelSpec, train: TrainSpec, plan: Plan, tokens: int) -> Iterator[LinearWork]:
    """Of one micro-batch on ranks of one width, all layers and the head."""
    width = plan.axis_size("tensor")
    for layer in range(model.layers):
        kind: Format = "fp8" if plan.linear(layer, model.layers) != "compute" else plan.precision.compute
        for inputs, outputs, split_in in _shapes(model):
            k, n = (inputs // width, outputs) if split_in else (inputs, outputs // width)
            yield LinearWork(tokens, k, n, kind, 1.0)
    chunk = min(tokens, train.loss_chunk)
    yield LinearWork(chunk, model.hidden, model.vocab_size // width, plan.precision.compute, tokens / chunk)


def _shapes(model: ModelSpec) -> tuple[tuple[int, int, bool], ...]:
    """Inputs and outputs of a block's linear layers, and whether tensor ranks split the inputs (else the outputs)."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    into = 2 * model.ffn_hidden if model.mlp == "swiglu" else model.ffn_hidden
    return (
        (model.hidden, queries + 2 * keys, False),
        (queries, model.hidden, True),
        (model.hidden, into, False),
        (model.ffn_hidden, model.hidden, True),
    )


def _elements(model: ModelSpec) -> float:
    """Elements that a token's passes outside of products, attention and loss read and write."""
    norms = 1 if model.parallel_block else 2
    turned = (model.heads + model.kv_heads) * model.head_dim if model.positions == "rope" else 0
    activation = SWIGLU if model.mlp == "swiglu" else GELU
    layer = norms * NORM * model.hidden + ROPE * turned + activation * model.ffn_hidden
    return model.layers * layer + ENDS * model.hidden


def _rounded(model: ModelSpec, plan: Plan) -> float:
    """Elements per token that are rounded to fp8: the input and the output's gradient of every product in it."""
    low = sum(plan.linear(layer, model.layers) != "compute" for layer in range(model.layers))
    return low * sum(inputs + outputs for inputs, outputs, _ in _shapes(model))


def _collectives(model: ModelSpec, plan: Plan, held: float) -> Iterator[CollectiveWork]:
    """Gathers and reductions as often as the plan's strategy of the first layer asks, a block at a time."""
    shard, replicate = plan.axis_size("shard"), plan.axis_size("replicate")
    strategy, times = plan.layers[0], 1 if plan.layered else plan.batch.accumulate
    block, blocks = held / model.layers, float(model.layers)
    gathered = 1 if plan.precision.gather == "fp8" else bytes_of(plan.precision.compute)
    if shard > 1:
        gathers = 2 * times if strategy.reshard else 1
        yield CollectiveWork("all_gather", shard, block * gathered, gathers * blocks)
        reductions = 1 if strategy.gradients == "whole" else times
        yield CollectiveWork("reduce_scatter", shard, block * bytes_of(plan.precision.reduce), reductions * blocks)
    if replicate > 1:
        summed = bytes_of(plan.precision.reduce_replicas or plan.precision.stored)
        yield CollectiveWork("all_reduce", replicate, block / shard * summed, blocks)
