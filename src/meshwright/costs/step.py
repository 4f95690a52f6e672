"""Seconds of one training step in closed form, for arrays of layouts at once.

    step = pipeline(m micro-batches of the slowest stage, plus the fill) + exposed data-parallel traffic + optimizer + constants

Each term is a formula of docs/design/cost-model.md. The layout's strides say which ranks form a group. `k` is the constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.collective_costs import (
    Group,
    all_reduce,
    all_to_all,
    congestion,
    copy_engine_group,
    gather,
    link_rate,
    port_rate,
    rank_group,
)
from meshwright.costs.compute import LayerTime, layer_times
from meshwright.costs.constants import Constants
from meshwright.costs.copies import copy_seconds
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

LAST_ROUND_OVERLAP = 0.8
"""Share of an interleaved pipeline's last round that hides gradient reductions.

The schedule allows 1; links that also carry activations allow less. Set by hand (docs/design/cost-model.md, "Blind
spots").
"""
EDGE_UNITS = 1.5
"""Units of a stage whose collectives do not delay the next stage: two gathers and one reduction, on average."""
WEIGHT_BACKWARD = 0.7
"""Time of the weight-gradient part of a split backward, relative to a forward: its products, without attention.

Gradient reductions overlap only with that part.
"""
RING_COLLECTIVES = 10.0
"""Collectives of a layer, forward and backward, with sequence-split tensor parallelism: six gathers, four scatters."""
RING_EXPOSED = 0.5
"""Share of a context ring's messages that attention does not hide: a guess, the same for all stacks."""
COUNT_SYNC_US = 50.0
"""Host synchronisation of a layer for the row counts of its experts, beside their all-to-all.

A copy to the host, the host thread's wake-up, and the first launches after it. A guess: a launch takes 5 to 10 µs on the
host of an H200.
"""
ALLOCATOR_LIMIT = 0.92
"""Share of device memory at which the caching allocator starts to free cached blocks and allocate them again."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step by cause; `exposed` is communication time by axis that no compute hides."""

    seconds: Array
    compute: Array
    bubble: Array
    host: Array
    optimizer: Array
    constant: Array
    exposed: dict[str, Array]


@dataclass(frozen=True)
class LayerExposure:
    """Exposed seconds inside the layers, of one micro-batch over all layers.

    Communication of tensor, context and expert ranks, and launches by the host.
    """

    tensor: Array
    context: Array
    expert: Array
    host: Array


def layer_exposure(shape: Shape, machine: Machine, layout: Layouts, k: Constants, times: LayerTime) -> LayerExposure:
    """Exposed communication and host time inside layers whose device time is `times`."""
    machine = replace(machine, nic=machine.nic * layout.port)
    tensor = _tensor_traffic(shape, machine, layout, k)
    context = sum(context_traffic(shape, machine, layout, k))
    expert = _expert_traffic(shape, machine, layout, k, times.forward + times.backward) + _expert_launches(
        shape, layout, k
    )
    device_seconds = times.forward + times.backward + tensor + context + expert
    return LayerExposure(tensor, context, expert, _smooth_maximum(device_seconds, times.host) - device_seconds)


def step_cost(shape: Shape, machine: Machine, layout: Layouts, k: Constants, memory_share: Array = 0.0) -> StepCost:
    """Seconds of one step under each layout; `memory_share` is predicted peak memory over the device's memory."""
    times = layer_times(shape, machine, layout, k)
    layer_seconds = layer_exposure(shape, machine, layout, k, times)
    machine = replace(machine, nic=machine.nic * layout.port)
    device = times.forward + times.backward  # all layers, one micro-batch
    layers_device = device + layer_seconds.tensor + layer_seconds.context + layer_seconds.expert
    gathers, reductions = _weights_traffic(shape, machine, layout, k, times.backward)
    layers_time = layers_device + layer_seconds.host
    backward = layers_time * times.backward / np.maximum(device, 1e-12)
    overlap_seconds = np.where(layout.gather_once > 0, backward, layers_time) * k.hide
    copied, copied_once = copy_seconds(shape, machine, layout, k)
    collective_seconds = gathers.each + reductions.each
    mean_tax = (gathers.each * gathers.tax + reductions.each * reductions.tax) / np.maximum(collective_seconds, 1e-12)
    shared_overlap = _exposed_seconds(collective_seconds, overlap_seconds, mean_tax)
    separate_overlap = _exposed_seconds(gathers.each, overlap_seconds, gathers.tax) + _exposed_seconds(
        reductions.each, k.hide * WEIGHT_BACKWARD * times.forward, reductions.tax
    )
    splits_backward = (layout.pipeline > 1) & (layout.fill < 1)
    shard_exposed = np.where(splits_backward, np.maximum(shared_overlap, separate_overlap), shared_overlap) + copied
    offloaded = exposed_copies(shape, machine, layout, times.forward, times.backward)
    chain = layers_time + shard_exposed + offloaded
    host_micro = k.host_micro_us * 1e-6
    stage, all_stages = _stage_seconds(shape, layout, chain, times)
    message = _boundary_seconds(shape, machine, layout, k)
    micro_batches = layout.micro_batches
    # A stage issues its first gathers before its input arrives, and sends its result before its last reduction.
    units = shape.layers / layout.pipeline / layout.virtual
    all_stages = all_stages - np.where(
        layout.pipeline > 1, (shard_exposed - copied) * np.minimum(1.0, EDGE_UNITS / units), 0.0
    )
    fill = np.where(
        layout.pipeline > 1, layout.fill * k.bubble * np.maximum(0.0, all_stages - stage) / layout.virtual, 0.0
    )
    # With fewer micro-batches than ranks virtual stages help little: the first micro-batch still passes all of them.
    fill = np.where(layout.virtual > 1, np.maximum(fill, all_stages - micro_batches * stage), fill)
    sent = message * micro_batches * layout.virtual  # in one direction; the two directions overlap
    pipe_seconds = np.maximum(2 * sent * k.pipe_exposed, sent - micro_batches * stage) + 2 * message * (
        layout.pipeline - 1
    )
    pipe_seconds = np.where(layout.pipeline > 1, pipe_seconds, 0.0)
    stalls = _stall_seconds(machine, layout, k, memory_share)
    imbalance = micro_batches * (layout.slowest - 1) * stage
    steady = micro_batches * (stage + host_micro) + imbalance
    overlapping = k.hide * _overlapping_micro_batches(layout)
    first = _exposed_seconds(gathers.once, (layers_time - backward) * overlapping, gathers.tax)
    last = _exposed_seconds(reductions.once, backward * overlapping, reductions.tax)
    # One rank's collectives precede the next rank's, except those of the units at its edges.
    other_ranks = np.where(layout.layered > 0, 0.0, layout.pipeline - 1)
    first = first * (1 + other_ranks * np.maximum(0.0, 1 - 2 / units))
    last = last * (1 + np.where(splits_backward, 0.0, other_ranks * (1 - 1 / units)))
    first_and_last = (first + last + copied_once) / layout.pipeline
    # Nothing overlaps with the first gather, the embedding's, nor with the last reduction, also the embedding's.
    table_elements = k.copies * shape.table_params / layout.tensor
    group = rank_group(machine, k, layout.shards, layout.shard_step)
    table_seconds = gather(group, k, table_elements * COMPUTE_BYTES) + gather(
        group, k, table_elements * k.scatter_bytes
    )
    first_and_last = first_and_last + np.where((layout.pipeline > 1) & (layout.zero >= 3), table_seconds, 0.0)
    data_seconds = first_and_last + _gradient_traffic(
        shape, machine, layout, k, stage * times.backward / np.maximum(device, 1e-12)
    )
    update = _optimizer_seconds(shape, machine, layout, k)
    nodes = np.log2(np.maximum(1.0, layout.ranks / machine.per_node))
    constant = (k.step_ms + k.sync_ms * nodes) * 1e-3
    seconds = (steady + fill + pipe_seconds) * (1 + k.jitter * nodes) + data_seconds + update + constant + stalls
    step_share = micro_batches * stage / np.maximum(chain + times.head + times.embed, 1e-12)
    exposed = {
        "tensor": layer_seconds.tensor * step_share,
        "context": layer_seconds.context * step_share,
        "expert": layer_seconds.expert * step_share,
        "shard": shard_exposed * step_share,
        "pipeline": pipe_seconds + stalls,
        "data": data_seconds,
        "host link": offloaded * step_share,
        "slowest rank": imbalance,
    }
    compute = (device + times.head + times.embed) * step_share
    return StepCost(
        seconds,
        compute,
        fill,
        layer_seconds.host * step_share + micro_batches * host_micro,
        update,
        constant,
        exposed,
    )


def _smooth_maximum(first: Array, second: Array) -> Array:
    """A smooth maximum: if device and host take about equally long, each sometimes waits for the other."""
    high, low = np.maximum(first, second), np.minimum(first, second)
    ratio = low / np.maximum(high, 1e-12)
    square = ratio * ratio
    return high * np.sqrt(np.sqrt(1 + square * square))


def _stage_seconds(shape: Shape, layout: Layouts, chain: Array, times: LayerTime) -> tuple[Array, Array]:
    """Seconds of one micro-batch in the slowest stage, and in all stages together. `chain` is the time of all layers."""
    all_stages = chain + times.head + times.embed
    per_layer = chain / shape.layers
    full_layers, last_layers = stage_layers(shape, layout)
    stage = np.maximum(full_layers * per_layer, last_layers * per_layer + times.head)
    return np.where(layout.pipeline > 1, stage, all_stages), all_stages


def _stall_seconds(machine: Machine, layout: Layouts, k: Constants, memory_share: Array) -> Array:
    """Seconds lost at stage boundaries, at most two per micro-batch, to a congested network or to full device memory.

    Near its limit the allocator frees its cache and allocates again for each activation that does not fit.
    """
    boundaries = np.minimum(2.0, layout.pipeline - 1)
    memory_probability = 1 / (1 + (ALLOCATOR_LIMIT / np.maximum(memory_share, 1e-3)) ** 40)
    probability = 1 - (1 - congestion(machine, layout, k)) * (1 - memory_probability)
    return probability * k.stall_s * boundaries * layout.micro_batches


def _tensor_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Exposed seconds of tensor-parallel exchanges: a gather and a reduce-scatter take as long as an all-reduce.

    The constants were fitted without the gather for weight gradients. After a gather by kernels, tokens of several sequences
    are reordered.
    """
    tokens = step_shape(shape, layout).tokens
    _, sums = tensor_messages(shape, layout, step_shape(shape, layout))
    group = rank_group(machine, k, layout.tensor, layout.tensor_step, congestion(machine, layout, k))
    exchange_seconds = all_reduce(group, k, sums.bytes)
    reordered = tokens * shape.hidden * k.token_passes / (machine.hbm * k.hbm / k.slow) / 4
    reordered = np.where((layout.tensor > 1) & (np.asarray(layout.micro_batch) > 1), reordered, 0.0)
    by_kernels = exchange_seconds * k.tensor_exposed + reordered
    copied = np.asarray(layout.tokens_copied) > 0
    relative = np.where(layout.tensor > 2, k.copied_tokens_of_more, k.copied_tokens)
    return sums.count * np.where(copied, exchange_seconds * k.tensor_exposed * relative, by_kernels)


def context_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> tuple[Array, Array]:
    """Exposed seconds of context ranks' messages over all layers: in the forward, and in the backward.

    Attention hides half of a ring's messages. Published stacks repeat no message, sum gradients in bf16 and send no gradients back
    to the rank that owns the keys and values.
    """
    with_repeats = _with_repeated_messages(layout, k)
    heads, passes, sums = context_messages(shape, with_repeats, step_shape(shape, with_repeats))
    exchange_group = rank_group(machine, k, layout.ulysses, layout.ulysses_step)
    exchange = all_to_all(exchange_group, k, machine, heads.bytes)
    ring_steps = np.maximum(1.0, layout.ring - 1)
    message_seconds = (
        RING_EXPOSED
        * gather(rank_group(machine, k, layout.ring, layout.ring_step), k, passes.bytes * layout.ring)
        / ring_steps
    )
    summed = np.where(k.copies > 0, sums.bytes / passes.bytes * sums.count, passes.forward)
    forward = heads.forward * exchange + passes.forward * message_seconds
    return forward, heads.backward * exchange + (passes.backward + summed) * message_seconds


def _with_repeated_messages(layout: Layouts, k: Constants) -> Layouts:
    """The layout with the recompute mode only for this program's engine: other stacks are fitted without repeated messages."""
    return replace(layout, recompute=np.where(k.copies > 0, layout.recompute, 0.0))


def _expert_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants, compute: Array) -> Array:
    """Seconds of dispatch and combine, forward and backward.

    In this program's engine each forward first exchanges the row counts, which the host synchronises on. If another
    micro-batch computes during the exchange, `compute` hides it.
    """
    if not np.any(shape.moe_layers):
        return np.zeros_like(compute)
    message = expert_message(shape, _with_repeated_messages(layout, k), step_shape(shape, layout))
    group = rank_group(machine, k, layout.expert, 1.0)
    sent_once = np.where(np.asarray(layout.one_copy) > 0, _distinct_domains(group.domains, shape.top_k, layout), 1.0)
    exchange = message.count * all_to_all(group, k, machine, message.bytes, sent_once) * layout.imbalance
    forwards = message.count / 2 - shape.moe_layers
    count_seconds = (
        k.copies * forwards * (all_to_all(group, k, machine, 0.0) + COUNT_SYNC_US * 1e-6) * (layout.expert > 1)
    )
    overlaps = np.asarray(layout.exchange_beside) > 0
    return (
        np.where(overlaps, _exposed_seconds(exchange, compute, k.overlap_tax), exchange * k.expert_exposed)
        + count_seconds
    )


