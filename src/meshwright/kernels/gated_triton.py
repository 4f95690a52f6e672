"""The Triton kernels of `kernels.gated`; imported only with a CUDA device.

Each program computes a tile of the activation, or of both halves of its gradient, in fp32 and writes it in fp8, straight and transposed.
The transposed tile is rounded separately: the kernel loads the factor a second time (volatile), so that the compiler cannot merge the two
roundings. If they are merged, ptxas of CUDA 12 stores wrong bytes (Triton issue 11111).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 128
"""Rows of a program's tile. In the transposed tile they are 128 bytes, a cache line."""
TILE_COLUMNS = 32
"""Columns of a program's tile, 64 bytes of the bf16 rows that are read."""


@torch.library.custom_op("meshwright::fp8_swiglu", mutates_args=())
def round_swiglu(projected: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(gate) · up · factor `()` of `projected` `(rows, 2 · width)` in fp8 `(rows, width)`, and the transpose."""
    row_count = projected.shape[0]
    width = projected.shape[1] // 2
    values, transposed = _empty_pair(projected, row_count, width, fp8_dtype)
    _forward[_grid(row_count, width)](
        projected.contiguous(), factor, values, transposed, row_count, width, TILE_ROWS, TILE_COLUMNS, num_warps=8
    )
    return values, transposed


@torch.library.custom_op("meshwright::fp8_swiglu_gradient", mutates_args=())
def round_swiglu_gradient(
    projected: Tensor, grad_out: Tensor, factor: Tensor, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradient of `projected` · factor `()` in fp8 `(rows, 2 · width)`, and the transpose, from that of the activation."""
    row_count, width = grad_out.shape
    values, transposed = _empty_pair(projected, row_count, 2 * width, fp8_dtype)
    _backward[_grid(row_count, width)](
        projected.contiguous(),
        grad_out.contiguous(),
        factor,
        values,
        transposed,
        row_count,
        width,
        TILE_ROWS,
        TILE_COLUMNS,
        num_warps=8,
    )
    return values, transposed


@round_swiglu.register_fake
def _(projected: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del factor
    return _empty_pair(projected, projected.shape[0], projected.shape[1] // 2, fp8_dtype)


@round_swiglu_gradient.register_fake
def _(projected: Tensor, grad_out: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del grad_out, factor
    return _empty_pair(projected, projected.shape[0], projected.shape[1], fp8_dtype)


def _empty_pair(like: Tensor, row_count: int, columns: int, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    straight = torch.empty((row_count, columns), dtype=fp8_dtype, device=like.device)
    return straight, straight.new_empty((columns, row_count))


def _grid(row_count: int, width: int) -> tuple[int, int]:
    return triton.cdiv(row_count, TILE_ROWS), triton.cdiv(width, TILE_COLUMNS)


@triton.jit
def _forward(
    projected, factor, values, transposed, row_count, width, tile_rows: tl.constexpr, tile_columns: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row[:, None] < row_count) & (column[None, :] < width)
    position = row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(projected + position, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(projected + position + width, mask=inside, other=0.0).to(tl.float32)
    activation = gate * tl.sigmoid(gate) * up
    fp8_dtype = values.dtype.element_ty
    tl.store(values + row[:, None] * width + column[None, :], (activation * tl.load(factor)).to(fp8_dtype), mask=inside)
    transposed_tile = tl.trans((activation * tl.load(factor, volatile=True)).to(fp8_dtype))
    tl.store(transposed + column[:, None] * row_count + row[None, :], transposed_tile, mask=tl.trans(inside))


@triton.jit
def _backward(
    projected,
    grad_out,
    factor,
    values,
    transposed,
    row_count,
    width,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row[:, None] < row_count) & (column[None, :] < width)
    position = row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(projected + position, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(projected + position + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    gate_grad = grad * up * (sigmoid + silu * (1 - sigmoid))
    up_grad = grad * silu
    fp8_dtype = values.dtype.element_ty
    multiplier = tl.load(factor)
    tl.store(values + position, (gate_grad * multiplier).to(fp8_dtype), mask=inside)
    tl.store(values + position + width, (up_grad * multiplier).to(fp8_dtype), mask=inside)
    multiplier = tl.load(factor, volatile=True)
    position = column[:, None] * row_count + row[None, :]
    tl.store(transposed + position, tl.trans((gate_grad * multiplier).to(fp8_dtype)), mask=tl.trans(inside))
    tl.store(
        transposed + width.to(tl.int64) * row_count + position,
        tl.trans((up_grad * multiplier).to(fp8_dtype)),
        mask=tl.trans(inside),
    )
