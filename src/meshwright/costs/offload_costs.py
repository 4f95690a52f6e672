"""Costs of host memory: copies of activations that other layers' compute does not hide, and the offloaded optimizer.

A layer's activations are copied to the host after its forward and back before its backward. Two layers of one micro-batch stay on
the device. Copies to the host overlap with the forwards of all layers, copies back with their backwards
(`parallel.timetable`): only the excess is exposed. `workload.activations.mean_saved_elements` says what is copied.
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
HOST_SHARE_DEVICES = 8
"""Share of its host link that a device reaches while all devices of the node copy, and the number of devices of that node.

Measured on 8×H200: 19.7 and 20.5 of 55 GB/s, limited by host memory. Fewer devices reach more, up to the full link: a guess.
"""

GRADIENT_BYTES = 4.0
"""Bytes of a gradient that is summed over micro-batches (fp32) where the closed form does not know the plan's."""

UNITS_GATHERED = 2
"""Units whose weights are updated before the first of them computes: it and the next one, which is gathered meanwhile."""

BOTH_WAYS = 12.9 / 55
BOTH_WAYS_ALONE = 48.9 / 55
"""Share of the host link in each direction while copies run in both directions: of eight devices, and of a single device.

Measured on H200: 12.9 of 55 GB/s each way when eight copy. Alone 43.5 GB/s on a host whose link has 50 one way; 46.7, 49.0, 49.6 and
50.3 GB/s in the updates of four offloaded runs on others (2026-11-22-offload-H200.json, 2026-11-27-offload-H200.json).
"""

CHUNK_LAUNCH_US = 455.0
BLOCK_LAUNCH_US = 3_100.0
"""Microseconds of the host to launch a chunk's copies and update, and a block's forward and the rest of its updates.

In a block several tensors end inside chunks, and each of them is updated by a kernel of its own. Set by hand on two runs of Llama 3 with
bf16 moments whose copies are shorter, on H200s: 3B (0.52 s) and 8B (1.04 s).
"""


def host_share(devices: Array) -> Array:
    """Share of its host link that a device reaches while `devices` of its node copy."""
    return np.clip(HOST_SHARE * HOST_SHARE_DEVICES / np.maximum(1.0, devices), HOST_SHARE, 1.0)


def host_rate(machine: Machine) -> Array:
    """Bytes/s of a device to or from host memory, in one direction, while all devices of the node copy."""
    return machine.host * host_share(machine.per_node)


def rate_both_ways(machine: Machine) -> Array:
    """Bytes/s of a device in each direction while all devices of the node copy in both directions."""
    devices = np.maximum(1.0, machine.per_node)
    return machine.host * np.clip(BOTH_WAYS * HOST_SHARE_DEVICES / devices, BOTH_WAYS, BOTH_WAYS_ALONE)


def host_memory_bytes(shape: Shape, layout: Layouts, owned: Array) -> Array:
    """Bytes of host memory per device: offloaded activations in flight, and state and gradient sums of its `owned` parameters."""
    activations = shape.layers / layout.pipeline * layout.in_flight * offloaded_bytes(shape, layout)
    sums = _copies_sums(layout) * (layout.micro_batches > 1) * owned * GRADIENT_BYTES
    return layout.offload_activations * activations + layout.offload * owned * layout.state_bytes + sums


def activation_copies(shape: Shape, machine: Machine, layout: Layouts) -> Array:
    """Seconds of one micro-batch's copies in one direction, of the layout's share of offloaded layers."""
    return layout.offload_activations * shape.layers * offloaded_bytes(shape, layout) / host_rate(machine)


def exposed_copies(shape: Shape, machine: Machine, layout: Layouts, forward: Array, backward: Array) -> Array:
    """Exposed seconds of one micro-batch's copies if every layer were offloaded.

    `forward` and `backward` are the compute seconds over all layers. The exposed seconds are computed for the layout's share of
    offloaded layers and divided by that share.
    """
    offloaded = np.asarray(layout.offload_activations)
    exposed = exposed_copy_seconds(activation_copies(shape, machine, layout), forward, backward)
    return np.where(offloaded > 0, sum(exposed) / np.maximum(offloaded, 1e-9), 0.0)


def exposed_copy_seconds(copied: Array, forward: Array, backward: Array) -> tuple[Array, Array]:
    """Exposed seconds of copies that take `copied` seconds in each direction: beside the forwards, and beside the backwards."""
    return np.maximum(0.0, copied - forward), np.maximum(0.0, copied - backward)


def exposed_sums(machine: Machine, layout: Layouts, owned: Array, backward: Array) -> Array:
    """Exposed seconds over all layers of one micro-batch's copies of gradient sums to host memory and back.

    A rank has `owned` parameters; `backward` has the seconds over all layers.
    """
    copied = owned * layout.pipeline * GRADIENT_BYTES / rate_both_ways(machine)
    return _copies_sums(layout) * exposed_sum_copies(copied, backward, layout.micro_batches)


def _copies_sums(layout: Layouts) -> Array:
    """1 where gradient sums are in host memory: of shards that are reduced after each micro-batch."""
    return layout.sums_on_host * (1 - np.asarray(layout.reduce_once)) * (1 - np.asarray(layout.layered))


def exposed_sum_copies(copied: Array, backward: Array, micro_batches: Array) -> Array:
    """Mean exposed seconds of a backward beside which sums of gradients are copied, `copied` seconds in each direction.

    The first backward has no copies to the device, the last none to the host.
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
    """Seconds by which an optimizer with the state of `owned` parameters in host memory makes a step longer.

    The device copies `state_bytes` per parameter in and out, in both directions at once, beside the `forward` seconds of the rank's
    `units`: equal ones, in their order. All updates take `sweep` seconds of compute. `staging` bytes are fetched before the update; these
    copies and those to the host have the whole step, of `compute` seconds.
    """
    copies = owned * state_bytes / rate_both_ways(machine)
    fetched_before = staging / rate_both_ways(machine)
    hidden = forward * (1 - np.minimum(UNITS_GATHERED, units) / units)
    exposed = np.maximum(copies - fetched_before - hidden, copies - compute)
    return np.maximum(exposed, sweep)


def exposed_updates(updates: Sequence[float], forwards: Sequence[float]) -> float:
    """Seconds by which updates delay the first forward. By unit, seconds of its copies and of its forward.

    Updates follow one another. A unit's forward begins after the updates of the units that are gathered then, and after earlier forwards.
    """
    updated = forwarded = 0.0
    ends = list(accumulate(updates))
    for index, forward in enumerate(forwards):
        updated = ends[min(index + UNITS_GATHERED, len(ends)) - 1]
        forwarded = max(forwarded, updated) + forward
    return forwarded - sum(forwards)
