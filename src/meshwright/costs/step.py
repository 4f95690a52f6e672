"""Seconds of one training step in closed form, for arrays of layouts at once.

    step = m × (micro-batch on the slowest stage) + pipeline fill + exposed data-parallel collectives + optimizer + constant

where m is the number of micro-batches. Each term is a formula of docs/design/cost-model.md. The strides of a layout say which ranks form a
group. `k` are the constants of a stack, that is, of a training software: this program's engine, or a published one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.collective_costs import (
    CollectiveGroup,
    all_reduce,
    congestion,
    copy_engine_group,
    gather,
    link_rate,
    port_rate,
    rank_group,
)
from meshwright.costs.compute import LayerTime
from meshwright.costs.constants import Constants
from meshwright.costs.copies import copy_seconds
from meshwright.costs.device_rates import Machine
from meshwright.costs.layer_costs import LayerCosts, exposed_seconds, layer_costs
from meshwright.costs.offload_costs import activation_copies, exposed_copies, exposed_sums, host_optimizer
from meshwright.costs.optimizer_costs import matrix_seconds, update_seconds
from meshwright.costs.stage_layers import stage_layers
from meshwright.workload.arrays import Array
from meshwright.workload.dtypes import COMPUTE_BYTES
from meshwright.workload.layer_messages import weight_collectives
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape, embedding_at_both_ends
from meshwright.workload.unit_parameters import shard_parameters, stage_parameters

LAST_ROUND_OVERLAP = 0.8
"""Share of the last round of an interleaved pipeline in which gradient reductions can be hidden.

The schedule allows 1, but the links also carry activations. Set by hand (docs/design/cost-model.md, "Blind spots").
"""
EARLY_GATHERS = 2
"""Units of a stage that are gathered before the stage's input arrives, so their gathers do not delay a micro-batch."""
LATE_REDUCTIONS = 1
"""Units of a stage that are reduced after the stage has sent its result, so their reductions do not delay a micro-batch."""
WEIGHT_BACKWARD = 0.7
"""Seconds of the weight-gradient part of a split backward, relative to a forward: its matmuls, without attention.

In schedules with a split backward, gradient reductions overlap only with that part.
"""
SEQUENCE_COLLECTIVES = 10.0
"""Collectives of a layer with sequence parallelism, forward and backward: six all-gathers and four reduce-scatters."""
ALLOCATOR_LIMIT = 0.92
"""Share of device memory at which the caching allocator starts to free cached blocks and allocate them again."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step, in total and by cause."""

    seconds: Array
    """The whole step."""
    compute: Array
    """Forward and backward of all micro-batches on the slowest stage."""
    bubble: Array
    """Idle time at the ends of the pipeline."""
    host: Array
    """Waits until the host has launched kernels."""
    optimizer: Array
    """The update."""
    forward: Array
    """A micro-batch's forward over all layers, which hides a part of the update."""
    constant: Array
    """Fixed time of each step."""
    exposed: dict[str, Array]
    """By axis, communication that no compute hides."""


