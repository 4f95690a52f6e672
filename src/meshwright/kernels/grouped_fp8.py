"""Grouped matmuls of routed experts in fp8: outputs, and gradients of the inputs.

Every row of an operand has its own scale (`fp8_matmuls`). A row is a token's copy, the gradient of a token's copy, or one
output of an expert's matrix. In the backward an expert's matrix has one scale, the largest of its rows' scales, so that
one pass over the matrix rounds its transpose. Scales depend neither on the number of an expert's rows nor on the
layout of ranks, and the host reads no group size.

The weight gradient sums over rows, so that the scales of rows cannot be taken out of the sum. It is computed in the
compute dtype.

On CUDA, `torch._scaled_grouped_mm` multiplies (Hopper only). Elsewhere the same rounded numbers are multiplied in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import fp8_matmuls as fp8
from meshwright.kernels.fp8_matmuls import E4M3, Fp8Matrix
from meshwright.kernels.grouped import grouped_weight_gradient, groups_of
from meshwright.kernels.row_quantize import quantize_rows

GROUPED_MAJOR = 9
"""Major CUDA compute capability for which torch has grouped matmuls with scales per row: 9, Hopper."""


def grouped_linear_fp8(x: Tensor, weight: Tensor, offsets: Tensor, *, reference: bool = False) -> Tensor:
    """Return `grouped.grouped_linear` with rows and matrices rounded to e4m3: `(rows, out)` in the dtype of x.

    x is `(rows, in)`, `weight` `(groups, out, in)`, `offsets` `(groups,)` the end of each group's rows. `in` and `out` are
    multiples of 16. On CUDA one grouped matmul runs. Elsewhere, and with `reference`, a loop over the groups runs, for which
    the host reads the offsets.
    """
    return _grouped_linear_fp8(x, weight, offsets, reference)[0]


# These are custom operators for the same reasons as `grouped._grouped_linear`.
@torch.library.custom_op("meshwright::grouped_linear_fp8", mutates_args=())
def _grouped_linear_fp8(x: Tensor, weight: Tensor, offsets: Tensor, reference: bool) -> tuple[Tensor, Tensor]:
    """Return the matmul, and the largest scale of each matrix `(groups,)`, which the backward uses."""
    matrices = quantize_rows(weight)
    out = grouped_matmul(quantize_rows(x), matrices, offsets, x.dtype, reference=reference)
    return out, matrices.scale.amax((1, 2))


@torch.library.custom_op("meshwright::grouped_linear_fp8_backward", mutates_args=())
def _grouped_linear_fp8_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, scale: Tensor, reference: bool
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    x_grad = grouped_matmul(
        quantize_rows(grad), transposed_matrices(weight, scale), offsets, grad.dtype, reference=reference
    )
    return x_grad, grouped_weight_gradient(grad, x, weight, offsets, reference=reference)


def grouped_matmul(
    x: Fp8Matrix, matrices: Fp8Matrix, offsets: Tensor, dtype: torch.dtype, *, reference: bool = False
) -> Tensor:
    """Multiply each row of x `(rows, in)` by the transposed matrix of its group: `(rows, out)` in `dtype`.

    `matrices` is `(groups, out, in)`; rows are sorted by group, and `offsets` `(groups,)` are the ends of the groups.

    `use_fast_accum` makes the tensor cores keep partial sums in lower precision, in the forward and the backward. Without it
    torch selects a kernel that reaches a third of the FLOP rate with 1,024 rows per group.
    """
    if reference or not x.values.is_cuda or not x.values.shape[0]:
        out = torch.empty(x.values.shape[0], matrices.values.shape[1], dtype=dtype, device=x.values.device)
        for group, inside in enumerate(groups_of(offsets)):
            matrix = Fp8Matrix(matrices.values[group], matrices.scale[group])
            if inside.start < inside.stop:
                out[inside] = fp8.matmul(Fp8Matrix(x.values[inside], x.scale[inside]), matrix, dtype, fast=True)
        return out
    output = torch._scaled_grouped_mm(
        x.values,
        matrices.values.transpose(-2, -1),
        x.scale.squeeze(-1),
        matrices.scale.squeeze(-1),
        offs=offsets,
        out_dtype=torch.bfloat16,  # the only dtype that torch supports with scales per row
        use_fast_accum=True,
    )
    return output.to(dtype)


def transposed_matrices(matrices: Tensor, scale: Tensor) -> Fp8Matrix:
    """Return the transposes `(groups, in, out)` of `matrices` `(groups, out, in)` in e4m3; `scale` is `(groups,)`.

    The scales of the result are `(groups, in, 1)`: the matrix's scale, repeated for each row.
    """
    if matrices.is_cuda:
        from meshwright.kernels.grouped_fp8_triton import round_transposed

        values = round_transposed(matrices, fp8.inverse(scale), E4M3)
    else:
        values = fp8.round_with_scale(matrices.transpose(1, 2), scale[:, None, None], E4M3).contiguous()
    return Fp8Matrix(values, scale[:, None, None].expand(-1, matrices.shape[2], 1).contiguous())


@_grouped_linear_fp8.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor, reference: bool) -> tuple[Tensor, Tensor]:
    del offsets, reference
    return x.new_empty(x.shape[0], weight.shape[1]), weight.new_empty(weight.shape[0], dtype=torch.float32)


@_grouped_linear_fp8_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, scale: Tensor, reference: bool
) -> tuple[Tensor, Tensor]:
    del grad, offsets, scale, reference
    return torch.empty_like(x), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.reference = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _autograd_backward(ctx: Any, grad: Tensor, scale_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    del scale_grad
    return *_grouped_linear_fp8_backward(grad, *ctx.saved_tensors, ctx.reference), None, None


_grouped_linear_fp8.register_autograd(_autograd_backward, setup_context=_setup_context)
GROUPED_FP8_OPERATOR = torch.ops.meshwright.grouped_linear_fp8.default
"""The operator of grouped matmuls in fp8. It is used like `grouped.GROUPED_OPERATOR`."""
