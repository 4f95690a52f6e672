"""AdamW's update (Loshchilov & Hutter 2019), one call for many tensors of one format and device.

The one place that steps: state that stays on the device and state that comes in chunks are stepped by the same arithmetic.
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


@dataclass(frozen=True)
class Told:
    """Inputs of one step.

    `factor` multiplies every gradient, and `skip` 1 disables the update: both scalars on the device.
    """

    learning_rate: float
    factor: Tensor
    skip: Tensor


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
    weight_decay: float,
    told: Told,
) -> None:
    """One in-place update of contiguous tensors, to be called inside `counted`.

    Gradients may be narrower than the rest, and are of no use afterwards.

        On CUDA in fp32 one launch of a Triton kernel steps all tensors and clips on the way; elsewhere torch's fused
    kernel, after clipping.
    """
    for kind in dict.fromkeys(gradient.dtype for gradient in gradients):
        rows = [row for row, gradient in enumerate(gradients) if gradient.dtype == kind]
        held = ([tensors[row] for row in rows] for tensors in (weights, gradients, first, second, counts))
        step = _fast if weights[0].is_cuda and weights[0].dtype == torch.float32 else _plain
        step(*held, coefficients=coefficients, weight_decay=weight_decay, told=told)


def _fast(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], counts: list[Tensor], *,
    coefficients: Coefficients, weight_decay: float, told: Told,
) -> None:  # fmt: skip
    from meshwright.optim.fused_triton import fused_update

    beta1, beta2 = coefficients.betas
    steps = torch.stack(counts).double()
    rates = torch.stack([told.learning_rate / (1 - beta1**steps), (1 - beta2**steps).rsqrt()])
    fused_update(
        weights, gradients, first, second, rates.float(), factor=told.factor.float(), skip=told.skip, betas=coefficients.betas,
        epsilon=coefficients.epsilon, kept=1 - told.learning_rate * weight_decay,
    )  # fmt: skip


def _plain(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], counts: list[Tensor], *,
    coefficients: Coefficients, weight_decay: float, told: Told,
) -> None:  # fmt: skip
    kind = weights[0].dtype
    wide = [gradient.to(kind) for gradient in gradients]
    torch._foreach_mul_(wide, told.factor.to(kind))
    torch._fused_adamw_(
        weights, wide, first, second, [], counts, lr=told.learning_rate, beta1=coefficients.betas[0], beta2=coefficients.betas[1],
        weight_decay=weight_decay, eps=coefficients.epsilon, amsgrad=False, maximize=False, found_inf=told.skip,
    )  # fmt: skip
