"""The Triton kernels of `swiglu`; imported only with a CUDA device, as CPU builds of torch lack Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements per program: enough loads in flight for the memory bandwidth."""


@torch.library.custom_op("meshwright::swiglu", mutates_args=())
def fused_swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up; see `kernels.swiglu`."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    count = out.numel()
    if count:  # a rank whose experts no token has chosen has no rows
        _forward[(triton.cdiv(count, BLOCK),)](gate_up.contiguous(), out, count, width, BLOCK, num_warps=8)
    return out


@torch.library.custom_op("meshwright::swiglu_backward", mutates_args=())
def fused_swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `gate_up` from that of the output."""
    out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    count = grad.numel()
    grid = (triton.cdiv(count, BLOCK),)
    if count:
        _backward[grid](gate_up.contiguous(), grad.contiguous(), out, count, gate_up.shape[-1] // 2, BLOCK, num_warps=8)
    return out


@fused_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@fused_swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> Tensor:
    del grad
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[0])


def _autograd_backward(ctx: Any, grad: Tensor) -> Tensor:
    return fused_swiglu_backward(ctx.saved_tensors[0], grad)


fused_swiglu.register_autograd(_autograd_backward, setup_context=_setup_context)


@triton.jit
def _forward(gate_up, out, count, width: tl.constexpr, block: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    position = index // width * (2 * width) + index % width
    gate = tl.load(gate_up + position, mask=inside).to(tl.float32)
    up = tl.load(gate_up + position + width, mask=inside).to(tl.float32)
    tl.store(out + index, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


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
