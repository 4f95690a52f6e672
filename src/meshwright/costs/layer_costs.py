"""Seconds inside the layers: device time, and exposed communication of tensor, context and expert ranks.

They do not depend on how weights are sharded, nor on the schedule, except for whether there is a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.collective_costs import all_reduce, all_to_all, congestion, gather, rank_group
from meshwright.costs.compute import LayerTime, layer_times
from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.workload.arrays import Array
from meshwright.workload.layer_messages import (
    context_messages,
    expert_message,
    latent_messages,
    norm_message,
    tensor_messages,
)
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape
from meshwright.workload.step_shape import step_shape

RING_EXPOSED = 0.5
"""Share of a context ring's messages that attention does not hide: a guess."""
PAIRED_SHARE = 3 / 4
"""Share of the exchanges of two micro-batches together that overlap with matmuls of the other one.

Of the four in a forward, and in a backward, the last overlaps only with the sum of a token's rows (`parallel.paired_blocks`).
"""
COUNT_SYNC_US = 50.0
"""Host synchronisation of a layer for the row counts of its experts, beside their all-to-all.

A copy to the host, the host thread's wake-up, and the first launches after it. A guess: a launch takes 5 to 10 µs on the
host of an H200.
"""


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
    passes = 1 + layout.further_forwards / 2
    tensor = _tensor_traffic(shape, machine, layout, k) * passes
    context_forward, context_backward = context_traffic(shape, machine, layout, k)
    context = context_forward * (1 + layout.further_forwards) + context_backward
    expert = _expert_traffic(shape, machine, layout, k, times.forward + times.backward) + _expert_launches(
        shape, layout, k
    )
    expert = expert * passes
    device_seconds = times.forward + times.backward + tensor + context + expert
    return LayerExposure(tensor, context, expert, _smooth_maximum(device_seconds, times.host) - device_seconds)


@dataclass(frozen=True)
class LayerCosts:
    """Seconds of one micro-batch in all layers, which do not depend on the sharding of weights nor on the schedule."""

    times: LayerTime
    exposure: LayerExposure


