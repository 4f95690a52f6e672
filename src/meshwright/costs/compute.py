"""Seconds of one layer's arithmetic on one device, for one micro-batch.

A matmul (m, k, n) takes 2 m k n / (peak × share) × (1 + narrow × (1/m + 1/k + 1/n)). The last factor is the roofline's
memory term: the bytes per FLOP of a matmul are proportional to the sum of its dimensions' inverses. If the number of
multiprocessors is known, m n is rounded up to whole waves of tiles. The time of attention follows from its FLOPs at a
separate share of the peak, with a window at that of another kernel; that of all other operations from their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine, expert_matmuls
from meshwright.workload.arrays import Array
from meshwright.workload.layer_matmuls import Matmul, layer_matmuls
from meshwright.workload.layouts import ALL_BUT_ATTENTION, Layouts
from meshwright.workload.model_shape import Shape
from meshwright.workload.step_shape import StepShape, step_shape

KERNELS_WITH_TAIL = 16.0
"""Kernels of one layer's forward with a tail effect (matmuls, norms, activation, attention)."""

PRICE_OF_ORDER = (64.0, 128.0), (0.16, 0.01)
"""Head sizes, and what a fixed order of its sums adds to attention's backward (`kernels.fixed_order_attention`), relative to it.

One H200, torch 2.11, cuDNN 9.19, 16,384 tokens a step: 254 ms against 250 (Llama-3.2-1B, head size 64), 437 against 436 to 437 (8 layers
of Llama-3-8B, 128); attention's backward takes 25 and 42 ms of them in this model.
"""
SMALL_HEAD = 32.0
"""Head size at which attention takes twice as long for its FLOPs as with very wide heads."""
WIDE_HEAD = 192.0
"""Kernels for wider heads have smaller tiles and a rate of their own."""
UNFUSED_SCORE_BYTES = 8.0
"""Bytes moved per score, forward, by attention that a run states to be unfused: those of Megatron-LM's tables."""
BACKWARD_RATIO = 2.5
"""Time of fused attention's backward relative to its forward: five matmuls instead of two (Dao et al. 2022)."""
QUERY_BLOCK_KEYS = 350.0
"""Keys in whose time attention with a window does what it does once for a block of queries, whatever the window.

Measured on an H200 (benchmarks/results/2026-11-29-attention-windows-H200.json).
"""
NORM_BYTES = 6.0
"""Bytes per element of a forward that one more norm than `Constants.passes` includes moves, 1.5 times as many in the backward.

A norm reads and writes 8 elements in all if it is fused with a residual sum (`workload.device_work`).
"""
MISALIGNED_HEAD = 1.35
"""Slow-down of matmuls and attention if the head size is no multiple of 8."""

ACTIVATION_BYTES_RATIO = 2 / 3
"""Bytes per element of an expert's activation function, relative to those of dispatch and combine.

6 (two halves read, one result written) over 9 (read and written twice, and the sum).
"""
EXPERT_ROUNDING_BYTES = 3.0
"""Bytes per element that is rounded to fp8 with one scale per row: bf16 read, fp8 written (`kernels.grouped_fp8`)."""
HEAD_ROUNDING_BYTES = 6.0
"""Bytes per weight of the head to round its gradient from fp32 to bf16 (`kernels.loss`)."""
HEAD_SUM_BYTES = 0.1 * 8.0
"""Bytes per weight of the head and chunk of logits that its gradient's fp32 sum moves and its matmul does not hide.

Of 8 bytes the matmul hides all but a tenth: 24 more chunks took 1.1 ms, not 12 (2026-11-23-levers-one-gpu-H200.jsonl).
"""
OBJECTIVE_LOGITS = 1 / 3
"""Times that log-probabilities read the logits: a loss with its gradient reads them twice and writes them once."""
EAGER_PASSES = 5 / 3
"""Element-wise bytes of a layer without fusing, relative to `Constants.passes`: 100 over 60, the guesses of benchmarks/fit_costs.py."""
GRAPHS_US = 50.0
"""Host time of a layer whose forward and backward are one CUDA graph each: two launches of 10 to 20 µs, and what is between; a guess."""
BIAS_BYTES = 20.0
"""Bytes per element to add a routed expert's bias, one expert after another, in other training stacks.

Megatron-Core adds in fp32, concatenates and casts (`TEGroupedMLP._apply_bias`).
"""

