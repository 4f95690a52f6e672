"""The least work that one device must do in a training step, from model and plan: matmuls, attention, bytes, collectives.

It is a lower bound for any implementation with these layers and number formats: without recomputation, without copies that can be
avoided, and with one kernel for each chain of element-wise operations, which reads every input once and writes every output once. Experts
get equally many tokens, and ring ranks equal shares of causal attention. Work divided by measured rates gives the roofline time
(`benchmarks/roofline.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.spec.blocks.block import BlockSpec
from meshwright.spec.blocks.latent_attention import LatentAttentionSpec
from meshwright.spec.blocks.table import ActivateOp, NormOp
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import gradients_final_in_backward
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import Plan
from meshwright.spec.profile import Format, Operation
from meshwright.workload.dtypes import bytes_of
from meshwright.workload.groups import context_size, experts_over, shard_size
from meshwright.workload.layer_matmuls import layer_matmuls
from meshwright.workload.layer_messages import layer_messages, weight_collectives
from meshwright.workload.layouts import Layouts, layout_of
from meshwright.workload.model_shape import Shape, shape_of
from meshwright.workload.step_shape import StepShape, step_shape

NORM = 8.0
"""Elements that a norm reads and writes in forward and backward, per element of its width, if it is fused with the residual sum before."""
ROPE = 4.0
"""Elements that the rotary embedding reads and writes in forward and backward, per element of queries and keys."""
SWIGLU = 8.0
"""Elements that SwiGLU reads and writes in forward and backward, per element of the feed-forward width."""
GELU = 5.0
"""Elements that an activation without a gate reads and writes in forward and backward, per element of the feed-forward width."""
EMBEDDING_AND_NORM = 12.0
"""Elements that embedding and final norm read and write in forward and backward, per element of the hidden size."""
QUANTISE = {"linear": 4.0, "expert": 3.0, "router": 0.0, "adapter": 0.0, "expert_adapter": 0.0}
"""Bytes moved for each element that is quantised to fp8, by role of the matmul.

`linear`: the element is read a second time, because the scale needs the maximum of all elements first (2 bytes), and is written in two
layouts (2 bytes). `expert`: each row has its own scale, and one layout is enough (3 bytes).
"""
FP8_MATMULS = {"linear": 3, "expert": 2, "router": 0, "adapter": 0, "expert_adapter": 0}
"""How many of a linear layer's three matmuls (forward, two gradients) are in fp8. The weight gradient of experts is not."""
CAST = 6.0
"""Bytes per parameter to cast a master weight to the compute dtype."""
SUM = 6.0
"""Bytes per parameter to cast a gradient to the dtype of the reduction."""
COMBINE = 2.0
"""Elements read and written in forward and backward to add up the outputs of a token's experts.

It counts once for each element of each expert's output, and once for each element of the sum.
"""


@dataclass(frozen=True)
class LinearWork:
    """`count` equal linear layers in a step. Each needs three matmuls: the forward (m, k) × (k, n), and two for the gradients.

    A linear layer of 4,096 inputs and outputs with 16 tokens needs 3 matmuls of 2 · 16 · 4,096² FLOPs:

    >>> LinearWork(m=16, k=4096, n=4096, format="bf16", count=1).flops / (16 * 4096**2)
    6.0
    """

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
    """`count` equal causal attention operations, forward and backward, each over `tokens` tokens in sequences of `seq` tokens.

    With a ring, a rank computes only a part of each operation, so `count` is smaller. With `window`, a token attends to that many tokens
    including itself; else to all tokens up to itself.
    """

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    """Mean of the widths of a key and a value."""
    tokens: int
    count: float
    window: int | None = None


@dataclass(frozen=True)
class CollectiveWork:
    """`count` equal collectives among `ranks` ranks. `bytes` is the gathered result or the input of a reduction, as in `LayerMessage`."""

    op: Operation
    ranks: int
    bytes: float
    count: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one rank in a step; with a pipeline, the mean over pipeline ranks."""

    linears: tuple[LinearWork, ...]
    """Linear layers, one entry for each size and format."""
    attention: tuple[AttentionWork, ...]
    """Attention, one entry for each size and window."""
    elementwise_bytes: float
    """Bytes moved by norms, activation functions and other element-wise operations."""
    quantise_bytes: float
    """Bytes moved to quantise to fp8."""
    loss_bytes: float
    """Bytes of logits that the loss reads and writes."""
    copy_bytes: float
    """Bytes moved to cast master weights and gradients."""
    parameters: float
    """Parameters that the rank's optimizer updates."""
    norm_bytes: float
    """Bytes read for the gradient norm."""
    collectives: tuple[CollectiveWork, ...]

    @property
    def matmul_flops(self) -> float:
        return sum(linear.flops for linear in self.linears)


