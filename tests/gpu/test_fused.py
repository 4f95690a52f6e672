"""GPU: the fused AdamW update, one kernel launch, equals its plain implementation for all sizes, alignments and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.optim import fused
from meshwright.optim.fused import Coefficients, UpdateInputs, count_updates, new_count

pytestmark = pytest.mark.gpu

SHAPES = [(1000, 1001), (37,), (0, 8), (4096, 512), (129,), (3, 5, 7), (1024,), (1025,)]
STEPS = 6
BOUND = 2e-6
"""Relative to a tensor's largest number: fp32 in another order."""


def random_tensors(seed: int, dtype: torch.dtype, shift: int) -> list[Tensor]:
    """Each begins `shift` elements behind the place that an allocation begins at."""
    draw = torch.Generator("cuda").manual_seed(seed)
    tensors = []
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        tensors.append(torch.randn(shift + size, generator=draw, device="cuda").to(dtype)[shift:].view(shape))
    return tensors


def trained(step: Callable[..., None], gradient_dtype: torch.dtype, shift: int, skipped: int) -> list[list[Tensor]]:
    """Weights and both moments after some steps; every parameter has seen another number of them."""
    weights = random_tensors(0, torch.float32, shift)
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    update_counts = [new_count(torch.device("cuda")) for _ in weights]
    torch._foreach_add_(
        update_counts, [torch.full((), float(index), device="cuda") for index in range(len(update_counts))]
    )
    for number in range(STEPS):
        factor = torch.full((), 0.3 + number, device="cuda", dtype=torch.float64)
        inputs = UpdateInputs(1e-2, factor, torch.full((), float(number == skipped), device="cuda"))
        with count_updates(update_counts, inputs.skip):
            gradients = random_tensors(number + 1, gradient_dtype, shift)
            step(
                weights,
                gradients,
                *moments,
                update_counts,
                coefficients=Coefficients((0.9, 0.95), 1e-8),
                weight_decay=0.1,
                inputs=inputs,
            )
    return [weights, *moments]


def apart(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> float:
    pairs = [
        (a, b)
        for our_tensors, their_tensors in zip(ours, theirs, strict=True)
        for a, b in zip(our_tensors, their_tensors, strict=True)
    ]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a.numel())


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("skipped", [-1, 2])
def test_one_launch_equals_its_plain_twin(gradient_dtype: torch.dtype, shift: int, skipped: int) -> None:
    by_torch = trained(fused._plain, gradient_dtype, shift, skipped)
    assert apart(trained(fused.update, gradient_dtype, shift, skipped), by_torch) < BOUND
    assert apart(trained(fused.update, gradient_dtype, shift, 0), by_torch) > 1e-3, "another step is left out"


def test_the_update_copies_nothing_to_the_host() -> None:
    """The host waits for nothing, and gives the device one kernel for all tensors."""
    trained(fused.update, torch.bfloat16, 0, -1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            weights = [torch.zeros(100, device="cuda") for _ in range(300)]
            state = [[torch.zeros_like(weight) for weight in weights] for _ in range(3)]
            update_counts = [new_count(torch.device("cuda")) for _ in weights]
            norm = torch.ones((), device="cuda")
            fused.update(
                weights,
                *state,
                update_counts,
                coefficients=Coefficients((0.9, 0.95), 1e-8),
                weight_decay=0.1,
                inputs=UpdateInputs(1e-2, norm, 0 * norm),
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("_adamw" in event.name for event in profile.events()) == 1
