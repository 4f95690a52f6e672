"""Adds and scales gradients in a wider dtype than the gradients have, at memory bandwidth.

torch's operators on two dtypes load single elements: on an H200 with 4.2 TB/s they reach 2.8 TB/s for a sum and
1.6 TB/s for a scaled copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_FUSED_ELEMENTS = 1 << 16
"""For fewer elements torch's operator is used: launching a Triton kernel would take the host longer than it saves."""


def add(total: Tensor, addend: Tensor, *, reference: bool = False) -> None:
    """Add `addend` to `total` in place. Both have the same shape; the sum has the dtype of `total`.

    If the dtypes differ, one Triton kernel runs on CUDA. Otherwise, and with `reference`, torch's operator runs.
    """
    if not reference and total.dtype != addend.dtype and _can_fuse(total, addend):
        from meshwright.kernels.sums_triton import fused_add

        fused_add(total, addend)
    else:
        total.add_(addend)


def scale(x: Tensor, factor: Tensor, dtype: torch.dtype, *, reference: bool = False) -> Tensor:
    """Return x · factor in `dtype`. The multiplication is in the dtype of `factor` `()`, which is wider than that of x.

    On CUDA one Triton kernel runs; elsewhere, and with `reference`, torch's operator.
    """
    out = torch.empty_like(x, dtype=dtype)
    if not reference and _can_fuse(out, x) and factor.dtype == torch.float32:
        from meshwright.kernels.sums_triton import fused_scale

        fused_scale(out, x, factor)
        return out
    # Expanded, because torch would first round a scalar tensor to the dtype of x.
    return torch.mul(x, factor.expand_as(x), out=out)


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a `(m, k)` @ b `(k, n)` in `dtype`. On a GPU the sum is not rounded to the dtype of `a` first."""
    if dtype == a.dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else (a @ b).to(dtype)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` `(m, n)` in place, in the dtype of `total`. On a GPU the matmul adds to `total` itself."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _can_fuse(out: Tensor, x: Tensor) -> bool:
    """Return whether the Triton kernels can write `out` from x."""
    return (
        out.is_cuda
        and out.is_contiguous()
        and x.is_contiguous()
        and max(out.element_size(), x.element_size()) <= 4
        and out.numel() >= MIN_FUSED_ELEMENTS
    )