def step_work(model: ModelSpec, train: TrainSpec, plan: Plan) -> Work:
    """Return the work of one rank in a training step of `plan`."""
    tensor_ranks = plan.axis_size("tensor")
    stages = plan.axis_size("pipeline")
    micro_batches = plan.batch.accumulate
    micro_batch_tokens = plan.batch.micro_batch * train.seq_len
    shape = shape_of(model, train.seq_len)
    layout = layout_of(model, train, plan)
    ideal_layout = replace(layout, imbalance=1.0, recompute=0.0)
    step = step_shape(shape, ideal_layout)
    tokens = micro_batch_tokens // context_size(plan)
    linears: defaultdict[LinearWork, float] = defaultdict(float)
    for linear in _linears(model, train, plan, step):
        linears[replace(linear, count=1.0)] += linear.count
    rank_tokens = tokens * micro_batches / tensor_ranks / stages
    """Tokens of the step on this rank, divided by tensor ranks and stages."""
    dense, experts = (
        sum(parameter.count for parameter in parameters(model) if parameter.expert == routed) / tensor_ranks / stages
        for routed in (False, True)
    )
    unsharded = dense + experts / experts_over(plan)
    owned = (dense + experts) / shard_size(plan)
    return Work(
        linears=tuple(replace(linear, count=count * micro_batches / stages) for linear, count in linears.items()),
        attention=tuple(_attention(model, train, plan)),
        elementwise_bytes=rank_tokens * _elementwise_elements(model) * bytes_of(plan.precision.compute),
        quantise_bytes=rank_tokens * _quantised_bytes(model, plan),
        loss_bytes=rank_tokens * (1 + model.prediction_depth) * model.outputs * 2 * bytes_of(plan.precision.compute),
        copy_bytes=owned * CAST + _summed_bytes(model, plan, unsharded),
        parameters=owned,
        norm_bytes=owned
        * bytes_of(plan.precision.compute if gradients_final_in_backward(model, plan) else plan.precision.stored),
        collectives=(
            *_weight_collectives(model, layout, plan, dense, shard_size(plan)),
            *_weight_collectives(
                model, layout, plan, experts / experts_over(plan), shard_size(plan) // experts_over(plan)
            ),
            *_token_collectives(shape, ideal_layout, plan, step),
        ),
    )


