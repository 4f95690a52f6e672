"""The Triton kernel of `grouped_fp8.quantize_columns`; imported only with a CUDA device, as CPU builds of torch lack Triton.

One program rounds some columns of one matrix: it reads them once for their largest magnitudes and again to round them. All programs at
work read less than the L2 cache has, so the second pass reads no memory. Bytes per element of a bf16 matrix: 2 + 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.fp8_products import Fp8Matrix
from meshwright.kernels.row_quantize_triton import CARRY, EXPONENT, INVERSE, LARGEST_EXPONENT, MIN_MAGNITUDE

TILE_COLUMNS, TILE_ROWS = 64, 128
"""Tile of a pass: rows that are read have 128 bytes, rows of the transpose that are written 128 bytes."""


def round_columns(matrices: Tensor, fp8_dtype: torch.dtype) -> Fp8Matrix:
    """See `grouped_fp8.quantize_columns`."""
    matrices = matrices.contiguous()
    groups, height, width = matrices.shape
    values = torch.empty(groups, width, height, dtype=fp8_dtype, device=matrices.device)
    scale = torch.empty(groups, width, 1, dtype=torch.float32, device=matrices.device)
    grid = (triton.cdiv(width, TILE_COLUMNS), groups)
    _round_columns[grid](matrices, values, scale, height, width, TILE_ROWS, TILE_COLUMNS, num_warps=8)
    return Fp8Matrix(values, scale)


@triton.jit
def _round_columns(matrices, values, scale, height, width, tile_rows: tl.constexpr, tile_columns: tl.constexpr) -> None:
    group = tl.program_id(1).to(tl.int64)
    source, target = matrices + group * height * width, values + group * height * width
    column, lane = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns), tl.arange(0, tile_rows)
    largest = tl.full((tile_columns,), MIN_MAGNITUDE, tl.float32)
    finite = tl.zeros((tile_columns,), tl.float32)
    for begin in range(0, height, tile_rows):
        index = begin + lane
        inside = (index < height)[:, None] & (column < width)[None, :]
        tile = tl.load(source + index[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(tile), 0))
        finite += tl.sum(tile * 0.0, 0)  # a maximum may ignore NaN; a sum does not, and 0 · inf is NaN
    bits = ((largest.to(tl.int32, bitcast=True) + CARRY) & EXPONENT) - LARGEST_EXPONENT
    factor = (-bits + INVERSE).to(tl.float32, bitcast=True)
    scales = tl.where(finite == 0.0, bits.to(tl.float32, bitcast=True), float("nan"))
    tl.store(scale + group * width + column, scales, mask=column < width)
    for begin in range(0, height, tile_rows):
        index = begin + lane
        inside = (index < height)[:, None] & (column < width)[None, :]
        tile = tl.load(source + index[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        rounded = (tile * factor[None, :]).to(values.dtype.element_ty)
        tl.store(target + column[:, None] * height + index[None, :], tl.trans(rounded), mask=tl.trans(inside))
