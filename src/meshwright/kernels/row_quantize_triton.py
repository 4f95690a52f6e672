"""The Triton kernels of `row_quantize`. Import them only with a CUDA device, because CPU builds of torch lack Triton.

One program computes one token. `group`, a power of two, is how many numbers of a token share a scale; 0 means all of
them. `dtype` is e4m3 or int8. Triton's interpreter rounds wrongly to fp8, so tests that run in it store fp32 instead.

Shapes: x is `(…, width)`, the result's `values` are `(…, width)`. `scale` is `(…, 1)` with `group` 0, else
`(⌈width / group⌉, rows)` as in `block_matmuls.Fp8Groups`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.add_norm_triton import add_copies, norm_factor
from meshwright.kernels.block_matmuls import Fp8Groups, scale_rows
from meshwright.kernels.dependent_launch_triton import await_previous, options
from meshwright.kernels.fp8_matmuls import E4M3, Fp8Matrix
from meshwright.kernels.int8_matmuls import Int8Matrix
from meshwright.kernels.row_quantize import RoundedMatrix
from meshwright.kernels.swiglu_triton import gate_sigmoid

ELEMENTS_PER_THREAD = 16
"""Numbers of a token per thread.

With fewer numbers there are more threads, and the reductions over a token take longer. With more numbers there are
fewer threads, and too few loads are in flight.
"""
MIN_MAGNITUDE = tl.constexpr(2.0**-100)
CARRY = tl.constexpr(0x1FFFFF)
EXPONENT = tl.constexpr(0x7F800000)
INVERSE = tl.constexpr(254 << 23)
LARGEST_EXPONENT = tl.constexpr(8 << 23)
"""MIN_MAGNITUDE to LARGEST_EXPONENT: the constants of `fp8_matmuls.scale_of` and `inverse`, for e4m3."""
LARGEST_INTEGER = tl.constexpr(127.0)
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds an fp32 number below 2²² to an integer, ties to even."""


