"""Rates of the devices and links that a step runs on, as numbers or arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.spec.chips import Chip
from meshwright.workload.arrays import Array

TENSORWISE = 1.0
BLOCKWISE = 2.0
FOUR_BIT = 3.0
ROWWISE = 4.0
"""`Machine.matmul_format` of fp8 matmuls with one scale per tensor, of those with a scale per block, of 4-bit matmuls,
and of fp8 matmuls with one scale per row; 0 is bf16 or wider."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Identical devices: peaks in FLOP/s, bandwidths in bytes/s of one device and direction."""

    peak: Array
    """Peak of matmuls in the format the plan computes in."""
    half_peak: Array
    """Peak in bf16 or fp16 (attention, head)."""
    matmul_format: Array
    """Format of matmuls: 0, `TENSORWISE`, `BLOCKWISE`, `FOUR_BIT` or `ROWWISE`."""
    hbm: Array
    memory: Array
    link: Array
    nic: Array
    domain: Array
    """Devices connected by fast links (NVLink)."""
    per_node: Array
    host: Array = 25e9
    """Bandwidth to host memory, one direction, while no other device of the node copies."""
    oversubscribed: Array = 1.0
    """Factor by which the bandwidth above a pod is smaller than the sum of its ports."""
    pod: Array = np.inf
    """Devices below the oversubscribed level."""
    expert_peak: Array = 0.0
    """Peak of the matmuls of routed experts, where their format differs from the other matmuls'; 0 where it does not.
    """
    expert_format: Array = 0.0
    """Their format, as `matmul_format`."""
    wide_gradients: Array = 1.0
    """1 where this program's engine computes weight gradients of experts in bf16 beside fp8 matmuls."""
    sustained: Array = Chip.sustained
    """Largest share of the peak that matmuls sustain (`spec.chips.Chip.sustained`)."""
    multiprocessors: Array = 0.0
    """Multiprocessors, each of which computes one tile of a matmul at a time; 0 if unknown or irrelevant."""


def expert_matmuls(machine: Machine) -> Machine:
    """The machine as the matmuls of routed experts see it."""
    own = np.asarray(machine.expert_peak) > 0
    return replace(
        machine,
        peak=np.where(own, machine.expert_peak, machine.peak),
        matmul_format=np.where(own, machine.expert_format, machine.matmul_format),
    )
