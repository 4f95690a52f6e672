"""Rates of the devices and links on which a step runs, as numbers or as arrays with one element per case."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.spec.chips import Chip
from meshwright.workload.arrays import Array

TENSORWISE = 1.0
"""`Machine.matmul_format` of 8-bit matmuls with one scale per tensor."""
BLOCKWISE = 2.0
"""`Machine.matmul_format` of 8-bit matmuls with one scale per block."""
FOUR_BIT = 3.0
"""`Machine.matmul_format` of 4-bit matmuls."""
ROWWISE = 4.0
"""`Machine.matmul_format` of fp8 matmuls with one scale per row."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Identical devices and their links.

    Peaks are in FLOP/s; bandwidths are in bytes/s, of one device and in one direction.
    """

    peak: Array
    """Peak of matmuls in the number format in which the plan computes linear layers."""
    half_peak: Array
    """Peak of attention and head, which compute in bf16 or fp16."""
    matmul_format: Array
    """Format of matmuls: 0 for bf16 or wider, else `TENSORWISE`, `BLOCKWISE`, `FOUR_BIT` or `ROWWISE`."""
    hbm: Array
    """Bandwidth of a device's own memory."""
    memory: Array
    """Memory of a device in bytes."""
    link: Array
    """Bandwidth from a device to its neighbours in the same fast domain."""
    nic: Array
    """Bandwidth of a device's share of the network ports of its node."""
    domain: Array
    """Number of devices that fast links (NVLink) connect."""
    per_node: Array
    """Number of devices in a node."""
    host: Array = 25e9
    """Bandwidth between a device and host memory, while no other device of the node copies."""
    oversubscribed: Array = 1.0
    """Factor by which the network's bandwidth above a pod is smaller than the sum of the pod's ports.

    It is 1 for a full-bandwidth network.
    """
    pod: Array = np.inf
    """Number of devices below the oversubscribed level of the network."""
    expert_peak: Array = 0.0
    """Peak of the matmuls of routed experts if they have another format than the other matmuls; otherwise 0."""
    expert_format: Array = 0.0
    """Format of the matmuls of routed experts, with the values of `matmul_format`.

    It counts where `expert_peak` is not 0.
    """
    wide_gradients: Array = 1.0
    """1 if this program's engine computes the weight gradients of experts in bf16 while other matmuls are in fp8."""
    sustained: Array = Chip.sustained
    """Largest share of the peak that matmuls sustain (`spec.chips.Chip.sustained`)."""
    multiprocessors: Array = 0.0
    """Number of multiprocessors, each of which computes one tile of a matmul at a time; 0 if unknown or irrelevant."""


def expert_matmuls(machine: Machine) -> Machine:
    """Return the machine with the peak and the format of routed experts as `peak` and `matmul_format`.

    Where `expert_peak` is 0, the experts have the format of the other matmuls, so nothing changes.
    """
    own = np.asarray(machine.expert_peak) > 0
    return replace(
        machine,
        peak=np.where(own, machine.expert_peak, machine.peak),
        matmul_format=np.where(own, machine.expert_format, machine.matmul_format),
    )
