"""Seconds that offload to host memory adds to a step: for activations, gradient sums and the optimizer.

The activations of a layer are copied to the host after the layer's forward, and back before its backward. Those of two layers of one
micro-batch stay on the device. The copies to the host overlap with the forwards of all layers, and the copies back with their backwards
(`parallel.timetable`). Only the part of the copies that takes longer is exposed. `workload.activations.mean_saved_elements` says what is
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from meshwright.costs.device_rates import Machine
from meshwright.workload.activations import offloaded_bytes
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape

HOST_SHARE = 20 / 55
"""Share of its host link that each device reaches while `HOST_SHARE_DEVICES` devices copy.

Measured on 8×H200: 19.7 and 20.5 of 55 GB/s, limited by host memory. Fewer devices reach more, up to the full link: a guess.
"""
HOST_SHARE_DEVICES = 8
"""Number of copying devices in the measurements of `HOST_SHARE` and `BOTH_WAYS`."""

GRADIENT_BYTES = 4.0
"""Bytes of a gradient that is summed over micro-batches; the closed form assumes fp32, because it does not know the plan's format."""

UNITS_GATHERED = 2
"""Units whose weights must be updated before a unit's forward: the unit itself, and the next unit, which is gathered meanwhile."""

BOTH_WAYS = 12.9 / 55
"""Share of the host link that each of eight devices reaches in each direction, while copies run in both directions.

Measured on H200: 12.9 of 55 GB/s each way.
"""
BOTH_WAYS_ALONE = 48.9 / 55
"""As `BOTH_WAYS`, for a single copying device.

Measured on H200: 43.5 GB/s on a host whose link has 50 one way; 46.7, 49.0, 49.6 and 50.3 GB/s in the updates of four offloaded runs on
other hosts (2026-11-22-offload-H200.json, 2026-11-27-offload-H200.json).
"""

CHUNK_LAUNCH_US = 455.0
"""Host microseconds to launch the copies and the update of one chunk of optimizer state."""
BLOCK_LAUNCH_US = 3_100.0
"""Host microseconds to launch a block's forward and those of its updates that `CHUNK_LAUNCH_US` does not include.

In a block several tensors end inside a chunk, and each of them needs an update kernel of its own. Both constants were set by hand on two
runs of Llama 3 on H200s, with bf16 moments and so shorter copies: 3B (0.52 s) and 8B (1.04 s).
"""


def host_share(devices: Array) -> Array:
    """Return the share of its host link that a device reaches while `devices` devices of its node copy."""
    return np.clip(HOST_SHARE * HOST_SHARE_DEVICES / np.maximum(1.0, devices), HOST_SHARE, 1.0)


def host_rate(machine: Machine) -> Array:
    """Return the bytes/s of a device to or from host memory while all devices of the node copy in that direction."""
    return machine.host * host_share(machine.per_node)


def rate_both_ways(machine: Machine) -> Array:
    """Return the bytes/s of a device in each direction while all devices of the node copy in both directions."""
    devices = np.maximum(1.0, machine.per_node)
    return machine.host * np.clip(BOTH_WAYS * HOST_SHARE_DEVICES / devices, BOTH_WAYS, BOTH_WAYS_ALONE)


def host_memory_bytes(shape: Shape, layout: Layouts, owned: Array) -> Array:
    """Return the bytes of host memory per device.

    They are offloaded activations of all micro-batches in flight, and optimizer state and gradient sums of its `owned` parameters.
    """
    activations = shape.layers / layout.pipeline * layout.in_flight * offloaded_bytes(shape, layout)
    sums = _copies_sums(layout) * (layout.micro_batches > 1) * owned * GRADIENT_BYTES
    return layout.offload_activations * activations + layout.offload * owned * layout.state_bytes + sums


def activation_copies(shape: Shape, machine: Machine, layout: Layouts) -> Array:
    """Return the seconds to copy the activations of one micro-batch in one direction, for the layers that the layout offloads."""
    return layout.offload_activations * shape.layers * offloaded_bytes(shape, layout) / host_rate(machine)


