"""Compute seconds of the layers on one device, for one micro-batch.

- A matmul (m, k) × (k, n) takes 2 m k n / (peak × share) × (1 + narrow × (1/m + 1/k + 1/n)) seconds. The last factor is the memory term of
  the roofline model: the bytes per FLOP of a matmul are proportional to 1/m + 1/k + 1/n. If the number of multiprocessors is known, m n
  is rounded up to whole waves of tiles.
- Attention takes its FLOPs at another share of the peak. Attention with a window has a kernel, and a share, of its own.
- All other operations take their bytes at a share of the memory bandwidth.
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
"""Time that sums in a fixed order add to attention's backward (`kernels.fixed_order_attention`), relative to that backward.

The first tuple has head sizes, the second the added share for each: 16% with heads of 64, and 1% with heads of 128.

One H200, torch 2.11, cuDNN 9.19, 16,384 tokens a step: 254 ms against 250 (Llama-3.2-1B, head size 64), 437 against 436 to 437 (8 layers
of Llama-3-8B, 128); attention's backward takes 25 and 42 ms of them in this model.
"""
SMALL_HEAD = 32.0
"""Head size at which attention needs twice the time per FLOP that it needs with very wide heads."""
WIDE_HEAD = 192.0
"""Attention kernels for heads wider than this have smaller tiles, and so another rate (`Constants.attention_wide`)."""
UNFUSED_SCORE_BYTES = 8.0
"""Bytes moved per attention score in a forward, for published runs that state unfused attention; from Megatron-LM's tables."""
BACKWARD_RATIO = 2.5
"""Time of fused attention's backward relative to its forward: five matmuls instead of two (Dao et al. 2022)."""
QUERY_BLOCK_KEYS = 350.0
"""Fixed cost of a block of queries in attention with a window, as a number of keys: such a block costs as much as 350 keys more.

Measured on an H200 (benchmarks/results/2026-11-29-attention-windows-H200.json).
"""
NORM_BYTES = 6.0
"""Bytes per element that a norm moves in the forward if `Constants.passes` does not include it; the backward moves 1.5 times as many.

A norm reads and writes 8 elements in all if it is fused with a residual sum (`workload.device_work`).
"""
MISALIGNED_HEAD = 1.35
"""Slow-down of matmuls and attention if the head size is no multiple of 8."""

ACTIVATION_BYTES_RATIO = 2 / 3
"""Bytes per element of an expert's activation function, relative to the bytes of permuting and combining rows.

The activation reads two halves and writes one result (6 bytes). Permuting and combining read and write twice, and add up (9 bytes).
"""
EXPERT_ROUNDING_BYTES = 3.0
"""Bytes per element that is rounded to fp8 with one scale per row: bf16 read, fp8 written (`kernels.grouped_fp8`)."""
HEAD_ROUNDING_BYTES = 6.0
"""Bytes per weight of the head to round its gradient from fp32 to bf16 (`kernels.loss`)."""
HEAD_SUM_BYTES = 0.1 * 8.0
"""Bytes per weight of the head that count for each chunk of logits, because the chunk's gradient is added to an fp32 sum.

The sum is read and written (8 bytes), but the matmul hides all but a tenth: 24 more chunks took 1.1 ms, not 12
(2026-11-23-levers-one-gpu-H200.jsonl).
"""
OBJECTIVE_LOGITS = 1 / 3
"""Bytes moved to compute log-probabilities, relative to a loss with its gradient.

Log-probabilities read the logits once. The loss with its gradient reads them twice and writes them once.
"""
EAGER_PASSES = 5 / 3
"""Element-wise bytes of a layer whose operations are not fused, relative to `Constants.passes`.

100 over 60 bytes, the guesses of benchmarks/fit_costs.py.
"""
GRAPHS_US = 50.0
"""Host microseconds of a layer that launches one CUDA graph in the forward and one in the backward.

A guess: two launches of 10 to 20 µs, and the Python code between them.
"""
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
"""Rows and columns of the tile of a matmul's result that one multiprocessor computes at a time; libraries use 64 to 256 (CUTLASS)."""


