"""Seconds inside the layers: their compute, and the exposed communication of tensor, context and expert ranks.

These seconds depend neither on the sharding of weights nor on the schedule, except on whether there is a pipeline.
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
"""Share of the messages of ring attention that attention does not hide: a guess."""
PAIRED_SHARE = 3 / 4
"""Share of the token exchanges that overlap with matmuls, if two micro-batches pass through each layer together.

Two micro-batches need four exchanges in a layer's forward: dispatch and combine for each. Three of them overlap with matmuls of the other
micro-batch. The last one overlaps only with the addition of a token's rows (`parallel.paired_blocks`). The backward is the same.
"""
COUNT_SYNC_US = 50.0
"""Microseconds that a layer's device waits until the host has the row counts of its experts, in addition to their all-to-all.

The counts are copied to the host, the host thread wakes up, and launches the first kernels. A guess: a launch takes 5 to 10 µs on the
host of an H200.
"""


@dataclass(frozen=True)
class LayerExposure:
    """Seconds in which compute waits inside the layers, of one micro-batch over all layers."""

    tensor: Array
    """Waits for exchanges between tensor ranks."""
    context: Array
    """Waits for messages between context ranks."""
    expert: Array
    """Waits for dispatch and combine between expert ranks."""
    host: Array
    """Waits until the host has launched the kernels."""


def layer_exposure(shape: Shape, machine: Machine, layout: Layouts, k: Constants, times: LayerTime) -> LayerExposure:
    """Return the exposed communication and host time inside the layers; `times` is their device and host time.

    A loss with further forwards (`Layouts.further_forwards`) repeats the exchanges of a forward. Of the tensor and expert exchanges half
    belong to the forward, so one further forward multiplies their time by 1.5.
    """
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
    """Compute seconds and waits of one micro-batch in all layers. They do not depend on the sharding of weights or the schedule."""

    times: LayerTime
    exposure: LayerExposure


def layer_costs(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> LayerCosts:
    """Return compute seconds and waits of the layers under each layout."""
    times = layer_times(shape, machine, layout, k)
    return LayerCosts(times, layer_exposure(shape, machine, layout, k, times))


def exposed_seconds(traffic: Array, compute: Array, tax: Array) -> Array:
    """Return the seconds that communication of `traffic` seconds adds to `compute` seconds of compute that overlaps with it.

    It adds the part that is longer than the compute. In addition, each overlapped second slows compute down by `tax` seconds. For example,
    3 seconds of traffic beside 2 seconds of compute with a tax of 0.1 add 1 + 0.2 seconds.
    """
    return np.maximum(0.0, traffic - compute) + np.minimum(traffic, compute) * tax


def _smooth_maximum(first: Array, second: Array) -> Array:
    """Return a smooth maximum (a⁴ + b⁴)^(1/4). If device and host take about equally long, each sometimes waits for the other."""
    high = np.maximum(first, second)
    low = np.minimum(first, second)
    ratio = low / np.maximum(high, 1e-12)
    square = ratio * ratio
    return high * np.sqrt(np.sqrt(1 + square * square))


def _tensor_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> Array:
    """Return the exposed seconds of exchanges between tensor ranks, of one micro-batch over all layers.

    An all-gather and a reduce-scatter together take as long as an all-reduce. The backward also gathers a second time for the weight
    gradients. That gather is not counted, because the exposed share was fitted without it and so includes its time. If NCCL kernels
    gather several sequences, their tokens are reordered afterwards.
    """
    step = step_shape(shape, layout)
    _, sums = tensor_messages(shape, layout, step)
    group = rank_group(machine, k, layout.tensor, layout.tensor_step, congestion(machine, layout, k))
    exchange_seconds = all_reduce(group, k, sums.bytes)
    # `token_passes` are the bytes of a layer's four exchanges, so one exchange has a quarter. `slow` lowers the stack's memory bandwidth.
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
    """Return the exposed seconds of messages between context ranks over all layers: (in the forward, in the backward).

    Attention hides half of a ring's messages (`RING_EXPOSED`). For published stacks two things differ, because their constants were
    fitted so: recompute repeats no messages, and the ring of gradients has as many bf16 messages as the ring of keys and values. This
    program sends gradients in fp32, with one more message to the rank that owns the keys and values.
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
    """Return `layout`, for other stacks than this program's without recomputation.

    Recomputation repeats messages of the forward. The constants of other stacks were fitted without these repeats.
    """
    return replace(layout, recompute=np.where(k.own_engine > 0, layout.recompute, 0.0))


def _expert_traffic(shape: Shape, machine: Machine, layout: Layouts, k: Constants, compute: Array) -> Array:
    """Return the exposed seconds of dispatch and combine of one micro-batch, forward and backward.

    In this program's engine each forward first exchanges row counts, for which the host waits. If another micro-batch computes during the
    exchange, `compute` seconds can hide it.
    """
    if not np.any(shape.moe_layers):
        return np.zeros_like(compute)
    counted = _without_repeats_of_other_stacks(layout, k)
    message = expert_message(shape, counted, step_shape(shape, layout), layout.exchanged_bytes)
    group = rank_group(machine, k, layout.expert, 1.0)
    sent_once = np.where(np.asarray(layout.one_copy) > 0, _distinct_domains(group.domains, shape.top_k, layout), 1.0)
    exchange = message.count * all_to_all(group, k, machine, message.bytes, sent_once) * layout.imbalance
    exchange = exchange * layout.exchanged_share
    # Half of the exchanges are dispatches: one in each forward (with those that recompute repeats), and one in the backward of each layer.
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
    """Return the seconds in which the device idles while the host launches the matmuls of local experts, after it has their sizes."""
    local = shape.experts / np.maximum(layout.expert, 1.0)
    return shape.moe_layers * local * k.moe_us * 1e-6 * layout.host_sizes


def _distinct_domains(domains: Array, top_k: Array, layout: Layouts) -> Array:
    """Return the share of a token's copies that must cross domains if each other domain gets at most one copy of the token.

    The numerator is the expected number of other domains that have one of the token's `top_k` experts, where experts are random. The
    router may limit this number. The denominator is the number of copies to other domains without this rule.
    """
    domains = np.maximum(domains, 1.0)
    outside = 1 - 1 / domains
    distinct = (domains - 1) * (1 - outside**top_k)
    limit = np.where(np.asarray(layout.domains_per_token) > 0, layout.domains_per_token * outside, np.inf)
    return np.where(domains > 1, np.minimum(distinct, limit) / np.maximum(top_k * outside, 1e-9), 1.0)