def _expert_launches(shape: Shape, layout: Layouts, k: Constants) -> Array:
    """Device idle seconds while the host launches the products of local experts, after it received their sizes."""
    local = shape.experts / np.maximum(layout.expert, 1.0)
    return shape.moe_layers * local * k.moe_us * 1e-6 * layout.host_sizes


def _distinct_domains(domains: Array, top_k: Array, layout: Layouts) -> Array:
    """Share of a token's copies that cross domains if each other domain gets at most one copy.

    It is the expected number of other domains among those of `top_k` experts drawn at random, capped by the router's limit.
    """
    domains = np.maximum(domains, 1.0)
    outside = 1 - 1 / domains
    distinct = (domains - 1) * (1 - outside**top_k)
    limit = np.where(np.asarray(layout.domains_per_token) > 0, layout.domains_per_token * outside, np.inf)
    return np.where(domains > 1, np.minimum(distinct, limit) / np.maximum(top_k * outside, 1e-9), 1.0)


@dataclass(frozen=True)
class _Traffic:
    """Seconds of collectives over all layers of the model: per micro-batch (`each`), and once per step (`once`)."""

    each: Array
    once: Array
    tax: Array
    """Seconds by which each second slows the compute beside it."""


def _weights_traffic(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, backward: Array
) -> tuple[_Traffic, _Traffic]:
    """Gathers and reduce-scatters of fully sharded weights. With several expert ranks, kernels gather the experts in any case."""
    tensor_ranks = layout.tensor
    group = rank_group(machine, k, layout.shards, layout.shard_step)
    # For other stacks the fitted `passes` includes embedding and head.
    end_elements = k.copies * (2 - shape.tied) * shape.table_params
    block_elements = shape.dense_params / tensor_ranks
    copied, size = (
        np.asarray(layout.copied) > 0,
        block_elements * layout.gathered_bytes + end_elements / tensor_ranks * COMPUTE_BYTES,
    )
    gathered = _gather_seconds(group, machine, k, size, shape.layers, copied)
    by_kernels = gather(
        group, k, block_elements * COMPUTE_BYTES + end_elements / tensor_ranks * COMPUTE_BYTES, shape.layers
    )
    expert_ranks = np.maximum(layout.expert, 1.0)
    experts = rank_group(machine, k, layout.expert_shard, expert_ranks)
    size = shape.expert_params / expert_ranks * COMPUTE_BYTES
    gathered = gathered + _gather_seconds(experts, machine, k, size, shape.moe_layers, copied & (expert_ranks <= 1))
    by_kernels = by_kernels + gather(experts, k, size, shape.moe_layers)
    scatter = by_kernels * (k.scatter_bytes / COMPUTE_BYTES)
    scatter = scatter + _contention_seconds(group, layout, k, scatter, backward)
    gathers, reductions = (count / layout.micro_batches for count in weight_collectives(layout))
    gathers = np.where(layout.gather_once > 0, 0.0, gathers)
    once = np.where((layout.pipeline > 1) & (layout.micro_batches <= 1), 1.0, np.asarray(layout.reduce_once) > 0)
    reductions = (1.0 - once) * reductions
    sharded = layout.zero >= 3
    kernel_tax = np.where((group.domains > 1) & (k.copies > 0), k.net_tax, k.overlap_tax)
    copy_tax = np.where(copied & (expert_ranks <= 1), k.overlap_tax * k.copy_tax, kernel_tax)
    return (
        _Traffic(np.where(sharded, gathers * gathered, 0.0), np.where(sharded, layout.gather_once * gathered, 0.0), copy_tax),
        _Traffic(np.where(sharded, reductions * scatter, 0.0), np.where(sharded, once * scatter, 0.0), kernel_tax),
    )  # fmt: skip


