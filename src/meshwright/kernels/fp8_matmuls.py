"""Matmuls in fp8: scales, rounding, and the three matmuls of a linear layer in forward and backward.

The tensor cores of Hopper and Ada take fp8 operands in one layout only. So every matmul here is a · bᵀ of two row-major
matrices:

    output      X  (tokens, in)   ·  W  (out, in)ᵀ
    input grad  dY (tokens, out)  ·  Wᵀ (in, out)ᵀ
    weight grad dYᵀ (out, tokens) ·  Xᵀ (in, tokens)ᵀ

So the input X and the gradient dY are needed as they are and transposed. One kernel rounds and transposes them. Xᵀ in fp8
is saved for the backward; it has half the bytes of X in bf16.

Scales are computed from the values that are rounded ("current" or "dynamic" scaling, Micikevicius et al. 2022). Each
operand has one scale, or one scale per row. Scales are powers of two, so that only the rounding to fp8 loses precision.
The result is then bit-identical whether a number is scaled before or after a multiplication.

On CUDA the matmuls are `torch._scaled_mm`, and the rounding is done by the Triton kernels of `fp8_triton`. Elsewhere the
same rounded values are multiplied in fp32.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Scaling = Literal["tensorwise", "rowwise"]
"""How many scales an operand has: "tensorwise" one, "rowwise" one per row.

With "rowwise" every output element has its own pair of scales.
"""

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
GRADIENT = {"tensorwise": E5M2, "rowwise": E4M3}
"""dtype of gradients. With one scale per tensor e5m2 has more exponent bits; with one per row e4m3 has more mantissa bits."""
ALIGNED = 16
"""`torch._scaled_mm` needs operands whose dimensions are all multiples of this."""

_MIN_MAGNITUDE = 2.0**-100
"""Lower bound of the largest magnitude, so that a tensor of zeros gets a finite scale."""
_CARRY = 0x1FFFFF
"""Added to the bits of an fp32 number, it increments the exponent if the mantissa is above 1.75, else it does not.

The largest number of both fp8 dtypes is 1.75 times a power of two, so this rounds up to the power of two that is needed.
"""
_EXPONENT = 0x7F800000
"""The exponent bits of an fp32 number."""
_MAX_EXPONENT = {E4M3: 8, E5M2: 15}
"""Exponent of the largest number of each dtype: 448 and 57344."""


class Fp8Matrix(NamedTuple):
    """A matrix in fp8. It represents the numbers `values` · `scale`.

    `values` is `(rows, inner)` in e4m3 or e5m2; `scale` is `()` or `(rows, 1)` in fp32, powers of two.
    """

    values: Tensor
    scale: Tensor


def scale_of(largest: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return the smallest powers of two that scale magnitudes up to `largest` into the range of `fp8_dtype`.

    The result is fp32 and has the shape of `largest`. Example for e4m3, whose largest number is 448: `largest` 448 gives
    1, and 449 gives 2. It is computed with integer operations, so that no compiler rounds differently.

    The scale is NaN where `largest` is not finite. Otherwise a cast to fp8 might turn infinity into the largest number,
    and the result of the matmul would be finite.
    """
    bits = largest.float().clamp(min=_MIN_MAGNITUDE).view(torch.int32)
    scale = (((bits + _CARRY) & _EXPONENT) - (_MAX_EXPONENT[fp8_dtype] << 23)).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, exactly, for powers of two."""
    return ((254 << 23) - scale.view(torch.int32)).view(torch.float32)


def round_with_scale(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return x / scale in fp8, rounded to nearest, ties to even. `scale` broadcasts to x, for example `(rows, 1)`."""
    return (x.float() * inverse(scale)).to(fp8_dtype)