def round_rows(x: Tensor, dtype: torch.dtype = E4M3, *, group: int = 0) -> RoundedMatrix:
    """Return x `(…, width)` in 8 bits; see `row_quantize.quantize_rows`."""
    x = x.contiguous()
    width = x.shape[-1]
    out = _empty(x, width, dtype, group)
    if x.numel():
        _round_rows[(x.numel() // width,)](x, *out, WIDTH=width, **_launch(out, group))
    return out


def round_add_rms_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype = E4M3,
    *,
    plus_one: bool = False,
    group: int = 0,
) -> tuple[Tensor, RoundedMatrix]:
    """Return the sum `(…, width)`, and its norm in 8 bits; see `row_quantize.quantize_add_rms_norm`."""
    x = x.contiguous()
    delta = delta.contiguous()
    width = x.shape[-1]
    total = torch.empty_like(x)
    out = _empty(x, width, dtype, group)
    if x.numel():
        _round_add_rms_norm[(x.numel() // width,)](
            x, delta, weight, total, *out, eps, PLUS_ONE=plus_one, WIDTH=width, **_launch(out, group)
        )
    return total, out


def round_add_copies_rms_norm(
    x: Tensor,
    copies: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype = E4M3,
    *,
    plus_one: bool = False,
    group: int = 0,
) -> tuple[Tensor, RoundedMatrix]:
    """Return the sum of x and the experts' outputs, and its norm in 8 bits.

    See `row_quantize.quantize_add_copies_rms_norm` for the arguments.
    """
    x = x.contiguous()
    width = x.shape[-1]
    total = torch.empty_like(x)
    out = _empty(x, width, dtype, group)
    if x.numel():
        _round_add_copies_rms_norm[(x.numel() // width,)](
            x,
            copies,
            None if shared is None else shared.contiguous(),
            weight,
            total,
            *out,
            eps,
            PLUS_ONE=plus_one,
            COPIES=copies.shape[1],
            WIDTH=width,
            **_launch(out, group),
        )
    return total, out


def round_gated_rows(
    gate_up: Tensor, dtype: torch.dtype = E4M3, *, gelu: bool = False, group: int = 0
) -> RoundedMatrix:
    """Return the gated activation of `gate_up` `(…, 2 · width)` in 8 bits; see `row_quantize.quantize_gated`."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = _empty(gate_up, width, dtype, group)
    if gate_up.numel():
        grid = (gate_up.numel() // (2 * width),)
        _round_gated[grid](gate_up, *out, GELU=gelu, WIDTH=width, **_launch(out, group))
    return out


def _empty(like: Tensor, width: int, dtype: torch.dtype, group: int) -> RoundedMatrix:
    """Return an uninitialised result for the tokens of `like`, with `width` numbers each."""
    shape = like.shape[:-1]
    if group:  # the library's matmuls read `scale_rows(rows)` rows, some of them after the last token
        rows = math.prod(shape)
        values = torch.empty((scale_rows(rows), width), dtype=dtype, device=like.device)
        scale = torch.empty((-(-width // group), scale_rows(rows)), dtype=torch.float32, device=like.device)
        return Fp8Groups(values[:rows].view(*shape, width), scale)
    values = torch.empty((*shape, width), dtype=dtype, device=like.device)
    scale = torch.empty((*shape, 1), dtype=torch.float32, device=like.device)
    return Int8Matrix(values, scale) if dtype == torch.int8 else Fp8Matrix(values, scale)


def _launch(out: RoundedMatrix, group: int) -> dict[str, Any]:
    """Return the launch arguments that all kernels here share."""
    block = max(triton.next_power_of_2(out.values.shape[-1]), group)
    warps = min(32, max(1, block // (32 * ELEMENTS_PER_THREAD)))
    stride = out.scale.shape[1] if group else 0
    return {"stride": stride, "GROUP": group, "BLOCK": block, "num_warps": warps, **options(out.values.device)}


@triton.jit
def _store_rounded(
    numbers,
    inside,
    values,
    scales,
    offset,
    token,
    stride=0,
    GROUP: tl.constexpr = 0,
    WIDTH: tl.constexpr = 0,
    BLOCK: tl.constexpr = 0,
) -> None:
    """Store the `numbers` `(BLOCK,)` of a token in 8 bits, and their scales.

    Scales of fp8 are powers of two. A scale is NaN if one of its numbers is not finite. Without GROUP a token has one
    scale, at index `token`. With GROUP the scale of the token's group g is at index `g · stride + token`.
    """
    numbers = tl.where(inside, numbers, 0.0)
    if GROUP:
        numbers = tl.reshape(numbers, (BLOCK // GROUP, GROUP))
    axis: tl.constexpr = 1 if GROUP else 0
    largest = tl.max(tl.abs(numbers), axis)
    # `max` may ignore NaN, but a sum does not; and 0 · inf is NaN.
    finite = tl.sum(numbers * 0.0, axis) == 0.0
    largest = tl.maximum(largest, MIN_MAGNITUDE)
    if values.dtype.element_ty == tl.int8:
        scale = tl.div_rn(largest, LARGEST_INTEGER)
        rounded = (tl.div_rn(numbers, scale) + TO_INTEGER) - TO_INTEGER
    else:
        bits = ((largest.to(tl.int32, bitcast=True) + CARRY) & EXPONENT) - LARGEST_EXPONENT
        scale = bits.to(tl.float32, bitcast=True)
        inverse = (-bits + INVERSE).to(tl.float32, bitcast=True)
        rounded = numbers * (inverse[:, None] if GROUP else inverse)
    if GROUP:
        group = tl.arange(0, BLOCK // GROUP)
        scales += group * stride
        tl.store(scales + token, tl.where(finite, scale, float("nan")), mask=group * GROUP < WIDTH)
        rounded = tl.reshape(rounded, (BLOCK,))
    else:
        tl.store(scales + token, tl.where(finite, scale, float("nan")))
    tl.store(values + offset, rounded.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride"])
def _round_rows(
    x,
    values,
    scales,
    stride,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Round one token of x."""
    await_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = token * WIDTH + column
    row = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    _store_rounded(row, inside, values, scales, offset, token, stride, GROUP, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["stride"])
def _round_add_rms_norm(
    x,
    delta,
    weight,
    total,
    values,
    scales,
    eps,
    stride,
    PLUS_ONE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Add one token of x and of delta, store the sum in `total`, and round its norm."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = token * WIDTH + column
    factor = norm_factor(weight, column, inside, PLUS_ONE)
    await_previous(DEPENDENT)
    # All loads are issued before the first use of one, so that their latencies overlap.
    left = tl.load(x + offset, mask=inside, other=0.0)
    right = tl.load(delta + offset, mask=inside, other=0.0)
    rounded = (left.to(tl.float32) + right.to(tl.float32)).to(total.dtype.element_ty)
    _store_norm(rounded, factor, inside, total, values, scales, offset, token, eps, stride, GROUP, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["stride"])
def _round_add_copies_rms_norm(
    x,
    copies,
    shared,
    weight,
    total,
    values,
    scales,
    eps,
    stride,
    PLUS_ONE: tl.constexpr,
    GROUP: tl.constexpr,
    COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Add one token of x and its experts' outputs, store the sum in `total`, and round its norm."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = token * WIDTH + column
    factor = norm_factor(weight, column, inside, PLUS_ONE)
    await_previous(DEPENDENT)
    rounded = add_copies(x, copies, shared, token, offset, column, inside, total.dtype.element_ty, COPIES, WIDTH, BLOCK)
    _store_norm(rounded, factor, inside, total, values, scales, offset, token, eps, stride, GROUP, WIDTH, BLOCK)


@triton.jit
def _store_norm(
    rounded,
    factor,
    inside,
    total,
    values,
    scales,
    offset,
    token,
    eps,
    stride,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the sum `rounded`, which has the dtype of `total`, and its RMSNorm in 8 bits."""
    tl.store(total + offset, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) * (1.0 / WIDTH) + eps)
    row = (wide * scale * factor).to(total.dtype.element_ty).to(tl.float32)
    _store_rounded(row, inside, values, scales, offset, token, stride, GROUP, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["stride"])
def _round_gated(
    gate_up,
    values,
    scales,
    stride,
    GELU: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute the gated activation of one token, and round it."""
    await_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = token * WIDTH + column
    source = gate_up + token * (2 * WIDTH) + column
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + WIDTH, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    row = (wide * gate_sigmoid(wide, GELU) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    _store_rounded(row, inside, values, scales, offset, token, stride, GROUP, WIDTH, BLOCK)
