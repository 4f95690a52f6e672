"""Seconds of one layer's arithmetic on one device, for one micro-batch.

A matrix product (m, k, n) takes 2 m k n / (peak × share) × (1 + narrow × (1/m + 1/k + 1/n)): the roofline with the weight of its
bytes folded into one width, since bytes ÷ FLOPs of a product is just the sum of its dimensions' inverses. On devices whose number of
multiprocessors is known, m n is rounded up to whole waves of tiles. Attention takes its FLOPs at a share of its own; everything else
takes its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.workload.arrays import Array
from meshwright.workload.layer_products import layer_products
from meshwright.workload.layouts import ALL_BUT_ATTENTION, Layouts
from meshwright.workload.model_shape import Shape
from meshwright.workload.step_shape import step_shape

KERNELS = 16.0
"""Kernels of one layer's forward that leave a tail (matrix products, norms, activation, attention)."""

RAGGED = 1.35

ACTIVATION = 2 / 3
"""Bytes of an activation per element of its width, over the bytes of a row's way into its expert's product and back.

6 (two halves in, one out) over 9 (read and written twice, and the sum).
"""
BIASES = 20.0
"""Bytes per element of a routed expert's bias, added expert by expert in other stacks.

A sum in fp32, joined, cast (Megatron-Core, `TEGroupedMLP._apply_bias`).
"""

TILE = 128.0
"""Tile of a matrix product that one multiprocessor computes at a time; libraries use 64 to 256 (CUTLASS)."""
MOST_OF_PEAK = 0.88
"""Share of a datasheet's peak that no large product exceeds: the best sustained on an H200 is 0.77, on an A100 0.86."""


@dataclass(frozen=True)
class LayerTime:
    """Device seconds of all layers' forward and backward for one micro-batch on one rank's share of width, and the head's."""

    forward: Array
    backward: Array
    host: Array
    head: Array
    embed: Array


def in_waves(m: Array, n: Array, multiprocessors: Array, count: Array = 1.0) -> Array:
    """Elements of `count` results m × n, rounded up to whole waves of tiles over the multiprocessors; exact if there are 0."""
    results = count * m * n
    if not np.any(multiprocessors):
        return results
    tiles = count * np.ceil(m / TILE - 1e-6) * np.ceil(n / TILE - 1e-6)
    waves = np.ceil(tiles / np.maximum(multiprocessors, 1.0) - 1e-6)
    return np.where(multiprocessors > 0, waves * multiprocessors * TILE * TILE, results)


@dataclass(frozen=True)
class ProductRate:
    """How fast a device makes matrix products of one format."""

    flops: Array
    """FLOP/s of a large product."""
    narrow: Array
    multiprocessors: Array

    def seconds(self, m: Array, inner: Array, n: Array, count: Array = 1.0) -> Array:
        """Seconds of `count` equal products (m, inner) × (inner, n) launched together; zero when a dimension is zero."""
        small = 1 / np.maximum(m, 1.0) + 1 / np.maximum(inner, 1.0) + 1 / np.maximum(n, 1.0)
        results = in_waves(m, n, self.multiprocessors, count)
        return 2 * results * inner / self.flops * (1 + self.narrow * small)

    def both(self, m: Array, inner: Array, n: Array, count: Array = 1.0) -> Pair:
        """Seconds forward, and backward: the gradients of both operands."""
        backward = self.seconds(m, n, inner, count) + self.seconds(inner, m, n, count)
        return Pair(self.seconds(m, inner, n, count), backward)


@dataclass(frozen=True)
class Pair:
    """Seconds of forward and backward."""

    forward: Array
    backward: Array

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: Array) -> Pair:
        return Pair(self.forward * factor, self.backward * factor)


def product_rate(machine: Machine, k: Constants) -> ProductRate:
    """Of the plan's format."""
    low = np.choose(
        np.asarray(machine.low, dtype=np.int64),
        np.broadcast_arrays(1.0, k.gemm_low, k.gemm_block, k.gemm_fp4, k.gemm_low * k.gemm_rowwise),
    )
    return _sustained(machine, k, machine.peak, low)


def _sustained(machine: Machine, k: Constants, peak: Array, format_share: Array = 1.0) -> ProductRate:
    share = np.minimum(k.gemm * format_share / k.slow, MOST_OF_PEAK)
    return ProductRate(peak * share, k.narrow, machine.multiprocessors)


def _ragged(shape: Shape) -> Array:
    """Slow-down by a head size that is no multiple of 8: tensor cores run unaligned.

    BigScience's 104B–200B tables: +33…44%.
    """
    return np.where(np.mod(shape.query_width / shape.heads, 8) > 1e-6, RAGGED, 1.0)


