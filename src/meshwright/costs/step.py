"""Seconds of one training step in closed form, for arrays of layouts at once.

    step = pipeline(m micro-batches of the slowest stage, plus the fill) + exposed data-parallel traffic + optimizer + constants

Each part is a formula of docs/design/cost-model.md. Groups of ranks lie where the layout's strides put them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.collective_costs import (
    Group,
    all_reduce,
    all_to_all,
    by_copies,
    crowding,
    gather,
    group,
    link_rate,
    port_rate,
)
from meshwright.costs.compute import LayerTime, layer_times
from meshwright.costs.constants import Constants
from meshwright.costs.copies import copies
from meshwright.costs.device_rates import Machine
from meshwright.costs.offload_costs import exposed_copies, host_optimizer
from meshwright.costs.stage_layers import stage_layers
from meshwright.workload.arrays import Array
from meshwright.workload.dtypes import COMPUTE_BYTES
from meshwright.workload.layer_messages import context_messages, expert_message, tensor_messages, weight_collectives
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape
from meshwright.workload.step_shape import step_shape
from meshwright.workload.unit_parameters import shard_parameters, stage_parameters

LAST_ROUND = 0.8
"""Share of an interleaved pipeline's last round that hides gradient reductions.

The schedule allows 1, a wire that is busy with activations less; set by hand (docs/design/cost-model.md, "Blind
spots").
"""
EDGES = 1.5
"""Units of a stage whose collectives do not hold up the next one: two of gathers, one of reductions."""
WEIGHT_HALF = 0.7
"""Time of the weight half of a split backward, relative to a forward: its products, without attention.

Gradient reductions overlap with that only.
"""
RINGS = 10.0
"""Collectives of a layer, forward and backward, with sequence-split tensor parallelism: six gathers, four scatters."""
RING_SHOWN = 0.5
"""Of a ring's messages, what attention does not hide: a guess, the same for all stacks."""
COUNTS_US = 50.0
"""Host synchronisation of a layer for the row counts of its experts, beside their all-to-all.

A copy to the host, its wake-up, and the first launches after it. A guess (launches of an H200's host take 5 to 10 µs
each).
"""
CRAMPED = 0.92
"""Share of memory at which an allocator starts to give back and ask again."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step and where they go; `exposed` by axis is time that no compute hides."""

    seconds: Array
    compute: Array
    bubble: Array
    host: Array
    optimizer: Array
    constant: Array
    exposed: dict[str, Array]


@dataclass(frozen=True)
class Waits:
    """Seconds of one micro-batch, over all layers, in which compute waits inside them.

    For tensor, context and expert ranks, and for the host's launches.
    """

    tensor: Array
    context: Array
    expert: Array
    host: Array


def waits(shape: Shape, machine: Machine, layout: Layouts, k: Constants, times: LayerTime) -> Waits:
    """What layers that take `times` wait for."""
    machine = replace(machine, nic=machine.nic * layout.port)
    tensor = _tensor_traffic(shape, machine, layout, k)
    context = sum(context_traffic(shape, machine, layout, k))
    expert = _expert_traffic(shape, machine, layout, k, times.forward + times.backward) + _expert_launches(
        shape, layout, k
    )
    work = times.forward + times.backward + tensor + context + expert
    return Waits(tensor, context, expert, _soft_maximum(work, times.host) - work)


def step_cost(shape: Shape, machine: Machine, layout: Layouts, k: Constants, filled: Array = 0.0) -> StepCost:
    """What one step costs under each layout; `filled` is the share of a device's memory that it is predicted to need."""
    times = layer_times(shape, machine, layout, k)
    inside = waits(shape, machine, layout, k, times)
    machine = replace(machine, nic=machine.nic * layout.port)
    device = times.forward + times.backward
    work = device + inside.tensor + inside.context + inside.expert
    gathers, reductions = _weights_traffic(shape, machine, layout, k, times.backward)
    layers_time = work + inside.host
    backward = layers_time * times.backward / np.maximum(device, 1e-12)
    hidden_room = np.where(layout.gather_once > 0, backward, layers_time) * k.hide
    moved, moved_once = copies(shape, machine, layout, k)
    sharded = gathers.each + reductions.each
    taken = (gathers.each * gathers.tax + reductions.each * reductions.tax) / np.maximum(sharded, 1e-12)
    both = _shown(sharded, hidden_room, taken)
    apart = _shown(gathers.each, hidden_room, gathers.tax) + _shown(
        reductions.each, k.hide * WEIGHT_HALF * times.forward, reductions.tax
    )
    splits = (layout.pipeline > 1) & (layout.fill < 1)
    shard_exposed = np.where(splits, np.maximum(both, apart), both) + moved
    offloaded = exposed_copies(shape, machine, layout, times.forward, times.backward)
    chain = layers_time + shard_exposed + offloaded
    micro = k.host_micro_us * 1e-6
    stage, whole = _stages(shape, layout, chain, times)
    edge = _boundary(shape, machine, layout, k)
    m = layout.micro_batches
    # The first gathers of a stage are issued before its input is there, and it sends its result before its last reduction.
    units = shape.layers / layout.pipeline / layout.virtual
    whole = whole - np.where(layout.pipeline > 1, (shard_exposed - moved) * np.minimum(1.0, EDGES / units), 0.0)
    fill = np.where(layout.pipeline > 1, layout.fill * k.bubble * np.maximum(0.0, whole - stage) / layout.virtual, 0.0)
    # With fewer micro-batches than ranks virtual stages help little: the first micro-batch still passes all of them.
    fill = np.where(layout.virtual > 1, np.maximum(fill, whole - m * stage), fill)
    sent = edge * m * layout.virtual  # one way, which is a channel of its own
    pipe = np.maximum(2 * sent * k.pipe_exposed, sent - m * stage) + 2 * edge * (layout.pipeline - 1)
    pipe = np.where(layout.pipeline > 1, pipe, 0.0)
    stalls = _stalls(machine, layout, k, filled)
    waiting = m * (layout.slowest - 1) * stage
    body = m * (stage + micro) + waiting
    beside = k.hide * _beside(layout)
    first = _shown(gathers.once, (layers_time - backward) * beside, gathers.tax)
    last = _shown(reductions.once, backward * beside, reductions.tax)
    # Each rank's come before the next rank's, but for those.
    others = layout.pipeline - 1
    others = np.where(layout.layered > 0, 0.0, others)
    first = first * (1 + others * np.maximum(0.0, 1 - 2 / units))
    last = last * (1 + np.where(splits, 0.0, others * (1 - 1 / units)))
    first_and_last = (first + last + moved_once) / layout.pipeline
    # Nothing is beside the first gather of all, the embedding's, nor beside its reduction, the last.
    table = k.copies * shape.table_params / layout.tensor
    where = group(machine, k, layout.shards, layout.shard_step)
    table = gather(where, k, table * COMPUTE_BYTES) + gather(where, k, table * k.scatter_bytes)
    first_and_last = first_and_last + np.where((layout.pipeline > 1) & (layout.zero >= 3), table, 0.0)
    data = first_and_last + _gradient_traffic(
        shape, machine, layout, k, stage * times.backward / np.maximum(device, 1e-12)
    )
    update = _optimizer(shape, machine, layout, k)
    nodes = np.log2(np.maximum(1.0, layout.ranks / machine.per_node))
    constant = (k.step_ms + k.sync_ms * nodes) * 1e-3
    seconds = (body + fill + pipe) * (1 + k.jitter * nodes) + data + update + constant + stalls
    share = m * stage / np.maximum(chain + times.head + times.embed, 1e-12)
    exposed = {
        "tensor": inside.tensor * share,
        "context": inside.context * share,
        "expert": inside.expert * share,
        "shard": shard_exposed * share,
        "pipeline": pipe + stalls,
        "data": data,
        "host link": offloaded * share,
        "slowest rank": waiting,
    }
    compute = (device + times.head + times.embed) * share
    return StepCost(seconds, compute, fill, inside.host * share + m * micro, update, constant, exposed)


def _soft_maximum(a: Array, b: Array) -> Array:
    """A maximum that rounds the corner: near equality both sides wait for each other now and then."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = low / np.maximum(high, 1e-12)
    square = ratio * ratio
    return high * np.sqrt(np.sqrt(1 + square * square))


def _stages(shape: Shape, layout: Layouts, chain: Array, times: LayerTime) -> tuple[Array, Array]:
    """Seconds of the slowest stage and of all stages together, for one micro-batch."""
    whole = chain + times.head + times.embed
    per_layer = chain / shape.layers
    full, last = stage_layers(shape, layout)
    stage = np.maximum(full * per_layer, last * per_layer + times.head)
    return np.where(layout.pipeline > 1, stage, whole), whole


def _stalls(machine: Machine, layout: Layouts, k: Constants, filled: Array) -> Array:
    """Seconds that the step loses at stage boundaries, at most two a micro-batch, to an overrun network or a full memory.

    Near its limit an allocator gives everything back and asks again, once for each activation that does not fit.
    """
    boundaries = np.minimum(2.0, layout.pipeline - 1)
    full = 1 / (1 + (CRAMPED / np.maximum(filled, 1e-3)) ** 40)
    chance = 1 - (1 - crowding(machine, layout, k)) * (1 - full)
    return chance * k.stall_s * boundaries * layout.micro_batches


def _tensor_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Seconds of tensor-parallel exchanges: a gather and a reduce-scatter take as long as an all-reduce.

    The gather for weight gradients is not in the fit. Tokens of several sequences are reordered after kernels.
    """
    tokens = step_shape(shape, layout).tokens
    _, sums = tensor_messages(shape, layout, step_shape(shape, layout))
    where = group(machine, k, layout.tensor, layout.tensor_step, crowding(machine, layout, k))
    each = all_reduce(where, k, sums.bytes)
    ordered = tokens * shape.hidden * k.token_passes / (machine.hbm * k.hbm / k.slow) / 4
    ordered = np.where((layout.tensor > 1) & (np.asarray(layout.micro_batch) > 1), ordered, 0.0)
    by_kernels = each * k.tensor_exposed + ordered
    copied = np.asarray(layout.tokens_copied) > 0
    shown = np.where(layout.tensor > 2, k.copied_tokens_of_more, k.copied_tokens)
    return sums.count * np.where(copied, each * k.tensor_exposed * shown, by_kernels)


def context_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> tuple[Array, Array]:
    """What attention does not hide of context ranks' messages, over all layers, forward and backward.

    Half of a ring's messages run under attention. Published stacks repeat no message, sum gradients in bf16 and do not send them home.
    """
    own = _as_repeated(layout, k)
    heads, passes, sums = context_messages(shape, own, step_shape(shape, own))
    exchanging = group(machine, k, layout.ulysses, layout.ulysses_step)
    exchange = all_to_all(exchanging, k, machine, heads.bytes)
    turns = np.maximum(1.0, layout.ring - 1)
    once = RING_SHOWN * gather(group(machine, k, layout.ring, layout.ring_step), k, passes.bytes * layout.ring) / turns
    summed = np.where(k.copies > 0, sums.bytes / passes.bytes * sums.count, passes.forward)
    forward = heads.forward * exchange + passes.forward * once
    return forward, heads.backward * exchange + (passes.backward + summed) * once


def _as_repeated(layout: Layouts, k: Constants) -> Layouts:
    """The layout whose recompute mode says which messages are repeated: of this program's engine alone."""
    return replace(layout, recompute=np.where(k.copies > 0, layout.recompute, 0.0))


def _expert_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants, compute: Array) -> Array:
    """Seconds of dispatch and combine, forward and backward.

    In this program's engine each forward first exchanges the row counts, for which the host waits. If another micro-batch
    computes during the exchange, `compute` hides it.
    """
    if not np.any(shape.moe_layers):
        return np.zeros_like(compute)
    message = expert_message(shape, _as_repeated(layout, k), step_shape(shape, layout))
    where = group(machine, k, layout.expert, 1.0)
    sent_once = np.where(np.asarray(layout.one_copy) > 0, _distinct_domains(where.domains, shape.top_k, layout), 1.0)
    rows = message.count * all_to_all(where, k, machine, message.bytes, sent_once) * layout.imbalance
    forwards = message.count / 2 - shape.moe_layers
    counts = k.copies * forwards * (all_to_all(where, k, machine, 0.0) + COUNTS_US * 1e-6) * (layout.expert > 1)
    beside = np.asarray(layout.exchange_beside) > 0
    return np.where(beside, _shown(rows, compute, k.overlap_tax), rows * k.expert_exposed) + counts


