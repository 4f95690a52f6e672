"""AdamW's update (Loshchilov & Hutter 2019), one call for many tensors with the same dtype and device.

It is used for state on the device and for state that is copied from host memory in chunks, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.spec.optimizers import MOMENTS as MOMENTS


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of AdamW that are the same for all parameters and steps."""

    betas: tuple[float, float]
    epsilon: float


@dataclass(frozen=True)
class UpdateInputs:
    """Inputs of one step.

    `factor` multiplies every gradient; `skip` is 1 to skip the update, else 0. Both are scalars on the device.
    """

    learning_rate: float
    factor: Tensor
    skip: Tensor


def new_count(device: torch.device) -> Tensor:
    """Return a counter of a parameter's updates, on the device, with the value 0."""
    return torch.zeros((), dtype=torch.float32, device=device)


@contextmanager
def count_updates(counts: list[Tensor], skip: Tensor) -> Iterator[None]:
    """Context of one update. It adds 1 to the counters `counts`, and takes the 1 back at the end if the update is skipped."""
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
    inputs: UpdateInputs,
) -> None:
    """Update contiguous tensors in place. Call it inside `count_updates`.

    Gradients may have a narrower dtype than the other tensors; they are overwritten. For fp32 on CUDA, one launch of a Triton kernel clips
    and updates all tensors. Otherwise gradients are clipped first, and then torch's fused kernel updates the tensors.
    """
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        indices = [index for index, gradient in enumerate(gradients) if gradient.dtype == dtype]
        selected = ([tensors[index] for index in indices] for tensors in (weights, gradients, first, second, counts))
        step = _fast if weights[0].is_cuda and weights[0].dtype == torch.float32 else _plain
        step(*selected, coefficients=coefficients, weight_decay=weight_decay, inputs=inputs)


def corrected_rates(counts: list[Tensor], coefficients: Coefficients, inputs: UpdateInputs) -> Tensor:
    """Return `(2, tensors)`, fp32: the learning rate divided by the first bias correction, and the inverse root of the second."""
    beta1, beta2 = coefficients.betas
    steps = torch.stack(counts).double()
    return torch.stack([inputs.learning_rate / (1 - beta1**steps), (1 - beta2**steps).rsqrt()]).float()


def _fast(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counts: list[Tensor],
    *,
    coefficients: Coefficients,
    weight_decay: float,
    inputs: UpdateInputs,
) -> None:
    from meshwright.optim.fused_triton import fused_update

    fused_update(
        weights,
        gradients,
        first,
        second,
        corrected_rates(counts, coefficients, inputs),
        factor=inputs.factor.float(),
        skip=inputs.skip,
        betas=coefficients.betas,
        epsilon=coefficients.epsilon,
        decay_factor=1 - inputs.learning_rate * weight_decay,
    )


def _plain(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counts: list[Tensor],
    *,
    coefficients: Coefficients,
    weight_decay: float,
    inputs: UpdateInputs,
) -> None:
    dtype = weights[0].dtype
    wide = [gradient.to(dtype) for gradient in gradients]
    torch._foreach_mul_(wide, inputs.factor.to(dtype))
    torch._fused_adamw_(
        weights,
        wide,
        first,
        second,
        [],
        counts,
        lr=inputs.learning_rate,
        beta1=coefficients.betas[0],
        beta2=coefficients.betas[1],
        weight_decay=weight_decay,
        eps=coefficients.epsilon,
        amsgrad=False,
        maximize=False,
        found_inf=inputs.skip,
    )
