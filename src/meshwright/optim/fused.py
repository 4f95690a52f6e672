"""AdamW's update (Loshchilov & Hutter 2019) by torch's fused kernel, one call for many tensors of one format and device.

The one place that calls the kernel: state that stays on the device and state that comes in chunks are stepped by the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Coefficients:
    """What is the same for all parameters and steps."""

    betas: tuple[float, float]
    epsilon: float


def new_count(device: torch.device) -> Tensor:
    """The number of updates that a parameter has seen, on the device, as the kernel wants it."""
    return torch.zeros((), dtype=torch.float32, device=device)


@contextmanager
def counted(counts: list[Tensor], skip: Tensor) -> Iterator[None]:
    """Around one update of the parameters that have these counts; one that is skipped does not count."""
    if counts:
        torch._foreach_add_(counts, 1)
    yield
    if counts:
        torch._foreach_sub_(counts, [skip] * len(counts))


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counts: list[Tensor],
    *,
    coefficients: Coefficients,
    learning_rate: float,
    weight_decay: float,
    skip: Tensor,
) -> None:
    """One update in place, to be called inside `counted`; where `skip` (scalar, on the device) is 1, none."""
    torch._fused_adamw_(
        weights, gradients, first, second, [], counts, lr=learning_rate, beta1=coefficients.betas[0], beta2=coefficients.betas[1],
        weight_decay=weight_decay, eps=coefficients.epsilon, amsgrad=False, maximize=False, found_inf=skip,
    )  # fmt: skip
