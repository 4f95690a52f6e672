"""Gradients added up in a wider format than they are made in, at the rate of the memory.

Torch's operators on two formats move them an element at a time: on an H200 2.8 TB/s for a sum and 1.6 for a scaled copy, of 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 1 << 16
"""Elements below which a launch of Triton's takes the host longer than torch's operator takes the device."""


def add(total: Tensor, part: Tensor, *, plain: bool = False) -> None:
    """total += part, of the same shape, in total's dtype.

    On CUDA one pass of a Triton kernel; elsewhere, and with `plain`, torch's operator.
    """
    if not plain and total.dtype != part.dtype and _is_fast(total, part):
        from meshwright.kernels.sums_triton import fused_add

        fused_add(total, part)
    else:
        total.add_(part)


def scaled(part: Tensor, by: Tensor, dtype: torch.dtype, *, plain: bool = False) -> Tensor:
    """part · by as `dtype`, multiplied in the wider format of by `()`: a bare scalar would be rounded to the part's first.

    On CUDA one pass of a Triton kernel; elsewhere, and with `plain`, torch's.
    """
    out = torch.empty_like(part, dtype=dtype)
    if not plain and _is_fast(out, part) and by.dtype == torch.float32:
        from meshwright.kernels.sums_triton import fused_scale

        fused_scale(out, part, by)
        return out
    return torch.mul(part, by.expand_as(part), out=out)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `dtype`, which a GPU sums them in anyway."""
    if dtype == a.dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else (a @ b).to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with `total` kept in its wider format: a GPU adds while it multiplies."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _is_fast(out: Tensor, part: Tensor) -> bool:
    return (
        out.is_cuda
        and out.is_contiguous()
        and part.is_contiguous()
        and max(out.element_size(), part.element_size()) <= 4
        and out.numel() >= FEW
    )
