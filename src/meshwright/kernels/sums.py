"""Sums of gradients in a wider dtype than the gradients have, at memory bandwidth.

torch's operators on two dtypes load single elements: on an H200 they reach 2.8 TB/s for a sum and 1.6 TB/s for a scaled copy, of 4.2 TB/s.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_FUSED_ELEMENTS = 1 << 16
"""With fewer elements the host needs more time to launch a Triton kernel than the device needs for torch's operator."""


def add(total: Tensor, addend: Tensor, *, plain: bool = False) -> None:
    """Add `addend` to `total` in place; both have the same shape, the sum has the dtype of `total`.

    On CUDA one Triton kernel; elsewhere, and with `plain`, torch's operator.
    """
    if not plain and total.dtype != addend.dtype and _can_fuse(total, addend):
        from meshwright.kernels.sums_triton import fused_add

        fused_add(total, addend)
    else:
        total.add_(addend)


def scale(x: Tensor, factor: Tensor, dtype: torch.dtype, *, plain: bool = False) -> Tensor:
    """Return x · factor as `dtype`, multiplied in the wider dtype of `factor` `()`.

    On CUDA one Triton kernel; elsewhere, and with `plain`, torch's operator.
    """
    out = torch.empty_like(x, dtype=dtype)
    if not plain and _can_fuse(out, x) and factor.dtype == torch.float32:
        from meshwright.kernels.sums_triton import fused_scale

        fused_scale(out, x, factor)
        return out
    # Expanded, because torch would round a scalar tensor to the dtype of x first.
    return torch.mul(x, factor.expand_as(x), out=out)


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`; on a GPU without rounding the sum to the dtype of `a` first."""
    if dtype == a.dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else (a @ b).to(dtype)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in its wider dtype; on a GPU inside the matmul."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _can_fuse(out: Tensor, x: Tensor) -> bool:
    return (
        out.is_cuda
        and out.is_contiguous()
        and x.is_contiguous()
        and max(out.element_size(), x.element_size()) <= 4
        and out.numel() >= MIN_FUSED_ELEMENTS
    )