ADAPTER_PASSES = 2.4, 3.9
"""Seconds of an adapter in reads of its layer's input and output at full memory rate, forward and backward, mean of A and B.

A reads the input; its backward reads it again and adds to the input's gradient. B adds to the output; its backward reads the output's
gradient twice. That is 1.5 and 2.5 passes; matmuls so narrow take 1.57 times as long: adapters of rank 16 on all linear
layers of Llama-3-8B took 47 ms of a step on an H200, and passes at full rate 30 (2026-11-29-lora-2xH200.json).
"""
TILE = 128.0
"""Tile of a matmul that one multiprocessor computes at a time; libraries use 64 to 256 (CUTLASS)."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one micro-batch on one tensor rank: all layers on the device and on the host, head, and embedding.

    `head` includes prediction modules, with the mean time of a layer for their blocks.
    """

    forward: Array
    backward: Array
    host: Array
    head: Array
    embed: Array
    recomputed: Array
    """Part of `backward` that computes activations again."""


def elements_in_waves(m: Array, n: Array, multiprocessors: Array, count: Array = 1.0) -> Array:
    """Elements of `count` results m × n, rounded up to whole waves of tiles; not rounded where `multiprocessors` is 0."""
    elements = count * m * n
    if not np.any(multiprocessors):
        return elements
    tiles = count * np.ceil(m / TILE - 1e-6) * np.ceil(n / TILE - 1e-6)
    waves = np.ceil(tiles / np.maximum(multiprocessors, 1.0) - 1e-6)
    return np.where(multiprocessors > 0, waves * multiprocessors * TILE * TILE, elements)


@dataclass(frozen=True)
class MatmulRate:
    """Rate of a device's matmuls in one format."""

    flops: Array
    """FLOP/s of a large matmul."""
    narrow: Array
    """Smallest dimension at which the time per FLOP doubles."""
    multiprocessors: Array

    def seconds(self, m: Array, inner: Array, n: Array, count: Array = 1.0) -> Array:
        """Seconds of `count` equal matmuls (m, inner) × (inner, n) launched together; zero when a dimension is zero."""
        inverse_sum = 1 / np.maximum(m, 1.0) + 1 / np.maximum(inner, 1.0) + 1 / np.maximum(n, 1.0)
        result_elements = elements_in_waves(m, n, self.multiprocessors, count)
        return 2 * result_elements * inner / self.flops * (1 + self.narrow * inverse_sum)

    def forward_backward(
        self, m: Array, inner: Array, n: Array, count: Array = 1.0, *, frozen: Array = 0.0
    ) -> ForwardBackward:
        """Seconds of the forward, and of the backward, which computes the gradients of both operands, but not that of a `frozen` weight."""
        backward = self.seconds(m, n, inner, count) + (1 - frozen) * self.seconds(inner, m, n, count)
        return ForwardBackward(self.seconds(m, inner, n, count), backward)


@dataclass(frozen=True)
class ForwardBackward:
    """Seconds of forward and backward."""

    forward: Array
    backward: Array

    def __add__(self, other: ForwardBackward) -> ForwardBackward:
        return ForwardBackward(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: Array) -> ForwardBackward:
        return ForwardBackward(self.forward * factor, self.backward * factor)


def matmul_rate(machine: Machine, k: Constants) -> MatmulRate:
    """The rate of matmuls in the machine's format."""
    format_share = np.choose(
        np.asarray(machine.matmul_format, dtype=np.int64),
        np.broadcast_arrays(1.0, k.gemm_low, k.gemm_block, k.gemm_fp4, k.gemm_low * k.gemm_rowwise),
    )
    return _sustained_rate(machine, k, machine.peak, format_share)


def _sustained_rate(machine: Machine, k: Constants, peak: Array, format_share: Array = 1.0) -> MatmulRate:
    share = np.minimum(k.gemm * format_share / k.slow, machine.sustained)
    return MatmulRate(peak * share, k.narrow, machine.multiprocessors)


