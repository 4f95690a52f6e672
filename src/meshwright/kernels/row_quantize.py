"""Rounding of activations to e4m3 with one scale per token, alone or fused into the operation before, for inference.

The numbers are those of `fp8_products.quantize` by rows, of the operation's result rounded to the dtype of its input. On CUDA a Triton
kernel computes a token in one program, so the fp8 copy costs no further kernel where it is fused. Elsewhere, and with `plain`, the
separate operators run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.add_norm import add_rms_norm
from meshwright.kernels.fp8_products import Fp8Matrix, quantize
from meshwright.kernels.swiglu import swiglu

MAX_WIDTH = 32768
"""Widest token that one program holds in registers."""


def quantize_rows(x: Tensor, *, plain: bool = False) -> Fp8Matrix:
    """x `(…, width)` in e4m3, with scales `(…, 1)`."""
    if _runs_kernel(x, plain):
        from meshwright.kernels.row_quantize_triton import round_rows

        return round_rows(x)
    values, scale = quantize(x.flatten(0, -2), "rowwise")
    return Fp8Matrix(values.view(x.shape), scale.view(*x.shape[:-1], 1))


def quantize_add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, plain: bool = False
) -> tuple[Tensor, Fp8Matrix]:
    """Return `x + delta` `(…, width)`, and its RMSNorm in e4m3 as `quantize_rows` gives it."""
    equal = x.dtype == delta.dtype == weight.dtype and x.shape == delta.shape
    if equal and _runs_kernel(x, plain):
        from meshwright.kernels.row_quantize_triton import round_add_rms_norm

        return round_add_rms_norm(x, delta, weight, eps)
    total, normed = add_rms_norm(x, delta, weight, eps, plain=plain)
    return total, quantize_rows(normed, plain=plain)


def quantize_swiglu(gate_up: Tensor, *, plain: bool = False) -> Fp8Matrix:
    """silu(gate) · up of `gate_up` `(…, 2·width)`, which has the gates first, in e4m3 `(…, width)`."""
    if _runs_kernel(gate_up, plain, gate_up.shape[-1] // 2):
        from meshwright.kernels.row_quantize_triton import round_swiglu_rows

        return round_swiglu_rows(gate_up)
    return quantize_rows(swiglu(gate_up, plain=plain), plain=plain)


def _runs_kernel(x: Tensor, plain: bool, width: int | None = None) -> bool:
    differentiated = torch.is_grad_enabled() and x.requires_grad
    narrow = (x.shape[-1] if width is None else width) <= MAX_WIDTH
    return x.is_cuda and x.element_size() <= 4 and narrow and not plain and not differentiated