def _attention(model: ModelSpec, train: TrainSpec, plan: Plan) -> Iterator[AttentionWork]:
    """Yield the attention of all blocks on one rank in a step, one entry for each kind of attention."""
    tensor_ranks, stages, ring_ranks = (plan.axis_size(axis) for axis in ("tensor", "pipeline", "context_ring"))
    heads = tensor_ranks * plan.axis_size("context_ulysses")
    blocks = Counter(op for layer in _blocks(model) for op in model.block(layer).table().attends)
    for op, count in blocks.items():
        yield AttentionWork(
            train.seq_len,
            op.heads // heads,
            max(1, op.kv_heads // heads),
            (op.key_dim + op.value_dim) // 2,
            plan.batch.micro_batch * train.seq_len,
            plan.batch.accumulate * count / stages / ring_ranks,
            op.window if (op.window or train.seq_len) < train.seq_len else None,
        )


def _summed_bytes(model: ModelSpec, plan: Plan, parameter_count: float) -> float:
    """Return the bytes moved to cast gradients to the dtype of the reduction; 0 if the backward writes final gradients."""
    return 0.0 if gradients_final_in_backward(model, plan) else parameter_count * SUM


def _linears(model: ModelSpec, train: TrainSpec, plan: Plan, step: StepShape) -> Iterator[LinearWork]:
    """Yield the linear layers of one micro-batch on one tensor rank: those of all layers, the head and the prediction modules."""
    tensor_ranks = plan.axis_size("tensor")
    compute_dtype = plan.precision.compute
    layers = Counter((model.kind(layer), plan.linear(layer, model.layers) != "compute") for layer in _blocks(model))
    for (kind, is_fp8), count in layers.items():
        for matmul in layer_matmuls(shape_of(model, train.seq_len, kind=kind), step, tensor_ranks):
            m, k, n = (max(1, round(float(size))) for size in (matmul.m, matmul.k, matmul.n))
            in_block = float(matmul.layers) / model.layers
            low = FP8_MATMULS[matmul.role] / 3 if is_fp8 else 0.0
            shares: tuple[tuple[Format, float], ...] = (("fp8", low), (compute_dtype, 1 - low))
            for number_format, share in shares:
                if share:
                    yield LinearWork(m, k, n, number_format, share * count * in_block * float(matmul.count))
    chunk = min(int(step.tokens), train.loss_chunk)
    uses = 1 + model.prediction_depth
    outputs = max(1, model.outputs // tensor_ranks)
    yield LinearWork(chunk, model.hidden, outputs, compute_dtype, uses * step.tokens / chunk)
    if model.prediction_depth:
        own = max(1, int(step.tokens) // tensor_ranks)
        yield LinearWork(own, 2 * model.hidden, model.hidden, compute_dtype, model.prediction_depth)


def _blocks(model: ModelSpec) -> list[int]:
    """Return the layer index of every block. The block of a prediction module counts as one more last layer."""
    return [*range(model.layers), *[model.layers - 1] * model.prediction_depth]


def _elementwise_elements(model: ModelSpec) -> float:
    """Return the elements per token that element-wise operations of the whole model read and write, without attention and loss."""
    blocks = sum(_block_elements(model.block(layer)) for layer in _blocks(model))
    ends = (
        EMBEDDING_AND_NORM * (1 + model.prediction_depth) + NORM * model.prediction_depth
    )  # a module norms both inputs
    return blocks + ends * model.hidden


@lru_cache(maxsize=64)
def _block_elements(block: BlockSpec) -> float:
    """Return the elements per token that the element-wise operations of a block read and write."""
    total = 0.0
    table = block.table()
    for op in table.operations:
        if isinstance(op, NormOp) and "." not in op.name:  # of the residual stream or of an output to it
            total += NORM * op.width
        elif isinstance(op, ActivateOp):
            gated = table.values[op.reads[0]].width == 2 * op.writes[0].width
            total += (SWIGLU if gated else GELU) * op.writes[0].elements
    mixer = block.mixer
    moe = block.moe
    if isinstance(mixer, LatentAttentionSpec):
        total += NORM * (mixer.q_rank + mixer.kv_rank) / 2  # norms without a residual sum
    if mixer.rotary is not None:
        kv_heads = mixer.heads if isinstance(mixer, LatentAttentionSpec) else mixer.kv_heads
        total += ROPE * (mixer.heads + kv_heads) * mixer.head_dim
    return total + (COMBINE * (moe.per_token + 1) * block.hidden if moe is not None else 0.0)


def _quantised_bytes(model: ModelSpec, plan: Plan) -> float:
    """Return the bytes per token moved to quantise to fp8: of each linear layer in fp8, its input and the gradient of its output."""
    layers = Counter(model.kind(layer) for layer in _blocks(model) if plan.linear(layer, model.layers) != "compute")
    step = StepShape(1, 1, 1, 1, model.experts_per_token)
    return sum(
        count * float(matmul.layers) / model.layers * QUANTISE[matmul.role] * float((matmul.k + matmul.n) * matmul.m)
        for kind, count in layers.items()
        for matmul in layer_matmuls(shape_of(model, 1, kind=kind), step, 1)
    )


def _weight_collectives(
    model: ModelSpec, layout: Layouts, plan: Plan, parameter_count: float, shard: int
) -> Iterator[CollectiveWork]:
    """Yield the collectives of parameters that `shard` ranks share, as if divided evenly among the blocks.

    All blocks count with the strategy of the plan's first layer (`layout`).
    """
    if not parameter_count:
        return
    replicate = plan.axis_size("replicate")
    block = parameter_count / model.layers
    blocks = float(model.layers)
    gathered = 1 if plan.precision.gather == "fp8" else bytes_of(plan.precision.compute)
    if shard > 1:
        gathers, reductions = map(float, weight_collectives(layout))
        yield CollectiveWork("all_gather", shard, block * gathered, gathers * blocks)
        yield CollectiveWork("reduce_scatter", shard, block * bytes_of(plan.precision.reduce), reductions * blocks)
    if replicate > 1:
        summed = bytes_of(plan.precision.reduce_replicas or plan.precision.stored)
        yield CollectiveWork("all_reduce", replicate, block / shard * summed, blocks)


def _token_collectives(shape: Shape, layout: Layouts, plan: Plan, step: StepShape) -> Iterator[CollectiveWork]:
    """Yield the collectives inside layers for all micro-batches of a step, as the mean over pipeline ranks."""
    for message in layer_messages(shape, layout, step, element=bytes_of(plan.precision.compute)):
        if message.ranks > 1 and message.count:
            ranks = 2 if message.op == "p2p" else int(message.ranks)
            count = float(message.count) * plan.batch.accumulate / plan.axis_size("pipeline")
            yield CollectiveWork(message.op, ranks, float(message.bytes), count)