def _misaligned_head_slowdown(shape: Shape) -> Array:
    """Slow-down if the head size is no multiple of 8, so that tensor cores read unaligned operands.

    Source: BigScience's tables of 104B to 200B models, 33% to 44%.
    """
    return np.where(np.mod(shape.query_width / shape.heads, 8) > 1e-6, MISALIGNED_HEAD, 1.0)


def layer_times(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, *, module_blocks: float = 1.0
) -> LayerTime:
    """Seconds of one micro-batch, summed over all layers of the model (not divided into stages).

    `module_blocks`: 0 leaves the blocks of prediction modules out of `LayerTime.head`.
    """
    step = step_shape(shape, layout)
    tokens = step.tokens
    rate = matmul_rate(machine, k)
    rate = replace(rate, flops=rate.flops / _misaligned_head_slowdown(shape))
    memory_rate = machine.hbm * k.hbm / k.slow
    tensor_ranks = layout.tensor
    of_experts = expert_matmuls(machine) if np.any(machine.expert_peak) else machine
    expert_rate = rate
    if of_experts is not machine:
        expert_rate = matmul_rate(of_experts, k)
        expert_rate = replace(expert_rate, flops=expert_rate.flops / _misaligned_head_slowdown(shape))
    matmuls = ForwardBackward(0.0, 0.0)
    wide_rate = _sustained_rate(machine, k, machine.half_peak)
    for matmul in layer_matmuls(shape, step, tensor_ranks):
        if matmul.role != "router":  # constants were fitted without the router's matmul
            if matmul.role == "adapter":
                seconds = _adapter_passes(matmul, memory_rate)
            else:
                of_matmul = expert_rate if matmul.role == "expert" else rate
                seconds = of_matmul.forward_backward(matmul.m, matmul.k, matmul.n, matmul.count, frozen=shape.frozen)
            if matmul.role == "expert" and not np.any(shape.frozen):
                seconds += _wide_weight_gradient(matmul, of_experts, k, expert_rate, wide_rate)
            matmuls += seconds.times(matmul.layers)
    core_forward, core_backward = _attention_core(shape, machine, layout, k, tokens, memory_rate)
    unfused = np.where(np.asarray(layout.eager) > 0, EAGER_PASSES, 1.0)
    pass_bytes = k.passes * unfused + NORM_BYTES * shape.added_norms
    pass_seconds = tokens * shape.hidden * shape.layers * pass_bytes / memory_rate / tensor_ranks
    per_element = k.moe_passes + np.where(layout.expert > 1, k.moe_spread, 0.0)
    routed_seconds = (
        shape.moe_layers
        * tokens
        * shape.top_k
        * _routed_bytes(shape, layout, k, per_element)
        / memory_rate
        / tensor_ranks
    )
    quantise_seconds = np.where(
        machine.matmul_format > 0,
        tokens * shape.hidden * shape.layers * 8 * k.quantise / memory_rate / tensor_ranks,
        0.0,
    )
    expert_rounding = _expert_rounding(shape, of_experts, k, step) / memory_rate
    tail_seconds = KERNELS_WITH_TAIL * shape.layers * k.tail_us * 1e-6
    quantise_forward = quantise_seconds + expert_rounding
    quantise_backward = 1.5 * quantise_seconds + expert_rounding
    forward = matmuls.forward + core_forward + pass_seconds + routed_seconds + quantise_forward + tail_seconds
    backward = (
        matmuls.backward
        + core_backward
        + 1.5 * pass_seconds
        + k.moe_back * routed_seconds
        + quantise_backward
        + 1.5 * tail_seconds
    )
    selective = np.where(k.compiled > 0, pass_seconds + tail_seconds / 2, core_forward)
    recomputed = _recomputed(shape, layout, k, tokens, forward, selective, core_forward, rate)
    launches = np.where(layout.recompute >= ALL_BUT_ATTENTION, 4 / 3, 1.0)
    across_nodes = (layout.pipeline > 1) & (layout.ranks > machine.per_node)
    ring_us = np.maximum(layout.sequence, across_nodes) * (tensor_ranks - 1) * k.ring_us
    tensor_us = np.where(tensor_ranks > 1, k.host_tensor_us, 0.0) + ring_us
    layer_us = np.where(np.asarray(layout.layer_graphs) > 0, GRAPHS_US, k.host_us + tensor_us)
    host = shape.layers * layer_us * launches * 1e-6
    logits = wide_rate.forward_backward(tokens, shape.hidden, shape.outputs / tensor_ranks, frozen=shape.frozen)
    loss_seconds = tokens * shape.outputs / tensor_ranks * k.logit_bytes / memory_rate
    # The weight gradient of each chunk of logits is added to an fp32 sum, which is rounded at the end (kernels.loss).
    gradient_bytes = HEAD_ROUNDING_BYTES + HEAD_SUM_BYTES * np.ceil(tokens / layout.loss_chunk)
    sum_seconds = (
        shape.outputs * shape.hidden / tensor_ranks * gradient_bytes * k.own_engine / memory_rate * (1 - shape.frozen)
    )
    embed = tokens * shape.hidden * 12 / memory_rate
    padded_vocab = np.where(np.mod(shape.outputs / tensor_ranks, 8) > 1e-6, k.ragged_vocab, 1.0)
    forwards = layout.objective + layout.further_forwards
    before_gradients = forwards * (logits.forward + OBJECTIVE_LOGITS * loss_seconds)
    head = (logits.forward + logits.backward + loss_seconds + before_gradients) * padded_vocab + sum_seconds
    projection = wide_rate.forward_backward(tokens / tensor_ranks, 2 * shape.hidden, shape.hidden)
    outside_block = projection.forward + projection.backward + head + embed
    module = (forward + backward + recomputed) / shape.layers * module_blocks + outside_block
    forward = forward * (1 + layout.further_forwards)
    host = host * (1 + layout.further_forwards / 2)
    return LayerTime(forward, backward + recomputed, host, head + shape.predictions * module, embed, recomputed)


