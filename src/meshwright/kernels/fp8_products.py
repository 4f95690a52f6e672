"""Matrix products in fp8: scales, rounding, and the linear layer's three products with its backward.

Tensor cores of Hopper and Ada take fp8 operands in one layout only, so every product here is a · bᵀ of two row-major matrices:

    output      X  (tokens, in)   ·  W  (out, in)ᵀ
    input grad  dY (tokens, out)  ·  Wᵀ (in, out)ᵀ
    weight grad dYᵀ (out, tokens) ·  Xᵀ (in, tokens)ᵀ

X and dY are therefore needed both ways round; one pass rounds and turns them. What stays for backward is Xᵀ in fp8, half the bytes of X.
Scales are those of the very values that are rounded ("current" or "dynamic" scaling, Micikevicius et al. 2022), one a tensor or one a row
of each operand, and powers of two, so that only the rounding to fp8 loses anything and any order of doing things gives the same bits.

The fast path, on CUDA, is `torch._scaled_mm` with the Triton kernel of `fp8_triton`. The plain twin, elsewhere, rounds to the same values
and multiplies them in fp32.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Scaling = Literal["tensorwise", "rowwise"]
"""One scale for a whole operand, or one for each of its rows (each output of the product then has scales of its own)."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT = {"tensorwise": E5M2, "rowwise": E4M3}
"""Format of gradients: the wider range where one scale serves a whole tensor, the finer steps where every row has its own."""
ALIGNED = 16
"""What every dimension of a product's operands must be a multiple of, for `torch._scaled_mm`."""

_SMALLEST = 2.0**-100
"""Taken for the largest magnitude of zeros."""
_CARRY = 0x1FFFFF
"""Added to the bits of an fp32 number, it carries into the exponent if the mantissa is above 1.75.

The largest number of both formats is 1.75 times a power of two.
"""
_EXPONENT = 0x7F800000
_TOP = {E4M3: 8, E5M2: 15}
"""Exponent of the largest number of each format: 448 and 57344."""


class Low(NamedTuple):
    """A matrix in fp8: `values` `(rows, inner)`, to be multiplied with `scale` `()` or `(rows, 1)`, fp32 powers of two."""

    values: Tensor
    scale: Tensor


def scale_of(largest: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """The smallest powers of two that scale magnitudes up to `largest` into the range of `fp8_dtype`; fp32, in its shape.

    Made of integer operations, which no compiler rounds otherwise. NaN where `largest` is not finite: a cast to fp8 may turn infinity into
    the largest number, and the product would not show it.
    """
    bits = largest.float().clamp(min=_SMALLEST).view(torch.int32)
    scale = (((bits + _CARRY) & _EXPONENT) - (_TOP[fp8_dtype] << 23)).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, exactly."""
    return ((254 << 23) - scale.view(torch.int32)).view(torch.float32)


def rounded(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """x / scale in fp8, to nearest, ties to even."""
    return (x.float() * inverse(scale)).to(fp8_dtype)


def rounded_now(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """x · factor `()` in fp8, in one kernel also outside of compiled code; `factor` is the inverse of a scale."""
    if not x.is_cuda:
        return (x.float() * factor).to(fp8_dtype)
    from meshwright.kernels.fp8_triton import round_flat

    return round_flat(x, factor, fp8_dtype)


def low(x: Tensor, scaling: Scaling, fp8_dtype: torch.dtype = E4M3) -> Low:
    """x `(rows, inner)` in fp8."""
    scale = scale_of(_largest(x, scaling, by_row=True), fp8_dtype)
    return Low(rounded(x, scale, fp8_dtype), scale)


def low_turned(x: Tensor, scaling: Scaling, fp8_dtype: torch.dtype = E4M3, after: Tensor | None = None) -> Low:
    """xᵀ `(inner, rows)` in fp8, of x `(rows, inner)`; not before `after`."""
    return _turned(x, scale_of(_largest(x, scaling, by_row=False), fp8_dtype), fp8_dtype, after)


def low_both(x: Tensor, scaling: Scaling, fp8_dtype: torch.dtype = E4M3) -> tuple[Low, Low]:
    """x `(rows, inner)` and xᵀ in fp8. With one scale a tensor both come from one pass over x."""
    if scaling == "rowwise":
        return low(x, scaling, fp8_dtype), low_turned(x, scaling, fp8_dtype)
    scale = scale_of(_largest(x, scaling, by_row=True), fp8_dtype)
    if x.is_cuda:
        from meshwright.kernels.fp8_triton import round_both

        values, turned = round_both(x, inverse(scale), fp8_dtype)
        return Low(values, scale), Low(turned, scale)
    values = rounded(x, scale, fp8_dtype)
    return Low(values, scale), Low(values.t().contiguous(), scale)


def product(a: Low, b: Low, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a · bᵀ `(a's rows, b's rows)` in `dtype`.

    `fast` lets the tensor cores keep their partial sums at reduced width, which is quicker and good enough for a forward pass.
    """
    if not a.values.is_cuda:
        return ((a.values.float() @ b.values.float().t()) * a.scale * b.scale.t()).to(dtype)
    # Rows with scales of their own come in bf16 only.
    out = torch.bfloat16 if a.scale.dim() else dtype
    made = torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=out, use_fast_accum=fast
    )
    return made.to(dtype)