def exposed_copies(shape: Shape, machine: Machine, layout: Layouts, forward: Array, backward: Array) -> Array:
    """Return the exposed seconds of one micro-batch's copies, scaled as if every layer were offloaded.

    `forward` and `backward` are the compute seconds over all layers. If the layout offloads half of the layers and 1 second is exposed,
    the result is 2 seconds.
    """
    offloaded = np.asarray(layout.offload_activations)
    exposed = exposed_copy_seconds(activation_copies(shape, machine, layout), forward, backward)
    return np.where(offloaded > 0, sum(exposed) / np.maximum(offloaded, 1e-9), 0.0)


def exposed_copy_seconds(copied: Array, forward: Array, backward: Array) -> tuple[Array, Array]:
    """Return the exposed seconds of copies to the host (during the forwards) and of copies back (during the backwards).

    The copies take `copied` seconds in each direction.
    """
    return np.maximum(0.0, copied - forward), np.maximum(0.0, copied - backward)


def exposed_sums(machine: Machine, layout: Layouts, owned: Array, backward: Array) -> Array:
    """Return the exposed seconds per micro-batch, over all layers, of copies of gradient sums to host memory and back.

    `owned` is the number of parameters whose gradients a rank sums, `backward` the seconds of the backward over all layers.
    """
    copied = owned * layout.pipeline * GRADIENT_BYTES / rate_both_ways(machine)
    return _copies_sums(layout) * exposed_sum_copies(copied, backward, layout.micro_batches)


def _copies_sums(layout: Layouts) -> Array:
    """Return 1 for layouts with gradient sums in host memory. Only sums of shards that are reduced after each micro-batch can be there."""
    return layout.sums_on_host * (1 - np.asarray(layout.reduce_once)) * (1 - np.asarray(layout.layered))


def exposed_sum_copies(copied: Array, backward: Array, micro_batches: Array) -> Array:
    """Return the exposed seconds per backward, as a mean over micro-batches, of copies that take `copied` seconds in each direction.

    The first backward needs no copies to the device, and the last one no copies to the host. So n micro-batches have n - 1 copies in each
    direction.
    """
    repeated = (micro_batches - 1) / np.maximum(1.0, micro_batches)
    return np.maximum(0.0, copied - backward) * repeated


def host_optimizer(
    machine: Machine,
    owned: Array,
    state_bytes: Array,
    sweep: Array,
    forward: Array,
    units: Array,
    staging: Array = 0.0,
    compute: Array = np.inf,
) -> Array:
    """Return the seconds by which an optimizer whose state is in host memory makes a step longer.

    `owned`: number of parameters with state on the host. `state_bytes`: bytes per parameter that are copied to the device and back, in
    both directions at the same time. `sweep`: compute seconds of all updates. `forward`: seconds of the forward of the rank's `units`
    equal units; copies for later units overlap with the forward of earlier units. `staging`: bytes that are fetched before the update.
    These can be copied during the whole step, which has `compute` seconds.
    """
    copies = owned * state_bytes / rate_both_ways(machine)
    fetched_before = staging / rate_both_ways(machine)
    hidden = forward * (1 - np.minimum(UNITS_GATHERED, units) / units)
    exposed = np.maximum(copies - fetched_before - hidden, copies - compute)
    return np.maximum(exposed, sweep)


def exposed_updates(updates: Sequence[float], forwards: Sequence[float]) -> float:
    """Return the seconds by which optimizer updates delay the first forward of a step.

    `updates` has the seconds of each unit's update (its copies or launches), `forwards` those of each unit's forward. The updates run one
    after another. The forward of a unit begins when the forwards before it have ended, and when the unit and the next unit are updated.

    Three units with updates of 2 seconds and forwards of 1 second: the forwards begin after 4, 6 and 7 seconds, so all ends after 8
    seconds instead of 3. The delay is 5 seconds.
    """
    updated = forwarded = 0.0
    ends = list(accumulate(updates))
    for index, forward in enumerate(forwards):
        updated = ends[min(index + UNITS_GATHERED, len(ends)) - 1]
        forwarded = max(forwarded, updated) + forward
    return forwarded - sum(forwards)
