"""Matmuls in int8 for inference: scales, rounding, and the matmuls of linear layers and of routed experts.

Rounding is symmetric: the largest magnitude of a row becomes 127. A row is one output of a weight, or one token. LLM.int8()
(Dettmers et al. 2022) calls this "vector-wise"; its outlier columns, which it computes exactly, are absent here.
See also CloudMatrix-Infer (arXiv 2506.12708).

Dot products are summed in 32-bit integers, which is exact up to `MOST_INPUTS` inputs, and the scales multiply the sum.
So a token's result depends neither on the order of additions nor on the other tokens.

On CUDA, Triton kernels run. Elsewhere, and with `reference`, torch multiplies the same integers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.grouped import groups_of

LARGEST = 127
"""Largest magnitude of a value; -128 is not used."""
MOST_INPUTS = (2**31 - 1) // LARGEST**2
"""Maximum number of inputs of a matmul: 127 · 127 · MOST_INPUTS fits 32 bits."""
MIN_MAGNITUDE = 2.0**-100
"""Lower bound of the largest magnitude, so that a row of zeros gets a scale above 0."""


class Int8Matrix(NamedTuple):
    """A matrix in int8. It represents the numbers `values` · `scale`.

    `values` is `(…, rows, inner)` in int8, `scale` `(…, rows, 1)` in fp32.
    """

    values: Tensor
    scale: Tensor


def scale_of(largest: Tensor) -> Tensor:
    """Return `largest` / 127 in fp32, in the shape of `largest`; NaN where `largest` is not finite."""
    scale = largest.float().clamp(min=MIN_MAGNITUDE) / LARGEST
    return torch.where(largest.isfinite(), scale, torch.nan)


def round_with_scale(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale in int8, rounded to nearest, ties to even."""
    return (x.float() / scale).round().to(torch.int8)


def quantize(x: Tensor) -> Int8Matrix:
    """Return x `(…, rows, inner)` in int8, with a scale for each row."""
    scale = scale_of(x.abs().amax(dim=-1, keepdim=True))
    return Int8Matrix(round_with_scale(x, scale), scale)


def int8_linear(x: Int8Matrix, weight: Int8Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ + bias `(…, out)` in `dtype`, of x `(…, in)` and weight `(out, in)`."""
    shape = (*x.values.shape[:-1], weight.values.shape[0])
    rows = Int8Matrix(x.values.flatten(0, -2), x.scale.flatten(0, -2))
    if rows.values.is_cuda:
        from meshwright.kernels.fixed_matmul_triton import tiled_matmul

        return tiled_matmul(rows.values, weight.values, rows.scale, weight.scale, bias, dtype).view(shape)
    out = _scaled_matmul(rows, weight)
    return (out if bias is None else out + bias.float()).to(dtype).view(shape)


def grouped_int8(
    x: Int8Matrix, matrices: Int8Matrix, offsets: Tensor, dtype: torch.dtype, *, reference: bool = False
) -> Tensor:
    """Multiply each row of x `(rows, in)` by the transposed matrix of its group: `(rows, out)` in `dtype`.

    `matrices` is `(groups, out, in)`. Rows are sorted by group: group g has the rows `offsets[g - 1]` to `offsets[g]` - 1,
    and group 0 begins at row 0. `offsets` is `(groups,)` int32, and the last offset is the number of rows. On CUDA the
    host does not read the offsets.
    """
    if x.values.is_cuda and not reference:
        from meshwright.kernels.grouped_int8_triton import grouped_matmul

        return grouped_matmul(x.values, matrices.values, x.scale, matrices.scale, offsets, dtype)
    out = torch.empty(len(x.values), matrices.values.shape[1], dtype=dtype, device=x.values.device)
    for group, inside in enumerate(groups_of(offsets)):
        if inside.start < inside.stop:
            matrix = Int8Matrix(matrices.values[group], matrices.scale[group])
            out[inside] = _scaled_matmul(Int8Matrix(x.values[inside], x.scale[inside]), matrix).to(dtype)
    return out


def _scaled_matmul(x: Int8Matrix, weight: Int8Matrix) -> Tensor:
    """Return x · weightᵀ, times both scales, in fp32. The integer sums are exact."""
    if x.values.is_cuda:  # on CUDA torch has no matmul of 32-bit integers; in fp64 these sums are exact
        sums = x.values.double() @ weight.values.double().t()
    else:
        sums = x.values.int() @ weight.values.int().t()
    return sums.float() * weight.scale.t() * x.scale
