"""Rounds activations to 8 bits for inference, alone or fused into the preceding operation.

Each token has one scale, or one scale per 128 numbers. The result equals the operation's result, rounded to the dtype of
its input, and then rounded by one of these functions:

    "fp8"          `fp8_matmuls.quantize` with a scale per row (e4m3)
    "int8"         `int8_matmuls.quantize`
    "fp8 blocks"   `block_matmuls.quantize_groups` (e4m3)

On CUDA a Triton kernel computes a token in one program. Where it is fused, the rounding costs no kernel of its own.
Elsewhere, and with `reference`, the operators run separately.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from meshwright.kernels import int8_matmuls
from meshwright.kernels.add_norm import add_copies_rms_norm, add_rms_norm
from meshwright.kernels.block_matmuls import Fp8Blocks, Fp8Groups, quantize_groups
from meshwright.kernels.fp8_matmuls import E4M3, Fp8Matrix, quantize
from meshwright.kernels.int8_matmuls import Int8Matrix
from meshwright.kernels.swiglu import gated_activation
from meshwright.spec.weight_scheme import FP8_BLOCK, LayerFormat

RoundedMatrix = Fp8Matrix | Int8Matrix | Fp8Groups | Fp8Blocks
"""A matrix of 8-bit numbers with a scale per row, per 128 numbers of a row, or per block of a weight."""
DTYPES: dict[LayerFormat, torch.dtype] = {"fp8": E4M3, "int8": torch.int8, "fp8 blocks": E4M3}
"""dtype of the values in each format."""
GROUPS: dict[LayerFormat, int] = {"fp8 blocks": FP8_BLOCK}
"""How many numbers of a token share a scale. A format without an entry has one scale per token."""


def rounded_matrix(values: Tensor, scale: Tensor, number_format: LayerFormat) -> RoundedMatrix:
    """Return stored `values` and `scale` as the matrix type of their format.

    "fp8 blocks" is a weight with a scale per block. The other formats have a scale per row.
    """
    if number_format == "fp8 blocks":
        return Fp8Blocks(values, scale)
    return Int8Matrix(values, scale) if number_format == "int8" else Fp8Matrix(values, scale)


MAX_WIDTH = 32768
"""Largest width of a token that one program holds in registers."""


@overload
def quantize_rows(x: Tensor, number_format: Literal["fp8"] = "fp8", *, reference: bool = False) -> Fp8Matrix: ...
@overload
def quantize_rows(x: Tensor, number_format: LayerFormat, *, reference: bool = False) -> RoundedMatrix: ...
def quantize_rows(x: Tensor, number_format: LayerFormat = "fp8", *, reference: bool = False) -> RoundedMatrix:
    """Return x `(…, width)` in 8 bits, with scales `(…, 1)`; for "fp8 blocks" the scales of `Fp8Groups`."""
    if _runs_kernel(x, reference):
        from meshwright.kernels.row_quantize_triton import round_rows

        return round_rows(x, DTYPES[number_format], group=GROUPS.get(number_format, 0))
    if number_format == "int8":
        return int8_matmuls.quantize(x)
    if number_format == "fp8 blocks":
        return quantize_groups(x)
    values, scale = quantize(x.flatten(0, -2), "rowwise")
    return Fp8Matrix(values.view(x.shape), scale.view(*x.shape[:-1], 1))


def quantize_add_rms_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    number_format: LayerFormat = "fp8",
    *,
    plus_one: bool = False,
    reference: bool = False,
) -> tuple[Tensor, RoundedMatrix]:
    """Return `x + delta` `(…, width)`, and its RMSNorm in 8 bits, rounded as by `quantize_rows`.

    `weight` is `(width,)`; `eps` and `plus_one` are those of `norm.rms_norm`.
    """
    equal = x.dtype == delta.dtype == weight.dtype and x.shape == delta.shape
    if equal and _runs_kernel(x, reference):
        from meshwright.kernels.row_quantize_triton import round_add_rms_norm

        return round_add_rms_norm(
            x, delta, weight, eps, DTYPES[number_format], plus_one=plus_one, group=GROUPS.get(number_format, 0)
        )
    total, normed = add_rms_norm(x, delta, weight, eps, plus_one=plus_one, reference=reference)
    return total, quantize_rows(normed, number_format, reference=reference)


def quantize_add_copies_rms_norm(
    x: Tensor,
    copies: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    eps: float,
    number_format: LayerFormat = "fp8",
    *,
    plus_one: bool = False,
    reference: bool = False,
) -> tuple[Tensor, RoundedMatrix]:
    """Return x plus the output of an MoE layer, `(1, tokens, width)`, and the RMSNorm of this sum in 8 bits.

    The arguments are those of `add_norm.add_copies_rms_norm`: `copies` `(tokens, top_k, width)` and `shared`
    `(1, tokens, width)` are the summands of the MoE layer's output.
    """
    if x.dtype == copies.dtype == weight.dtype and _runs_kernel(x, reference):
        from meshwright.kernels.row_quantize_triton import round_add_copies_rms_norm

        return round_add_copies_rms_norm(
            x,
            copies,
            shared,
            weight,
            eps,
            DTYPES[number_format],
            plus_one=plus_one,
            group=GROUPS.get(number_format, 0),
        )
    total, normed = add_copies_rms_norm(x, copies, shared, weight, eps, plus_one=plus_one, reference=reference)
    return total, quantize_rows(normed, number_format, reference=reference)


def quantize_gated(
    gate_up: Tensor, number_format: LayerFormat = "fp8", *, gelu: bool = False, reference: bool = False
) -> RoundedMatrix:
    """Return `gated_activation` of `gate_up` in 8 bits, `(…, width)`. `gate_up` `(…, 2 · width)` has the gates first."""
    if _runs_kernel(gate_up, reference, gate_up.shape[-1] // 2):
        from meshwright.kernels.row_quantize_triton import round_gated_rows

        return round_gated_rows(gate_up, DTYPES[number_format], gelu=gelu, group=GROUPS.get(number_format, 0))
    return quantize_rows(gated_activation(gate_up, gelu=gelu, reference=reference), number_format, reference=reference)


def _runs_kernel(x: Tensor, reference: bool, width: int | None = None) -> bool:
    """Return whether the Triton kernels can compute tokens of `width` numbers (of x's width by default) of x."""
    differentiated = torch.is_grad_enabled() and x.requires_grad
    narrow = (x.shape[-1] if width is None else width) <= MAX_WIDTH
    return x.is_cuda and x.element_size() <= 4 and narrow and not reference and not differentiated
