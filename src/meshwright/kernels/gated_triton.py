"""The Triton kernels of `kernels.gated`; imported only where there is a CUDA device.

Each program makes a tile of the activation, or of both halves of its gradient, in fp32 and writes it in fp8 both ways round. What is
turned is rounded by itself, `times` loaded once more so that no compiler makes one rounding of two: ptxas of CUDA 12 takes bytes that were
never written for those of a pair that is stored whole and in halves (Triton issue 11111).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 128, 32
"""The tile of one program: turned, its rows are 128 bytes, a whole line of memory; as read they are 64 bytes of bf16."""


@torch.library.custom_op("meshwright::fp8_swiglu", mutates_args=())
def round_swiglu(projected: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(gate) · up · factor `()` in fp8 `(rows, width)`, and turned, of `projected` `(rows, 2 · width)`."""
    row_count, width = projected.shape[0], projected.shape[1] // 2
    values, turned = _both_ways(projected, row_count, width, fp8_dtype)
    _forward[_grid(row_count, width)](
        projected.contiguous(), factor, values, turned, row_count, width, TILE_ROWS, TILE_COLUMNS, num_warps=8
    )
    return values, turned


@torch.library.custom_op("meshwright::fp8_swiglu_gradient", mutates_args=())
def round_swiglu_gradient(
    projected: Tensor, slope: Tensor, factor: Tensor, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient of `projected` · factor `()` in fp8 `(rows, 2 · width)`, and turned, from that of the activation."""
    row_count, width = slope.shape
    values, turned = _both_ways(projected, row_count, 2 * width, fp8_dtype)
    _backward[_grid(row_count, width)](
        projected.contiguous(),
        slope.contiguous(),
        factor,
        values,
        turned,
        row_count,
        width,
        TILE_ROWS,
        TILE_COLUMNS,
        num_warps=8,
    )
    return values, turned


@round_swiglu.register_fake
def _(projected: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del factor
    return _both_ways(projected, projected.shape[0], projected.shape[1] // 2, fp8_dtype)


@round_swiglu_gradient.register_fake
def _(projected: Tensor, slope: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del slope, factor
    return _both_ways(projected, projected.shape[0], projected.shape[1], fp8_dtype)


def _both_ways(like: Tensor, row_count: int, columns: int, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    straight = torch.empty((row_count, columns), dtype=fp8_dtype, device=like.device)
    return straight, straight.new_empty((columns, row_count))


def _grid(row_count: int, width: int) -> tuple[int, int]:
    return triton.cdiv(row_count, TILE_ROWS), triton.cdiv(width, TILE_COLUMNS)


@triton.jit
def _forward(projected, factor, values, turned, row_count, width, tall: tl.constexpr, wide: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)
    column = tl.program_id(1).to(tl.int64) * wide + tl.arange(0, wide)
    inside = (row[:, None] < row_count) & (column[None, :] < width)
    place = row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(projected + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(projected + place + width, mask=inside, other=0.0).to(tl.float32)
    made = gate * tl.sigmoid(gate) * up
    fp8_dtype = values.dtype.element_ty
    tl.store(values + row[:, None] * width + column[None, :], (made * tl.load(factor)).to(fp8_dtype), mask=inside)
    again = tl.trans((made * tl.load(factor, volatile=True)).to(fp8_dtype))
    tl.store(turned + column[:, None] * row_count + row[None, :], again, mask=tl.trans(inside))


@triton.jit
def _backward(
    projected, slope, factor, values, turned, row_count, width, tall: tl.constexpr, wide: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)
    column = tl.program_id(1).to(tl.int64) * wide + tl.arange(0, wide)
    inside = (row[:, None] < row_count) & (column[None, :] < width)
    place = row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(projected + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(projected + place + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(slope + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    gate_grad = grad * up * (sigmoid + silu * (1 - sigmoid))
    up_grad = grad * silu
    fp8_dtype = values.dtype.element_ty
    times = tl.load(factor)
    tl.store(values + place, (gate_grad * times).to(fp8_dtype), mask=inside)
    tl.store(values + place + width, (up_grad * times).to(fp8_dtype), mask=inside)
    times = tl.load(factor, volatile=True)
    place = column[:, None] * row_count + row[None, :]
    tl.store(turned + place, tl.trans((gate_grad * times).to(fp8_dtype)), mask=tl.trans(inside))
    tl.store(
        turned + width.to(tl.int64) * row_count + place,
        tl.trans((up_grad * times).to(fp8_dtype)),
        mask=tl.trans(inside),
    )
