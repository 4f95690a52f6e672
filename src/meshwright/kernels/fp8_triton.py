"""Triton kernels that round to fp8 and transpose matrices, for `kernels.fp8_matmuls`; imported only with a CUDA device.

`after` is an argument of the transposing kernels that none of them reads. A compiler would run a kernel that depends
only on a weight in the forward and keep its result until the backward, as it does not repeat custom kernels. A gradient
in `after` moves it to the backward. Each kernel reads its input once. Bytes per element: bf16 rounded both straight and
transposed 2 + 1 + 1, transposed only 2 + 1, an fp8 matrix transposed 1 + 1, a master weight rounded straight 4 + 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements per program of the kernel that only rounds."""
TILE_ROWS = 128
"""Rows of a program's tile. In the transposed tile they are 128 bytes, a cache line."""
TILE_COLUMNS = 64
"""Columns of a program's tile, 128 bytes of the bf16 rows that are read."""


@torch.library.custom_op("meshwright::fp8_round_both", mutates_args=())
def round_both(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `(rows, inner)` · factor `()` in fp8, and the same transposed `(inner, rows)`."""
    values = torch.empty(x.shape, dtype=fp8_dtype, device=x.device)
    transposed = _transposed_like(x, fp8_dtype)
    _launch(x, factor, values, transposed)
    return values, transposed


@torch.library.custom_op("meshwright::fp8_round_transposed", mutates_args=())
def round_transposed(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """(x `(rows, inner)`)ᵀ · factor `()` or `(inner, 1)` in fp8."""
    del after
    transposed = _transposed_like(x, fp8_dtype)
    _launch(x, factor, None, transposed)
    return transposed


@torch.library.custom_op("meshwright::fp8_transpose", mutates_args=())
def transpose(x: Tensor, after: Tensor | None = None) -> Tensor:
    """The transpose of an fp8 matrix, row-major."""
    del after
    transposed = _transposed_like(x, x.dtype)
    _launch(x.view(torch.uint8), None, None, transposed.view(torch.uint8))
    return transposed


def round_flat(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """x · factor `()` in fp8, for eager code; torch.compile generates a kernel as fast by itself."""
    rounded = torch.empty(x.shape, dtype=fp8_dtype, device=x.device)
    _round_flat[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), factor, rounded, x.numel(), BLOCK, num_warps=8)
    return rounded


@round_both.register_fake
def _(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del factor
    return torch.empty(x.shape, dtype=fp8_dtype, device=x.device), _transposed_like(x, fp8_dtype)


@round_transposed.register_fake
def _(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    del factor, after
    return _transposed_like(x, fp8_dtype)


@transpose.register_fake
def _(x: Tensor, after: Tensor | None = None) -> Tensor:
    del after
    return _transposed_like(x, x.dtype)


def _transposed_like(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    return torch.empty((x.shape[1], x.shape[0]), dtype=fp8_dtype, device=x.device)


def _launch(x: Tensor, factor: Tensor | None, values: Tensor | None, transposed: Tensor) -> None:
    row_count, columns = x.shape
    grid = (triton.cdiv(row_count, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    _round[grid](
        x.contiguous(),
        transposed if factor is None else factor,
        transposed if values is None else values,
        transposed,
        row_count,
        columns,
        factor is not None,
        factor is not None and factor.dim() > 0,
        values is not None,
        TILE_ROWS,
        TILE_COLUMNS,
        num_warps=8,
    )


@triton.jit
def _round(
    x,
    factor,
    values,
    transposed,
    row_count,
    columns,
    scaled: tl.constexpr,
    by_column: tl.constexpr,
    both: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row[:, None] < row_count) & (column[None, :] < columns)
    position = row[:, None] * columns + column[None, :]
    tile = tl.load(x + position, mask=inside, other=0)
    if both:
        tl.store(
            values + position, (tile.to(tl.float32) * tl.load(factor)).to(transposed.dtype.element_ty), mask=inside
        )
    if scaled:
        if by_column:
            factors = tl.load(factor + column, mask=column < columns, other=0.0)[None, :]
        else:  # loaded a second time, so that the compiler does not merge the two roundings (see `gated_triton`)
            factors = tl.load(factor, volatile=True)
        tile = (tile.to(tl.float32) * factors).to(transposed.dtype.element_ty)
    tl.store(transposed + column[:, None] * row_count + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def _round_flat(x, factor, rounded, count, block: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(rounded + index, value.to(rounded.dtype.element_ty), mask=inside)