def layer_times(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> LayerTime:
    """Times summed over all layers of the model (not yet divided into stages)."""
    step = step_shape(shape, layout)
    tokens, speed = step.tokens, product_rate(machine, k)
    speed = replace(speed, flops=speed.flops / _ragged(shape))
    memory = machine.hbm * k.hbm / k.slow
    width = layout.tensor
    products = Pair(0.0, 0.0)
    for product in layer_products(shape, step, width):
        if product.role != "router":  # constants were fitted without the router's product
            products += speed.both(product.m, product.k, product.n, product.count).times(product.layers)
    core_forward, core_backward = _attention_core(shape, machine, layout, k, tokens, memory)
    passes = tokens * shape.hidden * shape.layers * k.passes / memory / width
    moved = k.moe_passes + np.where(layout.expert > 1, k.moe_spread, 0.0)
    routed = shape.moe_layers * tokens * shape.top_k * _routed_bytes(shape, layout, k, moved) / memory / width
    lowered = np.where(machine.low > 0, tokens * shape.hidden * shape.layers * 8 * k.quantise / memory / width, 0.0)
    tails = KERNELS * shape.layers * k.tail_us * 1e-6
    forward = products.forward + core_forward + passes + routed + lowered + tails
    backward = products.backward + core_backward + 1.5 * passes + k.moe_back * routed + 1.5 * lowered + 1.5 * tails
    again = _recomputed(
        shape,
        layout,
        k,
        tokens,
        forward,
        np.where(k.compiled > 0, passes + tails / 2, core_forward),
        core_forward,
        speed,
    )
    launches = np.where(layout.recompute >= ALL_BUT_ATTENTION, 4 / 3, 1.0)
    across = (layout.pipeline > 1) & (layout.ranks > machine.per_node)
    rings = np.maximum(layout.sequence, across) * (width - 1) * k.ring_us
    tensor_host = np.where(width > 1, k.host_tensor_us, 0.0) + rings
    host = shape.layers * (k.host_us + tensor_host) * launches * 1e-6
    logits = _sustained(machine, k, machine.half_peak).both(tokens, shape.hidden, shape.vocab / width)
    loss = tokens * shape.vocab / width * k.logit_bytes / memory
    # The weight gradient of each chunk of logits is added to an fp32 sum (kernels.loss).
    sums = np.ceil(tokens / layout.loss_chunk) * shape.table_params / width * 8 * k.copies / memory
    embed = tokens * shape.hidden * 12 / memory
    ragged = np.where(np.mod(shape.vocab / width, 8) > 1e-6, k.ragged_vocab, 1.0)
    return LayerTime(forward, backward + again, host, (logits.forward + logits.backward + loss) * ragged + sums, embed)


def _routed_bytes(shape: Shape, layout: Layouts, k: Constants, moved: Array) -> Array:
    """Bytes of the passes over a routed row beside its expert's products.

    Over the stream when it is sorted and summed, over the expert's width in the activation. Own engine: of the stream only,
    from runs that measured both.
    """
    width = np.where(k.copies > 0, 0.0, ACTIVATION * shape.expert_ffn)
    biases = shape.expert_bias * layout.host_sizes * BIASES * (shape.expert_in + (1 + shape.gated) * shape.expert_ffn)
    return (shape.hidden + width) * moved + biases


def _recomputed(
    shape: Shape,
    layout: Layouts,
    k: Constants,
    tokens: Array,
    forward: Array,
    selective: Array,
    attention: Array,
    speed: ProductRate,
) -> Array:
    """Device seconds that recompute adds to backward, over all layers."""
    last = shape.dense_layers * speed.seconds(tokens, shape.ffn / layout.tensor, shape.hidden)
    full = forward - np.where(k.compiled > 0, last, 0.0)
    mode = np.asarray(layout.recompute, dtype=np.int64)
    return np.choose(mode, np.broadcast_arrays(0.0, selective, full - attention, full))


def _attention_core(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, tokens: Array, memory: Array
) -> tuple[Array, Array]:
    """Scores and their use: causal FLOPs when fused; all of them, with the scores in memory, when not."""
    fused = np.where(k.scores > 0, 1.0, 0.5)
    layers = shape.attention_layers * np.where(k.scores > 0, 1.0, shape.full_attention)
    pairs = layers * tokens * layout.seq / layout.tensor
    flops = 2 * pairs * (shape.query_width + shape.value_width) * fused
    head = shape.query_width / shape.heads
    short = 1 + 32.0 / head
    forward = flops / (machine.half_peak * k.attention) * k.slow * short * _ragged(shape)
    moved = pairs * shape.heads * k.scores / memory
    return forward + moved, np.where(k.scores > 0, 2.0, 2.5) * forward + 2 * moved