def _gather_seconds(group: Group, machine: Machine, k: Constants, size: Array, messages: Array, copied: Array) -> Array:
    """Seconds to gather `size` bytes: by copy engines where `copied`, by kernels elsewhere."""
    by_kernels = gather(group, k, size, messages)
    if not np.any(copied):
        return by_kernels
    return np.where(copied, gather(copy_engine_group(group, machine, k), k, size, messages), by_kernels)


def _exposed_seconds(traffic: Array, compute: Array, tax: Array) -> Array:
    """Exposed seconds of `traffic` beside `compute` seconds: the excess, plus the slow-down of compute by the overlapped part."""
    return np.maximum(0.0, traffic - compute) + np.minimum(traffic, compute) * tax


def _gradient_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants, backward: Array) -> Array:
    """Exposed seconds, once a step, of gradient sums over replicas and, if the optimizer is sharded, weight gathers."""
    tensor_ranks = layout.tensor
    data_ranks = layout.data * layout.context
    group = rank_group(machine, k, data_ranks, layout.data_step, congestion(machine, layout, k))
    dense, experts = stage_parameters(shape, layout, 1 / layout.pipeline)
    weight = np.where(machine.low > 0, 1.0, COMPUTE_BYTES)
    messages = k.messages * shape.layers / layout.pipeline
    replicas_of = np.maximum(layout.expert, 1.0)
    copy_group = rank_group(machine, k, np.maximum(1.0, data_ranks * tensor_ranks / replicas_of), replicas_of)
    expert_bytes = np.where(shape.experts > 0, experts, 0.0)
    hybrid = rank_group(machine, k, np.maximum(1.0, data_ranks / layout.shards), layout.replicate_step)
    summed = all_reduce(group, k, dense * k.reduce_bytes, messages)
    scattered = gather(group, k, dense * k.reduce_bytes, messages)
    replica_bytes = np.where(layout.replica_bytes > 0, layout.replica_bytes, k.reduce_bytes)
    replica_sums = all_reduce(hybrid, k, (dense / layout.shards + experts / layout.expert_shard) * replica_bytes)
    replica_sums = replica_sums + _contention_seconds(hybrid, layout, k, replica_sums, backward)
    summed = summed + _contention_seconds(group, layout, k, summed, backward)
    reduced = np.where(layout.zero == 0, summed, scattered) + gather(
        copy_group, k, expert_bytes * k.reduce_bytes, messages
    )
    reduced = np.where(layout.zero >= 3, replica_sums, reduced)
    ring_host_seconds = 2 * (data_ranks - 1) * k.ring_us / RING_COLLECTIVES * 1e-6 * shape.layers / layout.pipeline
    reduced = reduced + np.where(layout.zero == 0, layout.sequence * ring_host_seconds, 0.0)
    gathered = gather(group, k, dense * weight, messages) + gather(copy_group, k, expert_bytes * weight, messages)
    gathered = np.where((layout.zero >= 1) & (layout.zero < 3), gathered, 0.0)
    # An interleaved rank ends with p backward passes of each chunk in turn (Narayanan et al. 2021, figure 4), so the reduction of one chunk
    # overlaps with the last round of the others. The first forward needs the gathered weights at once.
    rounds = 1 + LAST_ROUND_OVERLAP * (1 - 1 / layout.virtual) * np.minimum(layout.micro_batches, layout.pipeline)
    rounds = np.where(layout.layered > 0, 1.0, rounds)
    least_exposed = 1 - np.minimum(k.hide, 1.0)  # exposed share with unlimited compute beside it
    rounds = rounds * _overlapping_micro_batches(layout)
    exposed = np.maximum(reduced - k.hide * backward * rounds, least_exposed * reduced / layout.virtual)
    return (
        exposed
        + np.maximum(gathered - k.hide * backward / 2, least_exposed * gathered)
        + _tied_sum_seconds(shape, machine, layout, k)
    )