def step_cost(
    shape: Shape,
    machine: Machine,
    layout: Layouts,
    k: Constants,
    memory_share: Array = 0.0,
    layers: LayerCosts | None = None,
) -> StepCost:
    """Return the seconds of a step under each layout.

    `memory_share` is the peak of device memory in use, as a share; near 1, allocations take time. `layers` is the result of `layer_costs`
    for the same arguments, if the caller has it.
    """
    layers = layers or layer_costs(shape, machine, layout, k)
    times = layers.times
    layer_seconds = layers.exposure
    machine = replace(machine, nic=machine.nic * layout.port)
    device = times.forward + times.backward  # all layers, one micro-batch
    layers_device = device + layer_seconds.tensor + layer_seconds.context + layer_seconds.expert
    gathers, reductions = _weights_traffic(shape, machine, layout, k, times.backward)
    layers_time = layers_device + layer_seconds.host
    # Exposed communication and launches are divided between forward and backward in the ratio of their compute without recomputation.
    # With recomputation in the ratio, more of them would count in the backward, where they would hide more than recomputation adds.
    first_backward = times.backward - times.recomputed
    backward_share = first_backward / np.maximum(times.forward + first_backward, 1e-12)
    backward = times.backward + (layers_time - device) * backward_share
    overlap_seconds = np.where(layout.gather_once > 0, backward, layers_time) * k.hide
    # Copies between shards and communication buffers: per micro-batch, and once per step.
    copies_each, copies_once = copy_seconds(shape, machine, layout, k)
    collective_seconds = gathers.each + reductions.each
    mean_tax = (gathers.each * gathers.tax + reductions.each * reductions.tax) / np.maximum(collective_seconds, 1e-12)
    # Usually, gathers and reductions together overlap with all compute. If the backward is split, reductions overlap only with its
    # weight-gradient part, so more of them may be exposed.
    exposed_if_joint = exposed_seconds(collective_seconds, overlap_seconds, mean_tax)
    exposed_if_split = exposed_seconds(gathers.each, overlap_seconds, gathers.tax) + exposed_seconds(
        reductions.each, k.hide * WEIGHT_BACKWARD * times.forward, reductions.tax
    )
    shard_exposed = (
        np.where(layout.splits_backward, np.maximum(exposed_if_joint, exposed_if_split), exposed_if_joint) + copies_each
    )
    # Copies to the host and back overlap with compute, and also with the exchanges between tensor, context and expert ranks.
    offloaded = exposed_copies(shape, machine, layout, layers_time - backward, backward)
    offloaded = offloaded + exposed_sums(machine, layout, owned_params(shape, layout), backward)
    all_layers_seconds = layers_time + shard_exposed + offloaded
    host_micro = k.host_micro_us * 1e-6
    stage, all_stages = _stage_seconds(shape, layout, all_layers_seconds, times)
    message = _boundary_seconds(shape, machine, layout, k)
    micro_batches = layout.micro_batches
    # The first gathers and the last reductions of a stage do not delay the next stage. `shard_exposed` does not distinguish gathers from
    # reductions, so the mean of the two numbers of units is used.
    units = shape.layers / layout.pipeline / layout.virtual
    edge_units = (EARLY_GATHERS + LATE_REDUCTIONS) / 2
    all_stages = all_stages - np.where(
        layout.pipeline > 1, (shard_exposed - copies_each) * np.minimum(1.0, edge_units / units), 0.0
    )
    fill = np.where(
        layout.pipeline > 1, layout.fill * k.bubble * np.maximum(0.0, all_stages - stage) / layout.virtual, 0.0
    )
    # With fewer micro-batches than ranks, virtual stages help little, because the first micro-batch must still pass all stages.
    fill = np.where(layout.virtual > 1, np.maximum(fill, all_stages - micro_batches * stage), fill)
    sent = message * micro_batches * layout.virtual  # in one direction; the two directions overlap
    recomputed = times.recomputed * stage / np.maximum(all_layers_seconds + times.head + times.embed, 1e-12)
    stage_forward = (stage - recomputed) * (1 - backward_share)
    returns = k.own_engine * _return_seconds(layout, message, stage_forward, stage - stage_forward)
    pipe_seconds = np.maximum(2 * sent * k.pipe_exposed, sent - micro_batches * stage)
    pipe_seconds = np.maximum(pipe_seconds, returns) + 2 * message * (layout.pipeline - 1)
    pipe_seconds = np.where(layout.pipeline > 1, pipe_seconds, 0.0)
    stalls = _stall_seconds(machine, layout, k, memory_share)
    imbalance = micro_batches * (layout.slowest_rank_ratio - 1) * stage
    steady = micro_batches * (stage + host_micro) + imbalance
    overlapping = k.hide * _overlapping_micro_batches(layout)
    first = exposed_seconds(gathers.once, (layers_time - backward) * overlapping, gathers.tax)
    # Compute that already hides the collectives of its micro-batch cannot hide the last reductions as well.
    free_overlap_share = 1 - np.minimum(1.0, collective_seconds / np.maximum(overlap_seconds, 1e-12))
    last = exposed_seconds(reductions.once, free_overlap_share * backward * overlapping, reductions.tax)
    first_and_last = _delay_of_ends(layout, first, last, units) + copies_once / layout.pipeline
    first_and_last = first_and_last + _table_seconds(shape, machine, layout, k)
    # All-reduces over replicas overlap with the last reductions over shards, so also the exposed part of those can hide them.
    stage_backward = stage - stage_forward + last / layout.pipeline / _overlapping_micro_batches(layout)
    data_seconds = first_and_last + _gradient_traffic(shape, machine, layout, k, stage_forward, stage_backward)
    forward = layers_time - backward
    update = optimizer_seconds(shape, machine, layout, k, forward)
    nodes = np.log2(np.maximum(1.0, layout.ranks / machine.per_node))
    constant = (k.step_ms + k.sync_ms * nodes) * 1e-3
    # Nodes differ in when their hosts launch kernels. With one CUDA graph for each layer, hosts launch so little that they do not differ.
    jitter = np.where(np.asarray(layout.layer_graphs) > 0, 0.0, k.jitter)
    seconds = (steady + fill + pipe_seconds) * (1 + jitter * nodes) + data_seconds + update + constant + stalls
    # From seconds of one micro-batch over all layers to seconds of a step on the slowest stage.
    per_step = micro_batches * stage / np.maximum(all_layers_seconds + times.head + times.embed, 1e-12)
    exposed = {
        "tensor": layer_seconds.tensor * per_step,
        "context": layer_seconds.context * per_step,
        "expert": layer_seconds.expert * per_step,
        "shard": shard_exposed * per_step,
        "pipeline": pipe_seconds + stalls,
        "data": data_seconds,
        "host link": offloaded * per_step,
        "slowest rank": imbalance,
    }
    compute = (device + times.head + times.embed) * per_step
    return StepCost(
        seconds,
        compute,
        fill,
        layer_seconds.host * per_step + micro_batches * host_micro,
        update,
        forward,
        constant,
        exposed,
    )