def _adapter_passes(matmul: Matmul, memory_rate: Array) -> ForwardBackward:
    """Seconds of an adapter's A or B: so narrow a matmul takes as long as its wide side passes through device memory."""
    seconds = 2.0 * matmul.m * (matmul.k + matmul.n) / memory_rate
    return ForwardBackward(ADAPTER_PASSES[0] * seconds, ADAPTER_PASSES[1] * seconds)


def _wide_weight_gradient(
    matmul: Matmul, machine: Machine, k: Constants, rate: MatmulRate, wide_rate: MatmulRate
) -> ForwardBackward:
    """Seconds that weight gradients of experts add in bf16 where other matmuls are in fp8, in this program's engine."""
    size = matmul.k, matmul.m, matmul.n, matmul.count
    in_fp8 = (np.asarray(machine.matmul_format) > 0) & (np.asarray(k.own_engine) > 0)
    in_fp8 &= np.asarray(machine.wide_gradients) > 0
    return ForwardBackward(0.0, np.where(in_fp8, wide_rate.seconds(*size) - rate.seconds(*size), 0.0))


def _expert_rounding(shape: Shape, machine: Machine, k: Constants, step: StepShape) -> Array:
    """Bytes to round experts' rows and matrices to fp8 in this program's engine, of one forward or one backward."""
    gated = 1 + shape.gated
    rows = step.experts * step.expert_rows * (shape.expert_in + (1 + gated) / 2 * shape.expert_ffn)
    matrices = step.experts * (1 + gated) * shape.expert_in * shape.expert_ffn
    in_fp8 = (np.asarray(machine.matmul_format) > 0) & (np.asarray(k.own_engine) > 0) & (np.asarray(shape.experts) > 0)
    return np.where(in_fp8, shape.moe_layers * EXPERT_ROUNDING_BYTES * (rows + matrices), 0.0)


