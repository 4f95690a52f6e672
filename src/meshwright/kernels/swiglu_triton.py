"""The Triton kernels of `gated_activation`. Import them only with a CUDA device, because CPU builds of torch lack Triton."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements that one program computes: enough loads in flight for the memory bandwidth."""
ROW_BLOCK = 1024
"""Elements of a row that the backward with weights computes at a time. It sums over the whole row."""
GELU_LINEAR = tl.constexpr(2 * (2 / math.pi) ** 0.5)
GELU_CUBIC = tl.constexpr(2 * (2 / math.pi) ** 0.5 * 0.044715)
"""GELU's tanh approximation is x · (1 + tanh(u(x))) / 2, where 2 · u(x) = GELU_LINEAR · x + GELU_CUBIC · x³."""


@torch.library.custom_op("meshwright::swiglu", mutates_args=())
def fused_gated_activation(gate_up: Tensor, weights: Tensor | None = None, gelu: bool = False) -> Tensor:
    """Return silu(gate) · up or gelu(gate) · up, `(…, width)`, of `gate_up` `(…, 2 · width)`, which has the gates first.

    `weights` `(…)` multiply the rows of the result, if given; see `kernels.swiglu`.
    """
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    count = out.numel()
    if count:  # a rank whose experts no token has chosen has no rows
        inputs = gate_up.contiguous(), None if weights is None else weights.contiguous()
        _forward[(triton.cdiv(count, BLOCK),)](*inputs, out, count, width, BLOCK, gelu, num_warps=8)
    return out


@torch.library.custom_op("meshwright::swiglu_backward", mutates_args=())
def fused_gated_activation_backward(
    gate_up: Tensor, grad: Tensor, weights: Tensor | None = None, gelu: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate_up` and of `weights`, from the gradient `grad` `(…, width)` of the output.

    Without `weights` the second gradient is an empty tensor.
    """
    gate_up_grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    weights_grad = (
        torch.empty_like(weights, memory_format=torch.contiguous_format) if weights is not None else grad.new_empty(0)
    )
    count = grad.numel()
    width = gate_up.shape[-1] // 2
    inputs = gate_up.contiguous(), grad.contiguous()
    if not count:
        return gate_up_grad, weights_grad
    if weights is None:
        _backward[(triton.cdiv(count, BLOCK),)](*inputs, gate_up_grad, count, width, BLOCK, gelu, num_warps=8)
    else:
        outputs = gate_up_grad, weights_grad
        block = min(ROW_BLOCK, triton.next_power_of_2(width))
        rows = (count // width,)
        _weighted_backward[rows](*inputs, weights.contiguous(), *outputs, width, block, gelu, num_warps=4)
    return gate_up_grad, weights_grad


@fused_gated_activation.register_fake
def _(gate_up: Tensor, weights: Tensor | None = None, gelu: bool = False) -> Tensor:
    del weights, gelu
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@fused_gated_activation_backward.register_fake
def _(gate_up: Tensor, grad: Tensor, weights: Tensor | None = None, gelu: bool = False) -> tuple[Tensor, Tensor]:
    del gelu
    like = grad.new_empty(0) if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format), like


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, bool], output: Tensor) -> None:
    del output
    gate_up, weights, ctx.gelu = inputs
    ctx.save_for_backward(gate_up, weights)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    gate_up, weights = ctx.saved_tensors
    gate_up_grad, weights_grad = fused_gated_activation_backward(gate_up, grad, weights, ctx.gelu)
    return gate_up_grad, None if weights is None else weights_grad, None


fused_gated_activation.register_autograd(_autograd_backward, setup_context=_setup_context)


@triton.jit
def gate_sigmoid(gate, GELU: tl.constexpr) -> tl.tensor:
    """Return the factor of a gate: sigmoid(gate) for SiLU. For GELU it is (1 + tanh(u)) / 2, which equals sigmoid(2u)."""
    if GELU:
        gate = gate * (GELU_LINEAR + GELU_CUBIC * gate * gate)
    return tl.sigmoid(gate)


@triton.jit
def _gate_derivative(gate, sigmoid, GELU: tl.constexpr) -> tl.tensor:
    """Return the derivative of gate · `gate_sigmoid`(gate); `sigmoid` is `gate_sigmoid`(gate)."""
    derivative = gate * sigmoid * (1 - sigmoid)
    if GELU:
        derivative *= GELU_LINEAR + 3 * GELU_CUBIC * gate * gate
    return sigmoid + derivative


@triton.jit
def _forward(gate_up, weights, out, count, width: tl.constexpr, block: tl.constexpr, GELU: tl.constexpr) -> None:
    """Compute `block` elements of the output."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    position = index // width * (2 * width) + index % width
    gate = tl.load(gate_up + position, mask=inside).to(tl.float32)
    up = tl.load(gate_up + position + width, mask=inside).to(tl.float32)
    activation = gate * gate_sigmoid(gate, GELU) * up
    if weights is not None:
        activation *= tl.load(weights + index // width, mask=inside).to(tl.float32)
    tl.store(out + index, activation.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate_up, grad, out, count, width: tl.constexpr, block: tl.constexpr, GELU: tl.constexpr) -> None:
    """Compute the gradients of `block` elements of gate and of up, without weights."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    position = index // width * (2 * width) + index % width
    gate = tl.load(gate_up + position, mask=inside).to(tl.float32)
    up = tl.load(gate_up + position + width, mask=inside).to(tl.float32)
    grad_out = tl.load(grad + index, mask=inside).to(tl.float32)
    sigmoid = gate_sigmoid(gate, GELU)
    gate_grad = grad_out * up * _gate_derivative(gate, sigmoid, GELU)
    tl.store(out + position, gate_grad.to(out.dtype.element_ty), mask=inside)
    tl.store(out + position + width, (grad_out * (gate * sigmoid)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_backward(
    gate_up, grad, weights, gate_up_grad, weights_grad, width: tl.constexpr, block: tl.constexpr, GELU: tl.constexpr
) -> None:
    """Compute the gradients of one row of gate and up, and of the row's weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = column < width
        position = row * (2 * width) + column
        gate = tl.load(gate_up + position, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + position + width, mask=inside, other=0.0).to(tl.float32)
        grad_out = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = gate_sigmoid(gate, GELU)
        total += grad_out * (gate * sigmoid) * up
        grad_out *= weight
        gate_grad = grad_out * up * _gate_derivative(gate, sigmoid, GELU)
        tl.store(gate_up_grad + position, gate_grad.to(gate_up_grad.dtype.element_ty), mask=inside)
        tl.store(
            gate_up_grad + position + width,
            (grad_out * (gate * sigmoid)).to(gate_up_grad.dtype.element_ty),
            mask=inside,
        )
    tl.store(weights_grad + row, tl.sum(total).to(weights_grad.dtype.element_ty))
