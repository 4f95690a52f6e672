"""The Triton kernels of `add_rms_norm` and `rms_norm`.

Import them only with a CUDA device, because CPU builds of torch lack Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.dependent_launch_triton import await_previous, options

ELEMENTS_PER_THREAD = 8
"""Numbers of a token per thread: 16 bytes of bf16, which is one vector load of each input. A block has at most 32 warps."""


def fused_add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm; see `add_norm.add_rms_norm`. One program computes one token."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return total, _normed(x, delta.contiguous(), total, weight, eps, plus_one)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """Return the norm of x; see `norm.rms_norm`. One program computes one row."""
    return _normed(x, None, None, weight, eps, plus_one)


def _normed(
    x: Tensor, delta: Tensor | None, total: Tensor | None, weight: Tensor, eps: float, plus_one: bool
) -> Tensor:
    """Return the norm of `x + delta`, and write the sum to `total`. Without `delta`, return the norm of x."""
    x = x.contiguous()
    width = x.shape[-1]
    normed = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        warps = min(32, max(1, block // (32 * ELEMENTS_PER_THREAD)))
        _add_rms_norm[(x.numel() // width,)](
            x,
            delta,
            weight,
            total,
            normed,
            eps,
            PLUS_ONE=plus_one,
            WIDTH=width,
            BLOCK=block,
            num_warps=warps,
            **options(x.device),
        )
    return normed


def fused_add_copies_rms_norm(
    x: Tensor, copies: Tensor, shared: Tensor | None, weight: Tensor, eps: float, *, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sum of x and the experts' outputs, and its norm. One program computes one token.

    See `add_norm.add_copies_rms_norm` for the arguments.
    """
    x = x.contiguous()
    width = x.shape[-1]
    total = torch.empty_like(x)
    normed = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        warps = min(32, max(1, block // (32 * ELEMENTS_PER_THREAD)))
        _add_copies_rms_norm[(x.numel() // width,)](
            x,
            copies,
            None if shared is None else shared.contiguous(),
            weight,
            total,
            normed,
            eps,
            COPIES=copies.shape[1],
            PLUS_ONE=plus_one,
            WIDTH=width,
            BLOCK=block,
            num_warps=warps,
            **options(x.device),
        )
    return total, normed


@triton.jit
def norm_factor(weight, column, inside, PLUS_ONE: tl.constexpr) -> tl.tensor:
    """Return the factors of a norm's columns `(BLOCK,)` in fp32: the weights, or 1 + the weights with PLUS_ONE."""
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return 1.0 + factor if PLUS_ONE else factor


@triton.jit
def add_copies(
    x,
    copies,
    shared,
    token,
    offset,
    column,
    inside,
    dtype: tl.constexpr,
    COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return one token of x plus its experts' outputs plus the shared expert's output (or None), `(BLOCK,)`.

    Each of the three sums is rounded to `dtype`: the experts' outputs, then the shared expert's added, then x added.
    """
    sums = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(COPIES):
        sums += tl.load(copies + (token * COPIES + copy) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    delta = sums.to(dtype).to(tl.float32)
    if shared is not None:
        delta = (delta + tl.load(shared + offset, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    return (tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) + delta).to(dtype)


@triton.jit
def _add_copies_rms_norm(
    x,
    copies,
    shared,
    weight,
    total,
    normed,
    eps,
    PLUS_ONE: tl.constexpr,
    COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute the sum and the norm of one token; see `fused_add_copies_rms_norm`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = token * WIDTH + column
    factor = norm_factor(weight, column, inside, PLUS_ONE)
    await_previous(DEPENDENT)
    dtype = total.dtype.element_ty
    rounded = add_copies(x, copies, shared, token, offset, column, inside, dtype, COPIES, WIDTH, BLOCK)
    tl.store(total + offset, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) * (1.0 / WIDTH) + eps)
    tl.store(normed + offset, (wide * scale * factor).to(dtype), mask=inside)


@triton.jit
def _add_rms_norm(
    x,
    delta,
    weight,
    total,
    normed,
    eps,
    PLUS_ONE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute the sum (if there is a delta) and the norm of one token; see `_normed`."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    offset = tl.program_id(0).to(tl.int64) * WIDTH + column
    dtype = normed.dtype.element_ty
    factor = norm_factor(weight, column, inside, PLUS_ONE)
    await_previous(DEPENDENT)
    rounded = tl.load(x + offset, mask=inside, other=0.0)
    if delta is not None:
        # Both loads are issued before the first use of one, so that their latencies overlap.
        right = tl.load(delta + offset, mask=inside, other=0.0)
        rounded = (rounded.to(tl.float32) + right.to(tl.float32)).to(dtype)
        tl.store(total + offset, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) * (1.0 / WIDTH) + eps)
    tl.store(normed + offset, (wide * scale * factor).to(dtype), mask=inside)