def _return_seconds(layout: Layouts, message: Array, forward: Array, backward: Array) -> Array:
    """Return the seconds in which ranks with virtual stages wait until a micro-batch has passed all ranks and comes back.

    With p ranks, a rank computes p micro-batches until the first one comes back, if messages take no time. Messages delay its return by the
    time of p messages. In layered order (all micro-batches run through a layer before the next layer) the micro-batches after the first p
    hide this delay. In interleaved order there are exactly p micro-batches at the beginning and at the end. In a V-shaped placement
    micro-batches turn around at the last rank, so no rank waits. `forward` and `backward` are the seconds of one micro-batch in all stages
    of a rank, `message` those of one message.
    """
    further = np.where(layout.layered > 0, np.maximum(0.0, layout.micro_batches - layout.pipeline), 0.0)
    returns = np.where(layout.vee > 0, 0.0, layout.virtual - 1)
    hidden = further / layout.virtual
    waits = (np.maximum(0.0, layout.pipeline * message - hidden * seconds) for seconds in (forward, backward))
    return returns * sum(waits)


def _delay_of_ends(layout: Layouts, first: Array, last: Array, units: Array) -> Array:
    """Return the seconds by which the step's first gathers and last reductions delay it.

    `first` and `last` are their exposed seconds over all layers. Each pipeline rank has 1/pipeline of them; a stage has `units` units.

    - The first micro-batch reaches a rank after the gathers of all ranks before, so their delays add up. Units that are gathered
      before the input arrives (`EARLY_GATHERS`) do not count.
    - In the same way, the reductions of one rank after another delay the backward of the last micro-batch. With a split backward they
      do not, because weight gradients are computed later.
    - In layered order, no rank waits for the collectives of another rank.
    """
    other_ranks = np.where(layout.layered > 0, 0.0, layout.pipeline - 1)
    first = first * (1 + other_ranks * np.maximum(0.0, 1 - EARLY_GATHERS / units))
    last = last * (1 + np.where(layout.splits_backward, 0.0, other_ranks * (1 - LATE_REDUCTIONS / units)))
    return (first + last) / layout.pipeline