def _expert_launches(shape: Shape, layout: Layouts, k: Constants) -> Array:
    """Device idle time while the host launches the products of local experts after it has received their sizes."""
    local = shape.experts / np.maximum(layout.expert, 1.0)
    return shape.moe_layers * local * k.moe_us * 1e-6 * layout.host_sizes


def _distinct_domains(domains: Array, top_k: Array, layout: Layouts) -> Array:
    """Share of a token's copies that leave the domain if each other domain gets one copy.

    Of `top_k` experts drawn at random, the expected number of domains that have any, at most what the router allows.
    """
    domains = np.maximum(domains, 1.0)
    outside = 1 - 1 / domains
    distinct = (domains - 1) * (1 - outside**top_k)
    limit = np.where(np.asarray(layout.domains_per_token) > 0, layout.domains_per_token * outside, np.inf)
    return np.where(domains > 1, np.minimum(distinct, limit) / np.maximum(top_k * outside, 1e-9), 1.0)


@dataclass(frozen=True)
class _Traffic:
    """Seconds of collectives over all layers of the model: of one micro-batch, and of those made once a step."""

    each: Array
    once: Array
    tax: Array
    """What each second takes from the compute that hides it."""


def _weights_traffic(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, backward: Array
) -> tuple[_Traffic, _Traffic]:
    """Gathers and reduce-scatters of fully sharded weights. Experts on ranks of their own are gathered by kernels in any case."""
    width = layout.tensor
    where = group(machine, k, layout.shards, layout.shard_step)
    ends = k.copies * (2 - shape.tied) * shape.table_params  # other stacks' fit has them in `passes`
    blocks = shape.dense_params / width
    copied, size = np.asarray(layout.copied) > 0, blocks * layout.gathered_bytes + ends / width * COMPUTE_BYTES
    one = _gathered(where, machine, k, size, shape.layers, copied)
    whole = gather(where, k, blocks * COMPUTE_BYTES + ends / width * COMPUTE_BYTES, shape.layers)
    ranks = np.maximum(layout.expert, 1.0)
    experts = group(machine, k, layout.expert_shard, ranks)
    size = shape.expert_params / ranks * COMPUTE_BYTES
    one = one + _gathered(experts, machine, k, size, shape.moe_layers, copied & (ranks <= 1))
    whole = whole + gather(experts, k, size, shape.moe_layers)
    scatter = whole * (k.scatter_bytes / COMPUTE_BYTES)
    scatter = scatter + _yielded(where, layout, k, scatter, backward)
    gathers, reductions = (count / layout.micro_batches for count in weight_collectives(layout))
    gathers = np.where(layout.gather_once > 0, 0.0, gathers)
    once = np.where((layout.pipeline > 1) & (layout.micro_batches <= 1), 1.0, np.asarray(layout.reduce_once) > 0)
    reductions = (1.0 - once) * reductions
    sharded = layout.zero >= 3
    kernel = np.where((where.domains > 1) & (k.copies > 0), k.net_tax, k.overlap_tax)
    copy = np.where(copied & (ranks <= 1), k.overlap_tax * k.copy_tax, kernel)
    return (
        _Traffic(np.where(sharded, gathers * one, 0.0), np.where(sharded, layout.gather_once * one, 0.0), copy),
        _Traffic(np.where(sharded, reductions * scatter, 0.0), np.where(sharded, once * scatter, 0.0), kernel),
    )  # fmt: skip


