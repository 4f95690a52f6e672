"""Grouped matrix products of routed experts in fp8: the output and the gradient of the rows; weight gradients keep the compute dtype.

Every row of an operand has a scale of its own (`fp8_products`): a token copy, its gradient, and for each expert an output row of its matrix
in the forward, an input column in the backward. Scales therefore depend neither on the number of an expert's rows nor on the layout of
ranks, and the host reads no group size. The weight gradient sums over rows, so scales of rows cannot be taken out of its sum.

On CUDA `torch._scaled_grouped_mm` multiplies (Hopper only). Elsewhere the same rounded numbers are multiplied in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import fp8_products as fp8
from meshwright.kernels.fp8_products import E4M3, Fp8Matrix
from meshwright.kernels.grouped import grouped_weight_gradient, groups_of
from meshwright.kernels.row_quantize import quantize_rows


def grouped_linear_fp8(x: Tensor, weight: Tensor, offsets: Tensor, *, plain: bool = False) -> Tensor:
    """`grouped.grouped_linear` with rows and matrices rounded to e4m3; the output has the dtype of x.

    On CUDA one grouped product; elsewhere, and with `plain`, a loop over the groups, for which the host reads their sizes. Widths are
    multiples of 16.
    """
    return _grouped_linear_fp8(x, weight, offsets, plain)


# Custom operators for the same reasons as `grouped._grouped_linear`.
@torch.library.custom_op("meshwright::grouped_linear_fp8", mutates_args=())
def _grouped_linear_fp8(x: Tensor, weight: Tensor, offsets: Tensor, plain: bool) -> Tensor:
    return grouped_matmul(quantize_rows(x), quantize_rows(weight), offsets, x.dtype, plain=plain)


@torch.library.custom_op("meshwright::grouped_linear_fp8_backward", mutates_args=())
def _grouped_linear_fp8_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, plain: bool
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    x_grad = grouped_matmul(quantize_rows(grad), quantize_columns(weight), offsets, grad.dtype, plain=plain)
    return x_grad, grouped_weight_gradient(grad, x, weight, offsets, plain=plain)


def grouped_matmul(
    x: Fp8Matrix, matrices: Fp8Matrix, offsets: Tensor, dtype: torch.dtype, *, plain: bool = False
) -> Tensor:
    """Each row of x `(rows, in)` times its group's matrix, transposed: `(rows, out)` in `dtype`, with matrices `(groups, out, in)`.

    Tensor cores keep partial sums in lower precision, in forward and backward: without, torch takes a kernel that reaches a third of the
    rate at 1,024 rows a group.
    """
    if plain or not x.values.is_cuda or not x.values.shape[0]:
        out = torch.empty(x.values.shape[0], matrices.values.shape[1], dtype=dtype, device=x.values.device)
        for group, inside in enumerate(groups_of(offsets)):
            matrix = Fp8Matrix(matrices.values[group], matrices.scale[group])
            if inside.start < inside.stop:
                out[inside] = fp8.matmul(Fp8Matrix(x.values[inside], x.scale[inside]), matrix, dtype, fast=True)
        return out
    product = torch._scaled_grouped_mm(
        x.values,
        matrices.values.transpose(-2, -1),
        x.scale.squeeze(-1),
        matrices.scale.squeeze(-1),
        offs=offsets,
        out_dtype=torch.bfloat16,  # the only one with scales per row
        use_fast_accum=True,
    )
    return product.to(dtype)


def quantize_columns(matrices: Tensor) -> Fp8Matrix:
    """The transposes `(groups, in, out)` of matrices `(groups, out, in)` in e4m3, with scales `(groups, in, 1)`."""
    if matrices.is_cuda:
        from meshwright.kernels.grouped_fp8_triton import round_columns

        return round_columns(matrices, E4M3)
    return quantize_rows(matrices.transpose(1, 2).contiguous())


@_grouped_linear_fp8.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor, plain: bool) -> Tensor:
    del offsets, plain
    return x.new_empty(x.shape[0], weight.shape[1])


@_grouped_linear_fp8_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, plain: bool) -> tuple[Tensor, Tensor]:
    del grad, offsets, plain
    return torch.empty_like(x), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    del output
    *tensors, ctx.plain = inputs
    ctx.save_for_backward(*tensors)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_grouped_linear_fp8_backward(grad, *ctx.saved_tensors, ctx.plain), None, None


_grouped_linear_fp8.register_autograd(_autograd_backward, setup_context=_setup_context)
GROUPED_FP8_OPERATOR = torch.ops.meshwright.grouped_linear_fp8.default
"""As `grouped.GROUPED_OPERATOR`."""