def _routed_bytes(shape: Shape, layout: Layouts, k: Constants, per_element: Array) -> Array:
    """Bytes of element-wise passes over one routed token copy, outside its expert's matmuls.

    They sort and sum its hidden vector (`per_element` bytes for each element), and apply the activation over the expert's
    width. For this program's engine the fitted `per_element` includes the activation.
    """
    width = np.where(k.own_engine > 0, 0.0, ACTIVATION_BYTES_RATIO * shape.expert_ffn)
    biases = (
        shape.expert_bias * layout.host_sizes * BIAS_BYTES * (shape.expert_in + (1 + shape.gated) * shape.expert_ffn)
    )
    return (shape.hidden + width) * per_element + biases


def _recomputed(
    shape: Shape,
    layout: Layouts,
    k: Constants,
    tokens: Array,
    forward: Array,
    selective: Array,
    core_seconds: Array,
    rate: MatmulRate,
) -> Array:
    """Device seconds that recompute adds to backward, over all layers."""
    last_matmul = shape.dense_layers * rate.seconds(tokens, shape.ffn / layout.tensor, shape.hidden)
    full = forward - np.where(k.compiled > 0, last_matmul, 0.0)
    mode = np.asarray(layout.recompute, dtype=np.int64)
    return np.choose(mode, np.broadcast_arrays(0.0, selective, full - core_seconds, full))


def _attention_core(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, tokens: Array, memory_rate: Array
) -> tuple[Array, Array]:
    """Seconds of attention's two matmuls, forward and backward, over all layers.

    Fused attention computes the causal half of the scores. Unfused attention computes all of them, through device memory. Layers with a
    window have FlashAttention or flex attention, the latter where sums have a fixed order, which its sums have in any case, and where
    scores have a cap.
    """
    score_bytes = np.where(np.asarray(layout.unfused) > 0, np.maximum(k.scores, UNFUSED_SCORE_BYTES), k.scores)
    fused = np.where(score_bytes > 0, 1.0, 0.5)
    layers = shape.attention_layers * np.where(score_bytes > 0, 1.0, shape.full_attention)
    pairs = layers * tokens * layout.seq / layout.tensor
    flops = 2 * pairs * (shape.query_width + shape.value_width) * fused
    head_dim = shape.query_width / shape.heads
    wide = head_dim > WIDE_HEAD
    small_heads = 1 + SMALL_HEAD / head_dim
    share = np.where(np.asarray(layout.attention) > 0, layout.attention, k.attention)
    rate = machine.half_peak * share * np.where(wide, k.attention_wide, 1.0)
    forward = flops / rate * k.slow * small_heads * _misaligned_head_slowdown(shape)
    score_seconds = pairs * shape.heads * score_bytes / memory_rate
    backward = np.where(score_bytes > 0, 2.0, BACKWARD_RATIO) * forward + 2 * score_seconds
    forward = forward + score_seconds
    backward = backward * (1 + layout.fixed_order * k.fixed_order * np.interp(head_dim, *PRICE_OF_ORDER))
    if not np.any(shape.windowed_scores):
        return forward, backward

    def windowed_seconds(layers: Array, scores: Array, relative_rate: Array) -> Array:
        """Seconds of the forward of this share of the layers, whose windows have these scores."""
        scores = scores + 2 * QUERY_BLOCK_KEYS * layers / layout.seq
        pairs = shape.attention_layers * scores * tokens * layout.seq / layout.tensor
        flops = pairs * (shape.query_width + shape.value_width)
        rate = machine.half_peak * k.attention * relative_rate
        return flops / rate * k.slow * small_heads * _misaligned_head_slowdown(shape)

    by_flash = layout.flash_windows * k.flash_windows
    flash_layers = by_flash * shape.flash_layers
    flash_scores = by_flash * shape.flash_scores
    flex = windowed_seconds(
        1 - shape.full_attention - flash_layers,
        shape.windowed_scores - flash_scores,
        k.flex * np.where(wide, k.flex_wide, 1.0) * np.where(np.asarray(shape.capped) > 0, k.flex_capped, 1.0),
    )
    flash = windowed_seconds(flash_layers, flash_scores, k.flash * np.where(wide, k.flash_wide, 1.0))
    return forward + flex + flash, backward + k.flex_backward * flex + k.flash_backward * flash
