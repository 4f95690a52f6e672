"""Rounding of activations to 8 bits, alone or fused into the operation before, for inference.

A token has one scale, or one for each 128 numbers. The numbers are those of `fp8_matmuls.quantize` by rows (e4m3), of
`int8_matmuls.quantize`, or of `block_matmuls.quantize_groups`, of the operation's result rounded to the dtype of its
input. On CUDA a Triton kernel computes a token in one program, so the rounded copy costs no further kernel where it is
fused. Elsewhere, and with `plain`, the separate operators run.
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
"""A matrix of 8-bit numbers with a scale for each row, each 128 numbers of a row, or each block of a weight."""
DTYPES: dict[LayerFormat, torch.dtype] = {"fp8": E4M3, "int8": torch.int8, "fp8 blocks": E4M3}
GROUPS: dict[LayerFormat, int] = {"fp8 blocks": FP8_BLOCK}
"""Numbers of a token that share a scale; without an entry all do."""


def rounded_matrix(values: Tensor, scale: Tensor, number_format: LayerFormat) -> RoundedMatrix:
    """Numbers of a format, and the scale of each row, or of each block of a weight."""
    if number_format == "fp8 blocks":
        return Fp8Blocks(values, scale)
    return Int8Matrix(values, scale) if number_format == "int8" else Fp8Matrix(values, scale)


MAX_WIDTH = 32768
"""Widest token that one program holds in registers."""


@overload
def quantize_rows(x: Tensor, number_format: Literal["fp8"] = "fp8", *, plain: bool = False) -> Fp8Matrix: ...
@overload
def quantize_rows(x: Tensor, number_format: LayerFormat, *, plain: bool = False) -> RoundedMatrix: ...
def quantize_rows(x: Tensor, number_format: LayerFormat = "fp8", *, plain: bool = False) -> RoundedMatrix:
    """x `(…, width)` in 8 bits, with scales `(…, 1)`, or those of `Fp8Groups`."""
    if _runs_kernel(x, plain):
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
    plain: bool = False,
) -> tuple[Tensor, RoundedMatrix]:
    """Return `x + delta` `(…, width)`, and its RMSNorm in 8 bits as `quantize_rows` gives it; `plus_one` as in `rms_norm`."""
    equal = x.dtype == delta.dtype == weight.dtype and x.shape == delta.shape
    if equal and _runs_kernel(x, plain):
        from meshwright.kernels.row_quantize_triton import round_add_rms_norm

        return round_add_rms_norm(
            x, delta, weight, eps, DTYPES[number_format], plus_one=plus_one, group=GROUPS.get(number_format, 0)
        )
    total, normed = add_rms_norm(x, delta, weight, eps, plus_one=plus_one, plain=plain)
    return total, quantize_rows(normed, number_format, plain=plain)


def quantize_add_copies_rms_norm(
    x: Tensor,
    copies: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    eps: float,
    number_format: LayerFormat = "fp8",
    *,
    plus_one: bool = False,
    plain: bool = False,
) -> tuple[Tensor, RoundedMatrix]:
    """`quantize_add_rms_norm` of x `(1, tokens, width)` and the output of an MoE layer, as of
    `add_norm.add_copies_rms_norm`."""
    if x.dtype == copies.dtype == weight.dtype and _runs_kernel(x, plain):
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
    total, normed = add_copies_rms_norm(x, copies, shared, weight, eps, plus_one=plus_one, plain=plain)
    return total, quantize_rows(normed, number_format, plain=plain)


def quantize_gated(
    gate_up: Tensor, number_format: LayerFormat = "fp8", *, gelu: bool = False, plain: bool = False
) -> RoundedMatrix:
    """`gated_activation` of `gate_up` `(…, 2·width)`, which has the gates first, in 8 bits `(…, width)`."""
    if _runs_kernel(gate_up, plain, gate_up.shape[-1] // 2):
        from meshwright.kernels.row_quantize_triton import round_gated_rows

        return round_gated_rows(gate_up, DTYPES[number_format], gelu=gelu, group=GROUPS.get(number_format, 0))
    return quantize_rows(gated_activation(gate_up, gelu=gelu, plain=plain), number_format, plain=plain)


def _runs_kernel(x: Tensor, plain: bool, width: int | None = None) -> bool:
    differentiated = torch.is_grad_enabled() and x.requires_grad
    narrow = (x.shape[-1] if width is None else width) <= MAX_WIDTH
    return x.is_cuda and x.element_size() <= 4 and narrow and not plain and not differentiated