def _gathered(where: Group, machine: Machine, k: Constants, size: Array, messages: Array, copied: Array) -> Array:
    """Seconds to gather `size` bytes, where `copied` by copy engines."""
    by_kernels = gather(where, k, size, messages)
    if not np.any(copied):
        return by_kernels
    return np.where(copied, gather(by_copies(where, machine, k), k, size, messages), by_kernels)


def _shown(traffic: Array, room: Array, tax: Array) -> Array:
    """What shows of traffic under compute that takes `room`: what is longer, and what the rest takes from it."""
    return np.maximum(0.0, traffic - room) + np.minimum(traffic, room) * tax


def _gradient_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants, backward: Array) -> Array:
    """Exposed seconds, once a step, of gradient sums over replicas and, if the optimizer is sharded, weight gathers."""
    width = layout.tensor
    ranks = layout.data * layout.context
    where = group(machine, k, ranks, layout.data_step, crowding(machine, layout, k))
    dense, experts = stage_parameters(shape, layout, 1 / layout.pipeline)
    weight = np.where(machine.low > 0, 1.0, COMPUTE_BYTES)
    messages = k.messages * shape.layers / layout.pipeline
    replicas_of = np.maximum(layout.expert, 1.0)
    copies = group(machine, k, np.maximum(1.0, ranks * width / replicas_of), replicas_of)
    expert_bytes = np.where(shape.experts > 0, experts, 0.0)
    hybrid = group(machine, k, np.maximum(1.0, ranks / layout.shards), layout.replicate_step)
    whole = all_reduce(where, k, dense * k.reduce_bytes, messages)
    part = gather(where, k, dense * k.reduce_bytes, messages)
    replica_bytes = np.where(layout.replica_bytes > 0, layout.replica_bytes, k.reduce_bytes)
    between = all_reduce(hybrid, k, (dense / layout.shards + experts / layout.expert_shard) * replica_bytes)
    between = between + _yielded(hybrid, layout, k, between, backward)
    whole = whole + _yielded(where, layout, k, whole, backward)
    reduced = np.where(layout.zero == 0, whole, part) + gather(copies, k, expert_bytes * k.reduce_bytes, messages)
    reduced = np.where(layout.zero >= 3, between, reduced)
    steps = 2 * (ranks - 1) * k.ring_us / RINGS * 1e-6 * shape.layers / layout.pipeline
    reduced = reduced + np.where(layout.zero == 0, layout.sequence * steps, 0.0)
    gathered = gather(where, k, dense * weight, messages) + gather(copies, k, expert_bytes * weight, messages)
    gathered = np.where((layout.zero >= 1) & (layout.zero < 3), gathered, 0.0)
    # An interleaved rank ends with p backward passes of one chunk after another (Narayanan et al. 2021, figure 4), so a chunk's gradients
    # travel while the others' last round is computed; weights are wanted at once by the first forward.
    rounds = 1 + LAST_ROUND * (1 - 1 / layout.virtual) * np.minimum(layout.micro_batches, layout.pipeline)
    rounds = np.where(layout.layered > 0, 1.0, rounds)
    shown = 1 - np.minimum(k.hide, 1.0)
    rounds = rounds * _beside(layout)
    late = np.maximum(reduced - k.hide * backward * rounds, shown * reduced / layout.virtual)
    return late + np.maximum(gathered - k.hide * backward / 2, shown * gathered) + _tied_sum(shape, machine, layout, k)


