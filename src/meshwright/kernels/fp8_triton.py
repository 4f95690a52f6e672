"""Triton kernels that round to fp8 and transpose matrices, for `kernels.fp8_products`; imported only with a CUDA device.

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
"""Elements one program rounds where nothing is turned."""
TILE_ROWS, TILE_COLUMNS = 128, 64
"""The tile of one program: turned, its rows are 128 bytes, a whole line of memory; as read they are 128 bytes of bf16."""


@torch.library.custom_op("meshwright::fp8_round_both", mutates_args=())
def round_both(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `(rows, inner)` · factor `()` in fp8, and the same turned `(inner, rows)`."""
    values, turned = torch.empty(x.shape, dtype=fp8_dtype, device=x.device), _turned_like(x, fp8_dtype)
    _launch(x, factor, values, turned)
    return values, turned


@torch.library.custom_op("meshwright::fp8_round_turned", mutates_args=())
def round_turned(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """(x `(rows, inner)`)ᵀ · factor `()` or `(inner, 1)` in fp8."""
    del after
    turned = _turned_like(x, fp8_dtype)
    _launch(x, factor, None, turned)
    return turned


@torch.library.custom_op("meshwright::fp8_turn", mutates_args=())
def turn(x: Tensor, after: Tensor | None = None) -> Tensor:
    """The transpose of an fp8 matrix, row-major."""
    del after
    turned = _turned_like(x, x.dtype)
    _launch(x.view(torch.uint8), None, None, turned.view(torch.uint8))
    return turned


def round_flat(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """x · factor `()` in fp8, for eager use: a compiler makes as good a kernel by itself."""
    made = torch.empty(x.shape, dtype=fp8_dtype, device=x.device)
    _round_flat[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), factor, made, x.numel(), BLOCK, num_warps=8)
    return made


@round_both.register_fake
def _(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del factor
    return torch.empty(x.shape, dtype=fp8_dtype, device=x.device), _turned_like(x, fp8_dtype)


@round_turned.register_fake
def _(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    del factor, after
    return _turned_like(x, fp8_dtype)


@turn.register_fake
def _(x: Tensor, after: Tensor | None = None) -> Tensor:
    del after
    return _turned_like(x, x.dtype)


def _turned_like(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    return torch.empty((x.shape[1], x.shape[0]), dtype=fp8_dtype, device=x.device)


def _launch(x: Tensor, factor: Tensor | None, values: Tensor | None, turned: Tensor) -> None:
    row_count, columns = x.shape
    grid = (triton.cdiv(row_count, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    _round[grid](
        x.contiguous(),
        turned if factor is None else factor,
        turned if values is None else values,
        turned,
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
    turned,
    row_count,
    columns,
    scaled: tl.constexpr,
    by_column: tl.constexpr,
    both: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)
    column = tl.program_id(1).to(tl.int64) * wide + tl.arange(0, wide)
    inside = (row[:, None] < row_count) & (column[None, :] < columns)
    place = row[:, None] * columns + column[None, :]
    tile = tl.load(x + place, mask=inside, other=0)
    if both:
        tl.store(values + place, (tile.to(tl.float32) * tl.load(factor)).to(turned.dtype.element_ty), mask=inside)
    if scaled:
        if by_column:
            times = tl.load(factor + column, mask=column < columns, other=0.0)[None, :]
        else:  # once more, as `gated_triton` says
            times = tl.load(factor, volatile=True)
        tile = (tile.to(tl.float32) * times).to(turned.dtype.element_ty)
    tl.store(turned + column[:, None] * row_count + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def _round_flat(x, factor, made, count, block: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(made + index, value.to(made.dtype.element_ty), mask=inside)
