"""Matmuls in int8 for inference: scales, rounding, and the matmuls of linear layers and of routed experts.

Rounding is symmetric: the largest magnitude of a row becomes 127. A row is an output of a weight, or a token ("vector-wise" in LLM.int8(),
Dettmers et al. 2022, here without exact outlier columns; CloudMatrix-Infer, arXiv 2506.12708). Sums are integers of 32 bits, exact up to
`MOST_INPUTS` inputs, and scales multiply the sum. So a token's result depends neither on the order of additions nor on other tokens.

On CUDA Triton kernels run. Elsewhere, and with `plain`, the same integers are multiplied by torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.grouped import groups_of

LARGEST = 127
"""Largest magnitude of a number; -128 is not used."""
MOST_INPUTS = (2**31 - 1) // LARGEST**2
"""Inputs of a matmul whose sums fit 32 bits."""
MIN_MAGNITUDE = 2.0**-100
"""Lower bound of the largest magnitude, so that zeros get a scale above 0."""


class Int8Matrix(NamedTuple):
    """A matrix in int8: `values` `(…, rows, inner)` times `scale` `(…, rows, 1)` in fp32."""

    values: Tensor
    scale: Tensor


def scale_of(largest: Tensor) -> Tensor:
    """The scale in fp32 that divides magnitudes up to `largest` to at most 127; NaN where `largest` is not finite."""
    scale = largest.float().clamp(min=MIN_MAGNITUDE) / LARGEST
    return torch.where(largest.isfinite(), scale, torch.nan)


def round_with_scale(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in int8, rounded to nearest, ties to even."""
    return (x.float() / scale).round().to(torch.int8)


def quantize(x: Tensor) -> Int8Matrix:
    """x `(…, rows, inner)` in int8, with a scale for each row."""
    scale = scale_of(x.abs().amax(dim=-1, keepdim=True))
    return Int8Matrix(round_with_scale(x, scale), scale)


def int8_linear(x: Int8Matrix, weight: Int8Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ + bias `(…, out)` in `dtype`, of x `(…, in)` and weight `(out, in)`."""
    shape = (*x.values.shape[:-1], weight.values.shape[0])
    rows = Int8Matrix(x.values.flatten(0, -2), x.scale.flatten(0, -2))
    if rows.values.is_cuda:
        from meshwright.kernels.fixed_matmul_triton import tiled_matmul

        return tiled_matmul(rows.values, weight.values, rows.scale, weight.scale, bias, dtype).view(shape)
    out = _scaled_matmul(rows, weight)
    return (out if bias is None else out + bias.float()).to(dtype).view(shape)


def grouped_int8(
    x: Int8Matrix, matrices: Int8Matrix, offsets: Tensor, dtype: torch.dtype, *, plain: bool = False
) -> Tensor:
    """Each row of x `(rows, in)` times its group's matrix of `(groups, out, in)`, transposed: `(rows, out)` in `dtype`.

    Group g has the rows from `offsets[g - 1]` to `offsets[g]`; the last offset is the number of rows. On CUDA the host does not read
    the sizes of groups.
    """
    if x.values.is_cuda and not plain:
        from meshwright.kernels.grouped_int8_triton import grouped_matmul

        return grouped_matmul(x.values, matrices.values, x.scale, matrices.scale, offsets, dtype)
    out = torch.empty(len(x.values), matrices.values.shape[1], dtype=dtype, device=x.values.device)
    for group, inside in enumerate(groups_of(offsets)):
        if inside.start < inside.stop:
            matrix = Int8Matrix(matrices.values[group], matrices.scale[group])
            out[inside] = _scaled_matmul(Int8Matrix(x.values[inside], x.scale[inside]), matrix).to(dtype)
    return out


def _scaled_matmul(x: Int8Matrix, weight: Int8Matrix) -> Tensor:
    """x · weightᵀ in fp32, of exact integer sums."""
    if x.values.is_cuda:  # torch has no matmuls of 32-bit integers there; these sums are exact in fp64
        sums = x.values.double() @ weight.values.double().t()
    else:
        sums = x.values.int() @ weight.values.int().t()
    return sums.float() * weight.scale.t() * x.scale