def _contention_seconds(group: Group, layout: Layouts, k: Constants, seconds: Array, backward: Array) -> Array:
    """Seconds that a reduction across nodes takes longer because backward runs beside it (TCP)."""
    return np.where(group.domains > 1, k.net_yield, 0.0) * np.minimum(
        seconds, backward * _overlapping_micro_batches(layout)
    )


def _overlapping_micro_batches(layout: Layouts) -> Array:
    """Micro-batches whose compute overlaps with a layer's once-per-step collectives: in layered order all, else one."""
    return np.where(layout.layered > 0, layout.micro_batches, 1.0)


def _tied_sum_seconds(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Seconds to sum a tied weight's gradients over the first and the last stage, without overlap.

    Constants of other stacks include it already.
    """
    end_group = rank_group(machine, k, 2.0, layout.pipeline_step * np.maximum(1.0, layout.pipeline - 1))
    elements = shape.table_params / layout.tensor / np.where(layout.zero >= 3, layout.shards, 1.0)
    on_two_ranks = (layout.pipeline > 1) & (layout.vee == 0)
    return np.where(on_two_ranks, shape.tied * k.copies * all_reduce(end_group, k, elements * k.reduce_bytes), 0.0)


def _boundary_seconds(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Seconds to send one micro-batch's activations from a stage to the next."""
    crosses_domains = layout.pipeline_step >= machine.domain
    size = layout.micro_batch * layout.seq / layout.context / layout.tensor * shape.hidden * COMPUTE_BYTES
    return k.pipe_us * 1e-6 + size / np.where(crosses_domains, port_rate(machine, k), link_rate(machine, k))


def owned_params(shape: Shape, layout: Layouts) -> Array:
    """Parameters that one rank's optimizer updates."""
    dense, experts = stage_parameters(shape, layout, 1 / layout.pipeline)
    return shard_parameters(layout, dense, experts, layout.zero >= 1)


def _optimizer_seconds(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    owned = owned_params(shape, layout)
    update_seconds = owned * k.update / (machine.hbm * k.hbm)
    update_seconds = np.where(
        layout.offload > 0, host_optimizer(machine, owned, layout.state_bytes, update_seconds), update_seconds
    )
    return update_seconds + k.step_layer_us * 1e-6 * shape.layers / layout.pipeline
