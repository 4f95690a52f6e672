"""Matrix products by shape and format, in a busy device and in a rested one.

A GPU at its power limit lowers its clocks after a second or two of large products, so what a training step sees is measured in a device
that is kept busy; the rested figure is what short benchmarks print. Inputs are normal random numbers, since power depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, Literal

import torch

from meshwright.profile.call_timing import Clock
from meshwright.profile.team import Team
from meshwright.spec.profile import ProductTime

Shape = tuple[int, int, int]
ON_GPU: tuple[Shape, ...] = (
    (8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 4096, 4096), (8192, 5120, 20480), (8192, 5120, 5120),
    (4096, 4096, 128256), (8192, 2048, 8192), (8192, 8192, 2048), (8192, 2048, 2048), (8192, 4096, 1024), (8192, 1024, 4096),
    (2048, 4096, 4096), (1024, 4096, 14336), (2048, 2048, 2048), (8192, 4096, 512),
)  # fmt: skip
"""Tokens × inputs × outputs of linear layers from 1 to 13 billion parameters, whole and split, and a chunk of a head."""
ON_GPU_FP8: tuple[Shape, ...] = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 2048, 8192))
ON_CPU: tuple[Shape, ...] = (
    (256, 256, 256), (512, 256, 1024), (512, 1024, 256), (1024, 512, 512), (2048, 256, 256), (256, 1024, 1024), (1024, 128, 512),
    (1024, 512, 2048),
)  # fmt: skip
CACHE_BYTES = {"cuda": 192 << 20, "cpu": 64 << 20}
"""Operands change until they are this large together: in a step, none is still in the cache."""
HEAT_SECONDS = 3.0
"""Before the first product of a busy GPU, and a sixth of it before each."""


def product_times(team: Team, clock: Clock, budget: float) -> list[ProductTime]:
    """Every shape in every format that training computes in here."""
    cases = cases_for(team)
    bursts = [clock.burst_seconds(call_of(case, team)) for case in cases]
    each = budget / len(cases) / 2
    heater = call_of(cases[0], team)
    if team.cuda:
        clock.keep_busy(heater, min(HEAT_SECONDS, budget / 8))
    rows = []
    for case, burst in zip(cases, bursts, strict=True):
        if team.cuda:
            clock.keep_busy(heater, min(HEAT_SECONDS / 6, each / 2))
        rows.append(row_of(case, clock.seconds(call_of(case, team), each), burst))
    return rows


def row_of(case: Case, seconds: float, burst_seconds: float) -> ProductTime:
    """What the seconds of one call say of one product."""
    (m, k, n), number_format = case
    products = 1 if number_format == "fp8" else 3
    return ProductTime(
        format=number_format, m=m, k=k, n=n, seconds=seconds / products, burst_seconds=burst_seconds / products
    )


Format = Literal["bf16", "fp8", "fp32"]
Case = tuple[Shape, Format]


def cases_for(team: Team) -> list[Case]:
    """Shapes and formats that this device is asked for."""
    if not team.cuda:
        return [(shape, "fp32") for shape in ON_CPU]
    low = torch.version.hip is None and torch.cuda.get_device_capability(team.device) >= (8, 9)
    return [*((shape, "bf16") for shape in ON_GPU), *((shape, "fp8") for shape in ON_GPU_FP8 if low)]


def linear(shape: Shape, number_format: Literal["bf16", "fp32"], device: torch.device) -> Callable[[], None]:
    """A linear layer's three products: output, gradient of the input, gradient of the weight."""
    m, k, n = shape
    kind: dict[str, Any] = {
        "device": device,
        "dtype": torch.bfloat16 if number_format == "bf16" else torch.float32,
    }
    size = kind["dtype"].itemsize
    sets = _sets(
        (m * k + k * n + m * n) * size,
        device,
        lambda: (torch.randn(m, k, **kind), torch.randn(n, k, **kind), torch.randn(m, n, **kind)),
    )
    y, dx, dw = torch.empty(m, n, **kind), torch.empty(m, k, **kind), torch.empty(n, k, **kind)

    def call() -> None:
        x, w, dy = next(sets)
        torch.mm(x, w.t(), out=y)
        torch.mm(dy, w, out=dx)
        torch.mm(dy.t(), x, out=dw)

    return call


def call_of(case: Case, team: Team) -> Callable[[], object]:
    """A linear layer's three products, or one product in fp8."""
    shape, number_format = case
    return _scaled(shape, team.device) if number_format == "fp8" else linear(shape, number_format, team.device)


def _scaled(shape: Shape, device: torch.device) -> Callable[[], object]:
    """A forward product in fp8 with one scale a tensor, bf16 out."""
    m, k, n = shape
    one = torch.ones((), device=device)

    def low(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)

    sets = _sets(m * k + k * n, device, lambda: (low(m, k), low(n, k)))

    def call() -> object:
        x, w = next(sets)
        return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return call


def _sets(size_bytes: int, device: torch.device, make: Callable[[], Any]) -> Any:
    """Operands one after another, as many as the cache does not hold."""
    return cycle([make() for _ in range(min(16, -(-CACHE_BYTES[device.type] // size_bytes)))])