def weight_gradient(grad: Low, x: Low, dtype: torch.dtype) -> Tensor:
    """dYᵀ · X `(out, in)` of dYᵀ `(out, tokens)` and Xᵀ `(in, tokens)`."""
    return product(grad, x, dtype)


def linear(
    x: Tensor, weight: Tensor, gathered: Low | None, scaling: Scaling, taps: tuple[Tensor, ...] | None
) -> Tensor:
    """x · weightᵀ `(…, out)` of x `(…, in)` in fp8, differentiable.

    `gathered` is the weight `(out, in)` in fp8 where it came so: then `weight` only receives the gradient and its values are not read.
    With `taps` (see `tap_shapes`) what the weight's gradient is made of leaves as their gradients, and the weight gets none.
    """
    values, scale = gathered if gathered is not None else (None, None)
    keeps = torch.is_grad_enabled() and weight.requires_grad
    return _Linear.apply(x, weight, values, scale, scaling, keeps, *(taps or ()))


def low_weight(weight: Tensor, values: Tensor | None, scale: Tensor | None, scaling: Scaling = "tensorwise") -> Low:
    """A weight `(out, in)` in fp8: as it came, or made now."""
    return low(weight, scaling) if values is None or scale is None else Low(values, scale)


def tap_shapes(weight: Tensor, tokens: int, scaling: Scaling) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and formats of what one product's weight gradient is made of: dYᵀ and its scale, Xᵀ and its scale."""
    wide, narrow = weight.shape
    by_row = scaling == "rowwise"
    return (
        ((wide, tokens), GRADIENT[scaling]),
        ((wide, 1) if by_row else (), torch.float32),
        ((narrow, tokens), E4M3),
        ((narrow, 1) if by_row else (), torch.float32),
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        values: Tensor | None,
        scale: Tensor | None,
        scaling: Scaling,
        keeps: bool,
        *taps: Tensor,
    ) -> Tensor:
        rows = x.flatten(0, -2)
        came_low = values is not None
        there = low_weight(weight, values, scale, scaling)
        if keeps:
            here, turned = low_both(rows, scaling)
            ctx.save_for_backward(*turned, values if came_low else weight, there.scale)
        else:
            here = low(rows, scaling)
            ctx.save_for_backward(values if came_low else weight, there.scale)
        ctx.scaling, ctx.came_low, ctx.taps, ctx.dtype = scaling, came_low, len(taps), weight.dtype
        return product(here, there, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *kept, weight, scale = ctx.saved_tensors
        rows, scaling = grad.flatten(0, -2), ctx.scaling
        here, turned = low_both(rows, scaling, GRADIENT[scaling])
        input_grad = None
        if ctx.needs_input_grad[0]:
            there = weight_turned(weight, scale, scaling, ctx.came_low, here.scale)
            input_grad = product(here, there, grad.dtype).unflatten(0, grad.shape[:-1])
        if ctx.taps:
            return (input_grad, None, None, None, None, None, *turned, *kept)
        weight_grad = weight_gradient(turned, Low(*kept), ctx.dtype) if ctx.needs_input_grad[1] else None
        return input_grad, weight_grad, None, None, None, None


def weight_turned(weight: Tensor, scale: Tensor, scaling: Scaling, came_low: bool, after: Tensor) -> Low:
    """Wᵀ in fp8, transposed from the fp8 weight or rounded from the weight.

    A separate fp8 copy would be kept from forward to backward. `after` depends on the gradient, which keeps a compiler from
    computing Wᵀ in the forward (`fp8_triton`).
    """
    if scaling == "rowwise":
        return low_turned(weight, scaling, after=after)
    if not came_low:
        return _turned(weight, scale, E4M3, after)
    if weight.is_cuda:
        from meshwright.kernels.fp8_triton import turn

        return Low(turn(weight, after), scale)
    return Low(weight.t().contiguous(), scale)


def _turned(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, after: Tensor | None = None) -> Low:
    """xᵀ in fp8; `scale` `()` or `(inner, 1)`; not before `after`."""
    if x.is_cuda:
        from meshwright.kernels.fp8_triton import round_turned

        return Low(round_turned(x, inverse(scale), fp8_dtype, after), scale)
    return Low(rounded(x.t(), scale, fp8_dtype).contiguous(), scale)


def _largest(x: Tensor, scaling: Scaling, *, by_row: bool) -> Tensor:
    """The largest magnitude of x `()`, or of each row `(rows, 1)` or column `(columns, 1)`."""
    if scaling == "rowwise":
        return x.abs().amax(dim=1, keepdim=True) if by_row else x.abs().amax(dim=0).unsqueeze(1)
    # Rows first: that part joins the kernel which makes x, when a compiler sees both.
    return x.abs().amax(dim=1).amax()
