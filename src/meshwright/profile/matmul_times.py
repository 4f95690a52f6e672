"""Times matmuls by shape and dtype, on a busy and on an idle device.

A GPU at its power limit lowers its clocks after a second or two of large matmuls. So the rate that a training step has
is measured on a device that is kept busy; short benchmarks print the rate of a device that was idle. Inputs are normal
random numbers, because the power depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, Literal

import torch

from meshwright.profile.call_timing import TeamClock
from meshwright.profile.team import Team
from meshwright.spec.profile import MatmulTime

Shape = tuple[int, int, int]
"""(m, k, n) of a matmul (m, k) × (k, n)."""
GPU_SHAPES: tuple[Shape, ...] = (
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (16384, 4096, 4096),
    (8192, 5120, 20480),
    (8192, 5120, 5120),
    (4096, 4096, 128256),
    (8192, 2048, 8192),
    (8192, 8192, 2048),
    (8192, 2048, 2048),
    (8192, 4096, 1024),
    (8192, 1024, 4096),
    (2048, 4096, 4096),
    (1024, 4096, 14336),
    (2048, 2048, 2048),
    (8192, 4096, 512),
)
"""Shapes that are measured in bf16 on a GPU: tokens × inputs × outputs.

They are linear layers of models with 1 to 13 billion parameters, whole and divided among tensor ranks, and a chunk of a
head.
"""
GPU_FP8_SHAPES: tuple[Shape, ...] = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 2048, 8192))
"""Shapes that are measured in fp8."""
CPU_SHAPES: tuple[Shape, ...] = (
    (256, 256, 256),
    (512, 256, 1024),
    (512, 1024, 256),
    (1024, 512, 512),
    (2048, 256, 256),
    (256, 1024, 1024),
    (1024, 128, 512),
    (1024, 512, 2048),
)
"""Shapes that are measured on a CPU."""
CACHE_BYTES = {"cuda": 192 << 20, "cpu": 64 << 20}
"""Bytes of all operands through which calls rotate, so that no operand is in the cache, as in a training step."""
HEAT_SECONDS = 3.0
"""Seconds of load before the first matmul on a busy GPU. Before each further matmul it is a sixth of that."""


def matmul_times(team: Team, clock: TeamClock, budget: float) -> list[MatmulTime]:
    """Return the times of every shape in every dtype that training uses on this device, within about `budget` seconds."""
    cases = cases_for(team)
    bursts = [clock.burst_seconds(call_of(case, team)) for case in cases]
    case_budget = budget / len(cases) / 2
    heater = call_of(cases[0], team)
    if team.cuda:
        clock.keep_busy(heater, min(HEAT_SECONDS, budget / 8))
    times = []
    for case, burst in zip(cases, bursts, strict=True):
        if team.cuda:
            clock.keep_busy(heater, min(HEAT_SECONDS / 6, case_budget / 2))
        times.append(matmul_time_of(case, clock.seconds(call_of(case, team), case_budget), burst))
    return times


def matmul_time_of(case: Case, seconds: float, burst_seconds: float) -> MatmulTime:
    """Return the time of one matmul.

    The arguments are seconds of one call: one matmul in fp8, otherwise the three of a linear layer.
    """
    (m, k, n), number_format = case
    matmuls_per_call = 1 if number_format == "fp8" else 3
    return MatmulTime(
        format=number_format,
        m=m,
        k=k,
        n=n,
        seconds=seconds / matmuls_per_call,
        burst_seconds=burst_seconds / matmuls_per_call,
    )


Format = Literal["bf16", "fp8", "fp32"]
"""Number formats that are measured."""
Case = tuple[Shape, Format]
"""A shape and the number format of its inputs."""


def cases_for(team: Team) -> list[Case]:
    """Return the shapes and formats that are measured on this device."""
    if not team.cuda:
        return [(shape, "fp32") for shape in CPU_SHAPES]
    has_fp8 = torch.version.hip is None and torch.cuda.get_device_capability(team.device) >= (8, 9)
    return [*((shape, "bf16") for shape in GPU_SHAPES), *((shape, "fp8") for shape in GPU_FP8_SHAPES if has_fp8)]


def linear(shape: Shape, number_format: Literal["bf16", "fp32"], device: torch.device) -> Callable[[], None]:
    """Return a call that computes the three matmuls of a linear layer: output, input gradient, weight gradient."""
    m, k, n = shape
    options: dict[str, Any] = {
        "device": device,
        "dtype": torch.bfloat16 if number_format == "bf16" else torch.float32,
    }
    size = options["dtype"].itemsize
    operands = _operand_sets(
        (m * k + k * n + m * n) * size,
        device,
        lambda: (torch.randn(m, k, **options), torch.randn(n, k, **options), torch.randn(m, n, **options)),
    )
    y = torch.empty(m, n, **options)
    dx = torch.empty(m, k, **options)
    dw = torch.empty(n, k, **options)

    def call() -> None:
        x, w, dy = next(operands)
        torch.mm(x, w.t(), out=y)
        torch.mm(dy, w, out=dx)
        torch.mm(dy.t(), x, out=dw)

    return call


def call_of(case: Case, team: Team) -> Callable[[], object]:
    """Return a call that computes the three matmuls of a linear layer, or in fp8 one matmul."""
    shape, number_format = case
    return _fp8_matmul(shape, team.device) if number_format == "fp8" else linear(shape, number_format, team.device)


def _fp8_matmul(shape: Shape, device: torch.device) -> Callable[[], object]:
    """Return a call that computes a forward matmul in fp8 with one scale per tensor and a bf16 result."""
    m, k, n = shape
    scale = torch.ones((), device=device)

    def fp8_matrix(height: int, width: int) -> torch.Tensor:
        return torch.randn(height, width, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)

    operands = _operand_sets(m * k + k * n, device, lambda: (fp8_matrix(m, k), fp8_matrix(n, k)))

    def call() -> object:
        x, w = next(operands)
        return torch._scaled_mm(x, w.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    return call


def _operand_sets(size_bytes: int, device: torch.device, make: Callable[[], Any]) -> Any:
    """Return an endless iterator over sets of operands, made by `make`, which together do not fit into the cache."""
    return cycle([make() for _ in range(min(16, -(-CACHE_BYTES[device.type] // size_bytes)))])