def round_with_factor(x: Tensor, factor: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return x · factor in fp8. `factor` `()` is the inverse of a scale. On CUDA this is one kernel, also without compiling."""
    if not x.is_cuda:
        return (x.float() * factor).to(fp8_dtype)
    from meshwright.kernels.fp8_triton import round_flat

    return round_flat(x, factor, fp8_dtype)


def quantize(x: Tensor, scaling: Scaling, fp8_dtype: torch.dtype = E4M3) -> Fp8Matrix:
    """Return x `(rows, inner)` in fp8, with scales `()` or `(rows, 1)`."""
    scale = scale_of(_largest(x, scaling, by_row=True), fp8_dtype)
    return Fp8Matrix(round_with_scale(x, scale, fp8_dtype), scale)


def quantize_transposed(
    x: Tensor, scaling: Scaling, fp8_dtype: torch.dtype = E4M3, after: Tensor | None = None
) -> Fp8Matrix:
    """Return xᵀ `(inner, rows)` in fp8, of x `(rows, inner)`, with scales `()` or `(inner, 1)`.

    `after` is a tensor that must be computed before xᵀ; `transposed_weight` says why.
    """
    return _round_transposed(x, scale_of(_largest(x, scaling, by_row=False), fp8_dtype), fp8_dtype, after)


def quantize_both(x: Tensor, scaling: Scaling, fp8_dtype: torch.dtype = E4M3) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return x `(rows, inner)` and xᵀ `(inner, rows)` in fp8. With "tensorwise" one kernel reads x once and writes both."""
    if scaling == "rowwise":
        return quantize(x, scaling, fp8_dtype), quantize_transposed(x, scaling, fp8_dtype)
    scale = scale_of(_largest(x, scaling, by_row=True), fp8_dtype)
    if x.is_cuda:
        from meshwright.kernels.fp8_triton import round_both

        values, transposed = round_both(x, inverse(scale), fp8_dtype)
        return Fp8Matrix(values, scale), Fp8Matrix(transposed, scale)
    values = round_with_scale(x, scale, fp8_dtype)
    return Fp8Matrix(values, scale), Fp8Matrix(values.t().contiguous(), scale)


def matmul(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return a · bᵀ `(rows of a, rows of b)` in `dtype`.

    With `fast` the tensor cores accumulate with reduced precision. That is faster, and precise enough for a forward pass.
    """
    if not a.values.is_cuda:
        return ((a.values.float() @ b.values.float().t()) * a.scale * b.scale.t()).to(dtype)
    # With scales per row torch computes bf16 results only.
    out_dtype = torch.bfloat16 if a.scale.dim() else dtype
    result = torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=out_dtype, use_fast_accum=fast
    )
    return result.to(dtype)


def weight_gradient(grad: Fp8Matrix, x: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """Return the weight gradient dYᵀ · X `(out, in)`, from `grad` = dYᵀ `(out, tokens)` and `x` = Xᵀ `(in, tokens)`."""
    return matmul(grad, x, dtype)


def linear(
    x: Tensor, weight: Tensor, gathered: Fp8Matrix | None, scaling: Scaling, taps: tuple[Tensor, ...] | None
) -> Tensor:
    """Return x · weightᵀ `(…, out)` of x `(…, in)` in fp8, differentiable.

    `gathered` is the weight `(out, in)` in fp8 if FSDP gathered it in fp8. Then `weight` only receives the gradient, and
    its values are not read.

    `taps` are placeholder inputs for a split backward, with the shapes of `tap_shapes`. Their "gradients" are dYᵀ and Xᵀ in
    fp8, so that the caller can compute the weight gradient later with `weight_gradient`. The weight then gets no gradient.
    """
    values, scale = gathered if gathered is not None else (None, None)
    save = torch.is_grad_enabled() and weight.requires_grad
    return _Linear.apply(x, weight, values, scale, scaling, save, *(taps or ()))


def weight_as_fp8(
    weight: Tensor, values: Tensor | None, scale: Tensor | None, scaling: Scaling = "tensorwise"
) -> Fp8Matrix:
    """Return a weight `(out, in)` in fp8: `values` and `scale` if both are given, else `weight` rounded."""
    return quantize(weight, scaling) if values is None or scale is None else Fp8Matrix(values, scale)


def tap_shapes(weight: Tensor, tokens: int, scaling: Scaling) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shapes and dtypes of the four taps of a linear layer: dYᵀ and its scale, Xᵀ and its scale.

    They are the two factors of the weight gradient, for a weight `(out, in)` and `tokens` tokens.
    """
    outputs, inputs = weight.shape
    by_row = scaling == "rowwise"
    return (
        ((outputs, tokens), GRADIENT[scaling]),
        ((outputs, 1) if by_row else (), torch.float32),
        ((inputs, tokens), E4M3),
        ((inputs, 1) if by_row else (), torch.float32),
    )


class _Linear(torch.autograd.Function):
    """The differentiable linear layer in fp8; see `linear` for the arguments.

    `values` and `scale` are the weight in fp8 or None. With `save` the forward saves Xᵀ in fp8 for the weight gradient. The
    backward returns the gradients of x and weight, then None for four arguments, then the "gradients" of the taps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        values: Tensor | None,
        scale: Tensor | None,
        scaling: Scaling,
        save: bool,
        *taps: Tensor,
    ) -> Tensor:
        rows = x.flatten(0, -2)
        weight_in_fp8 = values is not None
        fp8_weight = weight_as_fp8(weight, values, scale, scaling)
        if save:
            x_fp8, transposed = quantize_both(rows, scaling)
            ctx.save_for_backward(*transposed, values if weight_in_fp8 else weight, fp8_weight.scale)
        else:
            x_fp8 = quantize(rows, scaling)
            ctx.save_for_backward(values if weight_in_fp8 else weight, fp8_weight.scale)
        ctx.scaling = scaling
        ctx.weight_in_fp8 = weight_in_fp8
        ctx.taps = len(taps)
        ctx.dtype = weight.dtype
        return matmul(x_fp8, fp8_weight, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *x_transposed, weight, scale = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        scaling = ctx.scaling
        transposed = None
        if ctx.taps or ctx.needs_input_grad[1]:
            grad_fp8, transposed = quantize_both(rows, scaling, GRADIENT[scaling])
        else:  # a frozen weight
            grad_fp8 = quantize(rows, scaling, GRADIENT[scaling])
        input_grad = None
        if ctx.needs_input_grad[0]:
            weight_transposed = transposed_weight(weight, scale, scaling, ctx.weight_in_fp8, grad_fp8.scale)
            input_grad = matmul(grad_fp8, weight_transposed, grad.dtype).unflatten(0, grad.shape[:-1])
        if transposed is None:
            return input_grad, None, None, None, None, None
        if ctx.taps:
            return (input_grad, None, None, None, None, None, *transposed, *x_transposed)
        return input_grad, weight_gradient(transposed, Fp8Matrix(*x_transposed), ctx.dtype), None, None, None, None


def transposed_weight(weight: Tensor, scale: Tensor, scaling: Scaling, weight_in_fp8: bool, after: Tensor) -> Fp8Matrix:
    """Return Wᵀ `(in, out)` in fp8, of `weight` `(out, in)`.

    With `weight_in_fp8` the weight is fp8 already and is only transposed (tensorwise); else it is rounded.

    The backward computes Wᵀ, because a copy made in the forward would occupy memory until then. `after` is a tensor that
    depends on the gradient. Without it a compiler could move the computation of Wᵀ into the forward (`fp8_triton`).
    """
    if scaling == "rowwise":
        return quantize_transposed(weight, scaling, after=after)
    if not weight_in_fp8:
        return _round_transposed(weight, scale, E4M3, after)
    if weight.is_cuda:
        from meshwright.kernels.fp8_triton import transpose

        return Fp8Matrix(transpose(weight, after), scale)
    return Fp8Matrix(weight.t().contiguous(), scale)


def _round_transposed(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, after: Tensor | None = None) -> Fp8Matrix:
    """Return xᵀ `(inner, rows)` in fp8, of x `(rows, inner)`, with `scale` `()` or `(inner, 1)`.

    `after` is a tensor that must be computed before xᵀ; `transposed_weight` says why.
    """
    if x.is_cuda:
        from meshwright.kernels.fp8_triton import round_transposed

        return Fp8Matrix(round_transposed(x, inverse(scale), fp8_dtype, after), scale)
    return Fp8Matrix(round_with_scale(x.t(), scale, fp8_dtype).contiguous(), scale)


def _largest(x: Tensor, scaling: Scaling, *, by_row: bool) -> Tensor:
    """Return the largest magnitudes of x `(rows, columns)` that its scales are computed from.

    "tensorwise": one number `()`. "rowwise": of each row `(rows, 1)`, or without `by_row` of each column `(columns, 1)`.
    """
    if scaling == "rowwise":
        return x.abs().amax(dim=1, keepdim=True) if by_row else x.abs().amax(dim=0).unsqueeze(1)
    # Rows first: torch.compile fuses this reduction with the kernel that computes x.
    return x.abs().amax(dim=1).amax()
