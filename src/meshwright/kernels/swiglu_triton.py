"""The Triton kernels of `swiglu`; imported only with a CUDA device, as CPU builds of torch lack Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements per program: enough loads in flight for the memory bandwidth."""
ROW_BLOCK = 1024
"""Elements at a time of the backward with weights, which sums over a row."""


@torch.library.custom_op("meshwright::swiglu", mutates_args=())
def fused_swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) · up, by row times `weights`; see `kernels.swiglu`."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    count = out.numel()
    if count:  # a rank whose experts no token has chosen has no rows
        inputs = gate_up.contiguous(), None if weights is None else weights.contiguous()
        _forward[(triton.cdiv(count, BLOCK),)](*inputs, out, count, width, BLOCK, num_warps=8)
    return out


@torch.library.custom_op("meshwright::swiglu_backward", mutates_args=())
def fused_swiglu_backward(gate_up: Tensor, grad: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of `gate_up` and `weights` from that of the output; the second is empty without weights."""
    gate_up_grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    weights_grad = (
        torch.empty_like(weights, memory_format=torch.contiguous_format) if weights is not None else grad.new_empty(0)
    )
    count, width = grad.numel(), gate_up.shape[-1] // 2
    inputs = gate_up.contiguous(), grad.contiguous()
    if not count:
        return gate_up_grad, weights_grad
    if weights is None:
        _backward[(triton.cdiv(count, BLOCK),)](*inputs, gate_up_grad, count, width, BLOCK, num_warps=8)
    else:
        outputs = gate_up_grad, weights_grad
        block = min(ROW_BLOCK, triton.next_power_of_2(width))
        _weighted_backward[(count // width,)](*inputs, weights.contiguous(), *outputs, width, block, num_warps=4)
    return gate_up_grad, weights_grad


@fused_swiglu.register_fake
def _(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    del weights
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@fused_swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    like = grad.new_empty(0) if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format), like


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    gate_up, weights = ctx.saved_tensors
    gate_up_grad, weights_grad = fused_swiglu_backward(gate_up, grad, weights)
    return gate_up_grad, None if weights is None else weights_grad


fused_swiglu.register_autograd(_autograd_backward, setup_context=_setup_context)


@triton.jit
def _forward(gate_up, weights, out, count, width: tl.constexpr, block: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    position = index // width * (2 * width) + index % width
    gate = tl.load(gate_up + position, mask=inside).to(tl.float32)
    up = tl.load(gate_up + position + width, mask=inside).to(tl.float32)
    activation = gate * tl.sigmoid(gate) * up
    if weights is not None:
        activation *= tl.load(weights + index // width, mask=inside).to(tl.float32)
    tl.store(out + index, activation.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate_up, grad, out, count, width: tl.constexpr, block: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    position = index // width * (2 * width) + index % width
    gate = tl.load(gate_up + position, mask=inside).to(tl.float32)
    up = tl.load(gate_up + position + width, mask=inside).to(tl.float32)
    slope = tl.load(grad + index, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    gate_grad = slope * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(out + position, gate_grad.to(out.dtype.element_ty), mask=inside)
    tl.store(out + position + width, (slope * silu).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_backward(
    gate_up, grad, weights, gate_up_grad, weights_grad, width: tl.constexpr, block: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = column < width
        position = row * (2 * width) + column
        gate = tl.load(gate_up + position, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + position + width, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += slope * silu * up
        slope *= weight
        gate_grad = slope * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(gate_up_grad + position, gate_grad.to(gate_up_grad.dtype.element_ty), mask=inside)
        tl.store(gate_up_grad + position + width, (slope * silu).to(gate_up_grad.dtype.element_ty), mask=inside)
    tl.store(weights_grad + row, tl.sum(total).to(weights_grad.dtype.element_ty))