def layer_costs(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> LayerCosts:
    """Device time and exposed time of the layers under each layout."""
    times = layer_times(shape, machine, layout, k)
    return LayerCosts(times, layer_exposure(shape, machine, layout, k, times))


def exposed_seconds(traffic: Array, compute: Array, tax: Array) -> Array:
    """Exposed seconds of `traffic` beside `compute` seconds: the excess, plus the slow-down of compute by the overlapped part."""
    return np.maximum(0.0, traffic - compute) + np.minimum(traffic, compute) * tax


def _smooth_maximum(first: Array, second: Array) -> Array:
    """A smooth maximum: if device and host take about equally long, each sometimes waits for the other."""
    high = np.maximum(first, second)
    low = np.minimum(first, second)
    ratio = low / np.maximum(high, 1e-12)
    square = ratio * ratio
    return high * np.sqrt(np.sqrt(1 + square * square))


def _tensor_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Exposed seconds of tensor-parallel exchanges: a gather and a reduce-scatter take as long as an all-reduce.

    The backward's second gather, for weight gradients, is not counted: the exposed share was fitted without it and so includes its
    time. After a gather by kernels, tokens of several sequences are reordered.
    """
    step = step_shape(shape, layout)
    _, sums = tensor_messages(shape, layout, step)
    group = rank_group(machine, k, layout.tensor, layout.tensor_step, congestion(machine, layout, k))
    exchange_seconds = all_reduce(group, k, sums.bytes)
    # `token_passes` is of a layer's four exchanges; `slow` lowers the memory bandwidth that the stack reaches.
    reordered = step.tokens * shape.hidden * k.token_passes / (machine.hbm * k.hbm / k.slow) / 4
    reordered = np.where((layout.tensor > 1) & (np.asarray(layout.micro_batch) > 1), reordered, 0.0)
    by_kernels = exchange_seconds * k.tensor_exposed + reordered
    by_copy_engine = np.asarray(layout.tokens_by_copy_engine) > 0
    relative = np.where(layout.tensor > 2, k.copy_engine_tokens_many_ranks, k.copy_engine_tokens)
    seconds = sums.count * np.where(by_copy_engine, exchange_seconds * k.tensor_exposed * relative, by_kernels)
    if np.any(shape.summed_norms):
        squares = norm_message(shape, layout, step)
        seconds = seconds + squares.count * all_reduce(group, k, squares.bytes)  # attention waits for them
    if not np.any(shape.narrow_gathers):
        return seconds
    _, narrow = latent_messages(shape, layout, step)
    return seconds + narrow.count * all_reduce(group, k, narrow.bytes) * k.tensor_exposed


def context_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> tuple[Array, Array]:
    """Exposed seconds of context ranks' messages over all layers: in the forward, and in the backward.

    Attention hides half of a ring's messages. For published stacks the formula counts no messages that recompute repeats, and as many
    bf16 messages of gradients as of keys and values in the forward: without the last one, to the rank that owns them.
    """
    counted = _without_repeats_of_other_stacks(layout, k)
    heads, passes, sums = context_messages(shape, counted, step_shape(shape, counted))
    exchange_group = rank_group(machine, k, layout.ulysses, layout.ulysses_step)
    exchange = all_to_all(exchange_group, k, machine, heads.bytes)
    ring_steps = np.maximum(1.0, layout.ring - 1)
    message_seconds = (
        RING_EXPOSED
        * gather(rank_group(machine, k, layout.ring, layout.ring_step), k, passes.bytes * layout.ring)
        / ring_steps
    )
    summed = np.where(k.own_engine > 0, sums.bytes / passes.bytes * sums.count, passes.forward)
    forward = heads.forward * exchange + passes.forward * message_seconds
    return forward, heads.backward * exchange + (passes.backward + summed) * message_seconds


def _without_repeats_of_other_stacks(layout: Layouts, k: Constants) -> Layouts:
    """The layout for this program's engine, and without its recompute mode for other stacks.

    Recompute repeats messages of the forward. The constants of other stacks were fitted without these repeats.
    """
    return replace(layout, recompute=np.where(k.own_engine > 0, layout.recompute, 0.0))


def _expert_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants, compute: Array) -> Array:
    """Seconds of dispatch and combine, forward and backward.

    In this program's engine each forward first exchanges the row counts, which the host synchronises on. If another
    micro-batch computes during the exchange, `compute` hides it.
    """
    if not np.any(shape.moe_layers):
        return np.zeros_like(compute)
    counted = _without_repeats_of_other_stacks(layout, k)
    message = expert_message(shape, counted, step_shape(shape, layout), layout.exchanged_bytes)
    group = rank_group(machine, k, layout.expert, 1.0)
    sent_once = np.where(np.asarray(layout.one_copy) > 0, _distinct_domains(group.domains, shape.top_k, layout), 1.0)
    exchange = message.count * all_to_all(group, k, machine, message.bytes, sent_once) * layout.imbalance
    exchange = exchange * layout.exchanged_share
    # Half of the messages are dispatches: one for each forward, repeats by recompute included, and one for each layer's backward.
    forwards = message.count / 2 - shape.moe_layers
    exchanges = (layout.expert > 1) & (layout.exchanged_share > 0)
    count_seconds = k.own_engine * forwards * (all_to_all(group, k, machine, 0.0) + COUNT_SYNC_US * 1e-6) * exchanges
    paired = np.asarray(layout.paired) > 0
    hidden = np.where(paired, PAIRED_SHARE, np.asarray(layout.exchange_overlaps) > 0)
    tax = np.where(paired & (group.domains > 1), k.net_tax, k.overlap_tax)
    beside = exposed_seconds(hidden * exchange, compute, tax)
    return (
        np.where(hidden > 0, beside + (1 - hidden) * exchange, exchange * k.expert_exposed)
        + count_seconds
        + layout.copy_seconds
    )


def _expert_launches(shape: Shape, layout: Layouts, k: Constants) -> Array:
    """Device idle seconds while the host launches the matmuls of local experts, after it received their sizes."""
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
