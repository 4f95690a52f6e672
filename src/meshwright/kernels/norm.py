"""RMSNorm and LayerNorm over the last dimension. Statistics are in fp32 (fp64 for fp64); results in the input's dtype.

torch's fused operators compute them by default. On CUDA, without gradients, a Triton kernel computes wide rows: it takes
1.8 µs for a token of 4,096 numbers on an H200, and `F.rms_norm` takes 6.2 µs. With `reference` the formulas are computed step
by step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_WIDTHS = range(512, 16384 + 1)
"""Row widths for which the kernel is used. A program holds a row in registers. The rows of heads (head_dim) are narrower."""


class HeadNorms(NamedTuple):
    """The RMSNorms of the heads of queries and of keys.

    `query` and `key` are the weights `(head_dim,)`; `eps` and `plus_one` are those of `rms_norm`.
    """

    query: Tensor
    key: Tensor
    eps: float
    plus_one: bool = False


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, reference: bool = False, kernel: bool = True
) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) · weight` over the last dimension of x `(..., width)` (Zhang & Sennrich 2019).

    `weight`: `(width,)`. `eps`: added to the mean of squares.
    `plus_one`: the factor is 1 + weight. It is added in the dtype of the statistics, because bf16 would lose most digits
        of a small weight.
    `kernel`: False never runs the Triton kernel. Then the bits are the same with and without gradients; torch's operator
        adds the squares of a row in another order than the Triton kernel.
    """
    if kernel and not reference and _runs_kernel(x, weight):
        from meshwright.kernels.add_norm_triton import fused_rms_norm

        return fused_rms_norm(x, weight, eps, plus_one=plus_one)
    if not reference and not plus_one:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(accumulate_dtype(x.dtype))
    if reference:
        return rms_norm_of(x, wide.square().mean(dim=-1, keepdim=True), weight, eps, plus_one=plus_one)
    return F.rms_norm(wide, weight.shape, 1 + weight.to(wide.dtype), eps).to(x.dtype)


def _runs_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether the Triton kernel can compute the norm of x."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return x.dtype == weight.dtype and x.element_size() <= 4 and x.shape[-1] in KERNEL_WIDTHS and not differentiated


def rms_norm_of(x: Tensor, mean_square: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """Return `rms_norm` of x `(..., width)` for a given mean of squares `(..., 1)`.

    It is used where x is only a part of the row that is normed, so that the mean includes numbers of other ranks.
    """
    wide = x.to(mean_square.dtype)
    factor = 1 + weight.to(wide.dtype) if plus_one else weight
    return (wide * torch.rsqrt(mean_square + eps) * factor).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, reference: bool = False) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) · weight + bias` over the last dimension of x `(..., width)`.

    `weight` and `bias` are `(width,)`. With `reference` the formula is computed step by step.
    """
    if not reference:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    wide = x.to(accumulate_dtype(x.dtype))
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return (centred * scale * weight + bias).to(x.dtype)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