@dataclass(frozen=True)
class LayerTime:
    """Compute seconds of one micro-batch on one tensor rank."""

    forward: Array
    """Device seconds of the forward, all layers."""
    backward: Array
    """Device seconds of the backward with recomputation, all layers."""
    host: Array
    """Host seconds to launch forward and backward of all layers."""
    head: Array
    """Device seconds of head and loss, forward and backward, and of the prediction modules, whose blocks count as a mean layer."""
    embed: Array
    """Device seconds of the embedding, forward and backward."""
    recomputed: Array
    """The part of `backward` that computes activations again."""


def elements_in_waves(m: Array, n: Array, multiprocessors: Array, count: Array = 1.0) -> Array:
    """Return the elements of `count` results of size m × n, rounded up to whole waves of tiles.

    A wave is one tile on each multiprocessor. With 132 multiprocessors, 133 tiles need two waves and so count as 264 tiles. Where
    `multiprocessors` is 0, nothing is rounded.
    """
    elements = count * m * n
    if not np.any(multiprocessors):
        return elements
    tiles = count * np.ceil(m / TILE - 1e-6) * np.ceil(n / TILE - 1e-6)
    waves = np.ceil(tiles / np.maximum(multiprocessors, 1.0) - 1e-6)
    return np.where(multiprocessors > 0, waves * multiprocessors * TILE * TILE, elements)


@dataclass(frozen=True)
class MatmulRate:
    """How fast a device computes matmuls in one number format."""

    flops: Array
    """FLOP/s of a large matmul."""
    narrow: Array
    """Size of a matmul's smallest dimension at which the time per FLOP is doubled."""
    multiprocessors: Array
    """Number of multiprocessors; 0 if it is not known."""

    def seconds(self, m: Array, inner: Array, n: Array, count: Array = 1.0) -> Array:
        """Return the seconds of `count` equal matmuls (m, inner) × (inner, n) that are launched together; 0 if a dimension is 0."""
        inverse_sum = 1 / np.maximum(m, 1.0) + 1 / np.maximum(inner, 1.0) + 1 / np.maximum(n, 1.0)
        result_elements = elements_in_waves(m, n, self.multiprocessors, count)
        return 2 * result_elements * inner / self.flops * (1 + self.narrow * inverse_sum)

    def forward_backward(
        self, m: Array, inner: Array, n: Array, count: Array = 1.0, *, frozen: Array = 0.0
    ) -> ForwardBackward:
        """Return the seconds of `count` linear layers (m, inner) × (inner, n), forward and backward.

        The backward computes the gradients of input and weight, with two matmuls. `frozen` is 1 for weights that need no gradient.
        """
        backward = self.seconds(m, n, inner, count) + (1 - frozen) * self.seconds(inner, m, n, count)
        return ForwardBackward(self.seconds(m, inner, n, count), backward)


@dataclass(frozen=True)
class ForwardBackward:
    """Seconds of a forward and of its backward."""

    forward: Array
    backward: Array

    def __add__(self, other: ForwardBackward) -> ForwardBackward:
        return ForwardBackward(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: Array) -> ForwardBackward:
        return ForwardBackward(self.forward * factor, self.backward * factor)


def matmul_rate(machine: Machine, k: Constants) -> MatmulRate:
    """Return the rate of matmuls in the machine's number format."""
    format_share = np.choose(
        np.asarray(machine.matmul_format, dtype=np.int64),
        np.broadcast_arrays(1.0, k.gemm_low, k.gemm_block, k.gemm_fp4, k.gemm_low * k.gemm_rowwise),
    )
    return _sustained_rate(machine, k, machine.peak, format_share)


def _sustained_rate(machine: Machine, k: Constants, peak: Array, format_share: Array = 1.0) -> MatmulRate:
    share = np.minimum(k.gemm * format_share / k.slow, machine.sustained)
    return MatmulRate(peak * share, k.narrow, machine.multiprocessors)


def _misaligned_head_slowdown(shape: Shape) -> Array:
    """Return the factor by which matmuls and attention are slower if the head size is no multiple of 8, else 1.

    Tensor cores then read operands that are not aligned.

    Source: BigScience's tables of 104B to 200B models, 33% to 44%.
    """
    return np.where(np.mod(shape.query_width / shape.heads, 8) > 1e-6, MISALIGNED_HEAD, 1.0)