def _table_seconds(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Return the seconds of the embedding's gather and reduction in a pipeline: the first and the last collective of a step.

    No compute overlaps with them. The constants of other stacks include them already, so they are 0 there.
    """
    elements = k.own_engine * shape.table_params / layout.tensor
    group = rank_group(machine, k, layout.shards, layout.shard_step)
    seconds = gather(group, k, elements * COMPUTE_BYTES) + gather(group, k, elements * k.scatter_bytes)
    return np.where((layout.pipeline > 1) & (layout.zero >= 3), seconds, 0.0)


def _stage_seconds(shape: Shape, layout: Layouts, all_layers_seconds: Array, times: LayerTime) -> tuple[Array, Array]:
    """Return the seconds of one micro-batch on the slowest pipeline rank, and in all stages together."""
    all_stages = all_layers_seconds + times.head + times.embed
    per_layer = all_layers_seconds / shape.layers
    full_layers, last_layers = stage_layers(shape, layout, (layout.slowest_layers, layout.slowest_head_layers))
    stage = np.maximum(full_layers * per_layer, last_layers * per_layer + times.head)
    return np.where(layout.pipeline > 1, stage, all_stages), all_stages


def _stall_seconds(machine: Machine, layout: Layouts, k: Constants, memory_share: Array) -> Array:
    """Return the seconds lost at stage boundaries because the network is congested or device memory is nearly full.

    A micro-batch loses time at two boundaries at most. When memory is nearly full (`ALLOCATOR_LIMIT`), the allocator frees its cache and
    allocates again for each activation that does not fit.
    """
    boundaries = np.minimum(2.0, layout.pipeline - 1)
    memory_probability = 1 / (1 + (ALLOCATOR_LIMIT / np.maximum(memory_share, 1e-3)) ** 40)
    probability = 1 - (1 - congestion(machine, layout, k)) * (1 - memory_probability)
    return probability * k.stall_s * boundaries * layout.micro_batches


@dataclass(frozen=True)
class _Traffic:
    """Seconds of gathers, or of reductions, over all layers of the model."""

    each: Array
    """Seconds for each micro-batch."""
    once: Array
    """Seconds once per step."""
    tax: Array
    """Seconds by which compute becomes slower for each second in which it overlaps with these collectives."""


def _weights_traffic(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, backward: Array
) -> tuple[_Traffic, _Traffic]:
    """Return the gathers and the reduce-scatters of fully sharded weights.

    Where copy engines gather weights, NCCL kernels still gather the experts if they are on several expert ranks.
    """
    tensor_ranks = layout.tensor
    group = rank_group(machine, k, layout.shards, layout.shard_step)
    # For other stacks the fitted constant `passes` includes the time of gathers of embedding and head.
    end_elements = k.own_engine * shape.end_params
    block_elements = shape.inner_dense_params / tensor_ranks
    by_copy_engine = np.asarray(layout.weights_by_copy_engine) > 0
    size = block_elements * layout.gathered_bytes + end_elements / tensor_ranks * COMPUTE_BYTES
    gathered = _gather_seconds(group, machine, k, size, shape.layers, by_copy_engine)
    by_kernels = gather(
        group, k, block_elements * COMPUTE_BYTES + end_elements / tensor_ranks * COMPUTE_BYTES, shape.layers
    )
    expert_ranks = np.maximum(layout.expert, 1.0)
    experts = rank_group(machine, k, layout.expert_shard, expert_ranks)
    size = shape.inner_expert_params / expert_ranks * COMPUTE_BYTES
    gathered = gathered + _gather_seconds(
        experts, machine, k, size, shape.moe_layers, by_copy_engine & (expert_ranks <= 1)
    )
    by_kernels = by_kernels + gather(experts, k, size, shape.moe_layers)
    scatter = by_kernels * (k.scatter_bytes / COMPUTE_BYTES) * shape.trained
    scatter = scatter + _contention_seconds(group, layout, k, scatter, backward)
    gathers, reductions = (count / layout.micro_batches for count in weight_collectives(layout))
    gathers = np.where(layout.gather_once > 0, 0.0, gathers)
    # With a single micro-batch in a pipeline, reductions happen once per step, as with `reduce_once`.
    once = np.where((layout.pipeline > 1) & (layout.micro_batches <= 1), 1.0, np.asarray(layout.reduce_once) > 0)
    reductions = (1.0 - once) * reductions
    sharded = layout.zero >= 3
    kernel_tax = np.where((group.domains > 1) & (k.own_engine > 0), k.net_tax, k.overlap_tax)
    copy_tax = np.where(by_copy_engine & (expert_ranks <= 1), k.overlap_tax * k.copy_tax, kernel_tax)
    return (
        _Traffic(
            np.where(sharded, gathers * gathered, 0.0), np.where(sharded, layout.gather_once * gathered, 0.0), copy_tax
        ),
        _Traffic(np.where(sharded, reductions * scatter, 0.0), np.where(sharded, once * scatter, 0.0), kernel_tax),
    )


def _gather_seconds(
    group: CollectiveGroup, machine: Machine, k: Constants, size: Array, messages: Array, by_copy_engine: Array
) -> Array:
    """Return the seconds to gather `size` bytes, by copy engines where `by_copy_engine` is true, and by NCCL kernels elsewhere."""
    by_kernels = gather(group, k, size, messages)
    if not np.any(by_copy_engine):
        return by_kernels
    return np.where(by_copy_engine, gather(copy_engine_group(group, machine, k), k, size, messages), by_kernels)


def _gradient_traffic(
    shape: Shape, machine: Machine, layout: Layouts, k: Constants, forward: Array, backward: Array
) -> Array:
    """Return the exposed seconds of the collectives that data parallelism needs once per step.

    These are the reductions of gradients over replicas. If only the optimizer is sharded (ZeRO-1 and 2), they also include the gathers of
    updated weights. `forward` and `backward` are the seconds of a micro-batch on the slowest stage.
    """
    tensor_ranks = layout.tensor
    data_ranks = layout.data * layout.context
    group = rank_group(machine, k, data_ranks, layout.data_step, congestion(machine, layout, k))
    dense, experts = stage_parameters(shape, layout, 1 / layout.pipeline)
    dense = dense * shape.trained
    experts = experts * shape.trained
    # With fp8 matmuls, each updated weight is gathered as one byte.
    bytes_per_weight = np.where(machine.matmul_format > 0, 1.0, COMPUTE_BYTES)
    messages = k.messages * shape.layers / layout.pipeline
    expert_ranks = np.maximum(layout.expert, 1.0)
    # The group of ranks that have the same experts.
    expert_replicas = rank_group(machine, k, np.maximum(1.0, data_ranks * tensor_ranks / expert_ranks), expert_ranks)
    expert_bytes = np.where(shape.experts > 0, experts, 0.0)
    hybrid = rank_group(machine, k, np.maximum(1.0, data_ranks / layout.shards), layout.replicate_step)
    summed = all_reduce(group, k, dense * k.reduce_bytes, messages)
    scattered = gather(group, k, dense * k.reduce_bytes, messages)
    replica_bytes = np.where(layout.replica_bytes > 0, layout.replica_bytes, k.reduce_bytes)
    replica_sums = all_reduce(hybrid, k, (dense / layout.shards + experts / layout.expert_shard) * replica_bytes)
    replica_sums = replica_sums + _contention_seconds(hybrid, layout, k, replica_sums, backward)
    summed = summed + _contention_seconds(group, layout, k, summed, backward)
    reduced = np.where(layout.zero == 0, summed, scattered) + gather(
        expert_replicas, k, expert_bytes * k.reduce_bytes, messages
    )
    reduced = np.where(layout.zero >= 3, replica_sums, reduced)
    # The host time of a layer's all-reduce over the data ranks, which is two rings: one reduces, one gathers. `ring_us` is the host time of
    # all ten `SEQUENCE_COLLECTIVES` of a layer per further rank, so one ring has a tenth. It counts only with sequence parallelism, as in
    # `compute.layer_times`.
    ring_host_seconds = 2 * (data_ranks - 1) * k.ring_us / SEQUENCE_COLLECTIVES * 1e-6 * shape.layers / layout.pipeline
    reduced = reduced + np.where(layout.zero == 0, layout.sequence * ring_host_seconds, 0.0)
    gathered = gather(group, k, dense * bytes_per_weight, messages) + gather(
        expert_replicas, k, expert_bytes * bytes_per_weight, messages
    )
    gathered = np.where((layout.zero >= 1) & (layout.zero < 3), gathered, 0.0)
    # An interleaved rank ends with p backwards of each virtual stage in turn (Narayanan et al. 2021, figure 4). So the reductions of one
    # virtual stage overlap with the last round of the others. Gathers of updated weights overlap only with the first forward.
    rounds = 1 + LAST_ROUND_OVERLAP * (1 - 1 / layout.virtual) * np.minimum(layout.micro_batches, layout.pipeline)
    rounds = np.where((layout.layered > 0) | (layout.vee > 0), 1.0, rounds)
    least_exposed = 1 - np.minimum(k.hide, 1.0)  # exposed share with unlimited compute beside it
    rounds = rounds * _overlapping_micro_batches(layout)
    exposed = np.maximum(reduced - k.hide * backward * rounds, least_exposed * reduced / layout.virtual)
    return (
        exposed
        + np.maximum(gathered - k.hide * forward, least_exposed * gathered)
        + _tied_sum_seconds(shape, machine, layout, k)
    )


def _contention_seconds(
    group: CollectiveGroup, layout: Layouts, k: Constants, seconds: Array, backward: Array
) -> Array:
    """Return the seconds by which a reduction across nodes takes longer because the backward runs at the same time (TCP only)."""
    return np.where(group.domains > 1, k.net_yield, 0.0) * np.minimum(
        seconds, backward * _overlapping_micro_batches(layout)
    )


def _overlapping_micro_batches(layout: Layouts) -> Array:
    """Return how many micro-batches' compute overlaps with a layer's collectives of a step: in layered order all, else one."""
    return np.where(layout.layered > 0, layout.micro_batches, 1.0)


def _tied_sum_seconds(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Return the seconds to all-reduce the gradient of a tied embedding between the first and the last pipeline rank, not overlapped.

    The constants of other stacks include these seconds already, so it is 0 there.
    """
    end_group = rank_group(machine, k, 2.0, layout.pipeline_step * np.maximum(1.0, layout.pipeline - 1))
    elements = shape.table_params / layout.tensor / np.where(layout.zero >= 3, layout.shards, 1.0)
    on_two_ranks = (layout.pipeline > 1) & (layout.vee == 0)
    return np.where(
        on_two_ranks,
        embedding_at_both_ends(shape)
        * (1 - shape.frozen)
        * k.own_engine
        * all_reduce(end_group, k, elements * k.reduce_bytes),
        0.0,
    )


def _boundary_seconds(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Return the seconds to send the activations of one micro-batch from a stage to the next."""
    crosses_domains = layout.pipeline_step >= machine.domain
    size = layout.micro_batch * layout.seq / layout.context / layout.tensor * shape.hidden * COMPUTE_BYTES
    return k.pipe_us * 1e-6 + size / np.where(crosses_domains, port_rate(machine, k), link_rate(machine, k))


def owned_params(shape: Shape, layout: Layouts) -> Array:
    """Return how many parameters the optimizer of one rank updates."""
    dense, experts = stage_parameters(shape, layout, 1 / layout.pipeline)
    return shape.trained * shard_parameters(layout, dense, experts, layout.zero >= 1)


def optimizer_seconds(shape: Shape, machine: Machine, layout: Layouts, k: Constants, forward: Array) -> Array:
    """Return the seconds of the optimizer's update; with offload, only those that the first forward does not hide.

    `forward` is the seconds of a micro-batch's forward over all layers.
    """
    owned = owned_params(shape, layout)
    seconds = update_seconds(layout, machine, k, owned)
    # An fp8 gather needs scales from all weights, so the whole update ends before the first gather, and no forward overlaps with it.
    beside = np.where(layout.gathered_bytes < COMPUTE_BYTES, 0.0, _overlapping_micro_batches(layout) / layout.pipeline)
    # The activations of the first forward are copied over the same link, so their seconds hide nothing.
    beside = beside * np.maximum(0.0, forward - activation_copies(shape, machine, layout))
    units = shape.layers / layout.pipeline + 1
    compute = 3 * forward * layout.micro_batches / layout.pipeline
    offloaded = host_optimizer(
        machine, owned, layout.state_bytes, seconds, beside, units, layout.staging, np.maximum(beside, compute)
    )
    seconds = np.where(layout.offload > 0, offloaded, seconds)
    seconds = seconds + matrix_seconds(layout, machine, k, shape.layers / layout.pipeline)
    return seconds + k.step_layer_us * 1e-6 * shape.layers / layout.pipeline