def _yielded(where: Group, layout: Layouts, k: Constants, seconds: Array, backward: Array) -> Array:
    """Additional seconds of a reduction across nodes during backward: of one micro-batch, or in layered order of all."""
    return np.where(where.domains > 1, k.net_yield, 0.0) * np.minimum(seconds, backward * _beside(layout))


def _beside(layout: Layouts) -> Array:
    """Micro-batches of a layer under which its collectives travel that run once a step: in layered order all of them."""
    return np.where(layout.layered > 0, layout.micro_batches, 1.0)


def _tied_sum(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Seconds of the sum of a tied weight over first and last stage, without overlap.

    The fit of other stacks includes it elsewhere.
    """
    ends = group(machine, k, 2.0, layout.pipeline_step * np.maximum(1.0, layout.pipeline - 1))
    elements = shape.table_params / layout.tensor / np.where(layout.zero >= 3, layout.shards, 1.0)
    apart = (layout.pipeline > 1) & (layout.vee == 0)
    return np.where(apart, shape.tied * k.copies * all_reduce(ends, k, elements * k.reduce_bytes), 0.0)


def _boundary(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """One micro-batch's activations from a stage to the next, one direction."""
    across = layout.pipeline_step >= machine.domain
    size = layout.micro_batch * layout.seq / layout.context / layout.tensor * shape.hidden * COMPUTE_BYTES
    return k.pipe_us * 1e-6 + size / np.where(across, port_rate(machine, k), link_rate(machine, k))


def owned_params(shape: Shape, layout: Layouts) -> Array:
    """Weights that one rank's optimizer steps."""
    dense, experts = stage_parameters(shape, layout, 1 / layout.pipeline)
    return shard_parameters(layout, dense, experts, layout.zero >= 1)


def _optimizer(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    owned = owned_params(shape, layout)
    sweep = owned * k.update / (machine.hbm * k.hbm)
    sweep = np.where(layout.offload > 0, host_optimizer(machine, owned, layout.state_bytes, sweep), sweep)
    return sweep + k.step_layer_us * 1e-6 * shape.layers / layout.pipeline