def layer_times(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, *, module_blocks: float = 1.0
) -> LayerTime:
    """Return the compute seconds of one micro-batch over all layers of the model, not divided into stages.

    `module_blocks`: 0 leaves the blocks of prediction modules out of `LayerTime.head`; 1 includes them.
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
        if matmul.role != "router":  # the constants were fitted without this matmul
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
    """Return the seconds of one matrix (A or B) of a low-rank adapter.

    The matmul is so narrow that device memory limits it: it takes as long as reading and writing its wide input or output
    (`ADAPTER_PASSES` times, forward and backward).
    """
    seconds = 2.0 * matmul.m * (matmul.k + matmul.n) / memory_rate
    return ForwardBackward(ADAPTER_PASSES[0] * seconds, ADAPTER_PASSES[1] * seconds)


def _wide_weight_gradient(
    matmul: Matmul, machine: Machine, k: Constants, rate: MatmulRate, wide_rate: MatmulRate
) -> ForwardBackward:
    """Return the seconds that experts' weight gradients add because they are in bf16 while the other matmuls are in fp8.

    Only this program's engine does so; for other stacks it is 0.
    """
    size = matmul.k, matmul.m, matmul.n, matmul.count
    in_fp8 = (np.asarray(machine.matmul_format) > 0) & (np.asarray(k.own_engine) > 0)
    in_fp8 &= np.asarray(machine.wide_gradients) > 0
    return ForwardBackward(0.0, np.where(in_fp8, wide_rate.seconds(*size) - rate.seconds(*size), 0.0))


def _expert_rounding(shape: Shape, machine: Machine, k: Constants, step: StepShape) -> Array:
    """Return the bytes moved to round the rows and weights of experts to fp8, in one forward or one backward; 0 for other stacks."""
    gated = 1 + shape.gated
    rows = step.experts * step.expert_rows * (shape.expert_in + (1 + gated) / 2 * shape.expert_ffn)
    matrices = step.experts * (1 + gated) * shape.expert_in * shape.expert_ffn
    in_fp8 = (np.asarray(machine.matmul_format) > 0) & (np.asarray(k.own_engine) > 0) & (np.asarray(shape.experts) > 0)
    return np.where(in_fp8, shape.moe_layers * EXPERT_ROUNDING_BYTES * (rows + matrices), 0.0)


def _routed_bytes(shape: Shape, layout: Layouts, k: Constants, per_element: Array) -> Array:
    """Return the bytes that element-wise operations move for one row (a token sent to one expert), outside matmuls.

    The operations permute and combine the row's hidden vector (`per_element` bytes for each element), and apply the activation
    function to the expert's width. For this program's engine the fitted `per_element` includes the activation.
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
    """Return the device seconds that recomputation adds to the backward, over all layers; it depends on the mode of each layout.

    `forward` are the seconds of a whole forward, `selective` those that mode `selective` repeats, `core_seconds` those of attention.
    """
    last_matmul = shape.dense_layers * rate.seconds(tokens, shape.ffn / layout.tensor, shape.hidden)
    full = forward - np.where(k.compiled > 0, last_matmul, 0.0)
    mode = np.asarray(layout.recompute, dtype=np.int64)
    return np.choose(mode, np.broadcast_arrays(0.0, selective, full - core_seconds, full))


def _attention_core(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, tokens: Array, memory_rate: Array
) -> tuple[Array, Array]:
    """Return the seconds of attention's two matmuls (scores, weighted sums), forward and backward, over all layers.

    Fused attention computes only the causal half of the scores. Unfused attention computes all scores, and moves them through device
    memory. Layers with a window use FlashAttention or flex attention. Flex attention is used where sums must have a fixed order,
    because its sums always have one, and where scores have a cap.
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
        """Return the forward seconds of windowed attention in a part of the layers.

        `layers` is their share of all layers with attention. `scores` is their number of scores, relative to full causal attention in all
        of these layers.
        """
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
