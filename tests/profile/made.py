"""Makes a profile whose figures follow from known constants by the formulas of the cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from meshwright.costs.collective_costs import all_reduce, gather, rank_group
from meshwright.costs.compute import matmul_rate
from meshwright.costs.constants import Constants, constants
from meshwright.costs.device_rates import Machine
from meshwright.costs.machine_rates import machine_of
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.profile import (
    AttentionTime,
    CollectiveTime,
    HostLink,
    Interference,
    MachineProfile,
    MatmulTime,
    Operation,
)

NODES = ClusterSpec(gpu="H200", nodes=2, gpus_per_node=8, network=NetworkSpec(port_gb_per_s=12.5))
TRUE = {
    "gemm": 0.68,
    "gemm_low": 0.91,
    "narrow": 210.0,
    "attention": 0.57,
    "attention_wide": 0.85,
    "flex": 0.61,
    "flex_backward": 3.6,
    "flash": 0.8,
    "flash_wide": 0.7,
    "flash_backward": 3.1,
    "hbm": 0.83,
    "link": 0.71,
    "start_us": 11.0,
    "link_us": 3.0,
    "net": 0.4,
    "net_ring": 1.0,
    "net_us": 17.0,
    "overlap_tax": 0.22,
    "net_tax": 0.07,
    "net_sum": 1.4,
    "update": 33.0,
    "slow": 1.0,
}
"""Constants unlike the fitted ones, so that a constant that is not read from the profile is noticed."""
SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (2048, 4096, 512), (8192, 256, 4096), (512, 8192, 2048))
FORMATS: tuple[Literal["bf16", "fp8"], ...] = ("bf16", "fp8")
RINGS: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)


def number(value: object) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def true_constants() -> Constants:
    return replace(constants("hopper", "torchtitan"), **TRUE)


def made_profile() -> MachineProfile:
    """The profile of two nodes of 8 H200s with exactly the constants `TRUE`."""
    k, machine = true_constants(), machine_of(NODES)
    hbm = CHIPS["H200"].hbm * TRUE["hbm"]
    return MachineProfile(
        date="2026-01-02T03:04:05Z",
        gpu="H200",
        device="NVIDIA H200",
        devices=8,
        nodes=2,
        cores=96,
        memory_bytes=150 << 30,
        link_bytes_per_s=number(machine.link),
        port_bytes_per_s=number(machine.nic),
        versions={"torch": "2.11.0"},
        products=tuple(_matmul(shape, dtype, k) for shape in SHAPES for dtype in FORMATS),
        attention=tuple(
            _attention(8192, head, machine, window) for window in (None, 1024, 128) for head in (64, 128, 256)
        ),
        copy_bytes_per_s=hbm * 1.02,
        pass_bytes_per_s=hbm,
        adamw_parameters_per_s=hbm / TRUE["update"],
        launch_seconds=5e-6,
        collectives=tuple(_rings(k, machine)),
        host_links=(
            HostLink(devices=1, to_host=50e9, to_device=51e9),
            HostLink(devices=8, to_host=22e9, to_device=21e9),
        ),
        interference=(
            _beside("all_gather", 1, TRUE["overlap_tax"]),
            _beside("reduce_scatter", 2, TRUE["net_tax"]),
            _beside("to_host", 1, 0.4),
        ),
    )


def _matmul(shape: tuple[int, int, int], dtype: Literal["bf16", "fp8"], k: Constants) -> MatmulTime:
    m, inner, n = shape
    seconds = number(matmul_rate(machine_of(NODES, dtype), k).seconds(*map(float, shape)))
    return MatmulTime(format=dtype, m=m, k=inner, n=n, seconds=seconds, burst_seconds=seconds * 0.9)


def _attention(seq: int, head: int, machine: Machine, window: int | None) -> AttentionTime:
    """Causal attention: half of 4 × tokens × seq × width, and with a window the blocks of 128 scores that touch it.

    Small heads run slower; the backward takes 2.5 times the forward, another factor with a window.
    """
    tokens, heads = 16384, 32
    rate, backward = machine.half_peak * TRUE["attention"], 2.5
    if window is None:
        scores = seq / 2
        rate *= TRUE["attention_wide"] if head == 256 else 1.0
    else:
        blocks = [min(block, window // 128) + 1 for block in range(seq // 128)]
        scores = 128 * sum(blocks) / len(blocks) + 350  # each block of queries costs as much as 350 keys
        kernel = "flash" if head == 256 or window == 128 else "flex"
        rate *= TRUE[kernel] * (TRUE["flash_wide"] if head == 256 else 1.0)
        backward = TRUE[f"{kernel}_backward"]
    forward = 4 * tokens * scores * heads * head / rate * (1 + 32 / head)
    return AttentionTime(
        format="bf16",
        seq=seq,
        heads=heads,
        kv_heads=8,
        head_dim=head,
        tokens=tokens,
        window=window,
        forward_seconds=forward,
        backward_seconds=backward * forward,
    )


def _rings(k: Constants, machine: Machine) -> list[CollectiveTime]:
    times = []
    for ranks, stride in ((2, 1), (4, 1), (8, 1), (2, 8), (16, 1)):
        where = rank_group(machine, k, float(ranks), float(stride))
        for size in SIZES:
            seconds = number(gather(where, k, float(size)))
            nodes = int(number(where.domains))
            times += [CollectiveTime(op=op, ranks=ranks, nodes=nodes, bytes=size, seconds=seconds) for op in RINGS]
            summed = number(all_reduce(where, k, float(size)))
            times.append(CollectiveTime(op="all_reduce", ranks=ranks, nodes=nodes, bytes=size, seconds=summed))
            times.append(CollectiveTime(op="all_to_all", ranks=ranks, nodes=nodes, bytes=size, seconds=7 * seconds))
    return times


def _beside(op: Literal["all_gather", "reduce_scatter", "to_host"], nodes: int, tax: float) -> Interference:
    return Interference(
        op=op,
        ranks=8,
        nodes=nodes,
        bytes=1 << 28,
        compute_seconds=3e-3,
        other_seconds=2e-3,
        together_seconds=3e-3 + tax * 2e-3,
    )
