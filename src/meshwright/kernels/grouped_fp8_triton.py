"""The Triton kernel of `grouped_fp8`; imported only with a CUDA device, as CPU builds of torch lack Triton.

It reads each element once. Bytes per element of a bf16 matrix: 2 + 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 128
"""Rows of a program's tile. In the transposed tile they are 128 bytes, a cache line."""
TILE_COLUMNS = 64
"""Columns of a program's tile, 128 bytes of the bf16 rows that are read."""


def round_transposed(matrices: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """(matrices `(groups, out, in)` · factor `(groups,)`) in fp8, transposed `(groups, in, out)`."""
    matrices = matrices.contiguous()
    groups, height, width = matrices.shape
    values = torch.empty(groups, width, height, dtype=fp8_dtype, device=matrices.device)
    grid = (triton.cdiv(height, TILE_ROWS), triton.cdiv(width, TILE_COLUMNS), groups)
    _round_transposed[grid](matrices, factor, values, height, width, TILE_ROWS, TILE_COLUMNS, num_warps=8)
    return values


@triton.jit
def _round_transposed(
    matrices, factor, values, height, width, tile_rows: tl.constexpr, tile_columns: tl.constexpr
) -> None:
    group = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = (row < height)[:, None] & (column < width)[None, :]
    start = group * height * width
    tile = tl.load(matrices + start + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rounded = (tile * tl.load(factor + group)).to(values.dtype.element_ty)
    tl.store(values + start + column[:, None] * height + row[None, :], tl.trans(rounded), mask=tl.trans(inside))
