"""The gated feed-forward network, down(silu(gate) · up) (Shazeer 2020), with its two products in fp8 in one piece.

Taken apart, the activation is written in bf16 only to be measured and rounded, and so is its gradient, twice as wide. Here each is made
from the projection twice over, once for its largest magnitude and once to be rounded, and never lies in memory as it is. Bytes for every
element of the activation: 10 forward (12 apart), 16 backward (22 apart), and 6 less are held.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import fp8_products as fp8
from meshwright.kernels.fp8_products import E4M3, GRADIENT, Low
from meshwright.kernels.linear import Linear
from meshwright.kernels.swiglu import swiglu


def gated_mlp(x: Tensor, gate_up: Linear, down: Linear, *, plain: bool = False) -> Tensor:
    """down(silu(gate) · up) of x `(…, in)`, `gate_up` giving the gates first.

    In one piece where both layers multiply in fp8 with one scale a tensor and have no biases; `plain` takes it apart.
    """
    together = gate_up.scaling == down.scaling == "tensorwise" and gate_up.bias is None and down.bias is None
    if plain or not together:
        return down(swiglu(gate_up(x), plain=plain))
    trains = torch.is_grad_enabled()
    taps = (*(gate_up.taps or ()), *(down.taps or ())) if trains else ()
    keeps = trains and (gate_up.weight.requires_grad or down.weight.requires_grad)
    came = [part for layer in (gate_up, down) for part in (layer.low_weight or (None, None))]
    return _Gated.apply(x, gate_up.weight, down.weight, *came, keeps, *taps)


def miscompiled(device: torch.device) -> str | None:
    """Name of the kernel whose transposed output differs from its straight output on a small matrix; None if all agree.

    Some assemblers have compiled these kernels incorrectly.
    """
    draw = torch.Generator().manual_seed(0)
    projected = torch.randn(256, 192, generator=draw).to(device, torch.bfloat16)
    slope = projected[:, :96].contiguous()
    pairs = {
        "fp8_round_both": fp8.low_both(projected, "tensorwise"),
        "fp8_swiglu": _activation(projected),
        "fp8_swiglu_gradient": _activation_gradient(projected, slope, GRADIENT["tensorwise"]),
    }
    for name, (straight, turned) in pairs.items():
        if not torch.equal(straight.values.view(torch.uint8).t(), turned.values.view(torch.uint8)):
            return name
    return None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        second: Tensor,
        first_values: Tensor | None,
        first_scale: Tensor | None,
        second_values: Tensor | None,
        second_scale: Tensor | None,
        keeps: bool,
        *taps: Tensor,
    ) -> Tensor:
        wide = fp8.low_weight(first, first_values, first_scale)
        narrow = fp8.low_weight(second, second_values, second_scale)
        rows = x.flatten(0, -2)
        here, turned = fp8.low_both(rows, "tensorwise") if keeps else (fp8.low(rows, "tensorwise"), None)
        projected = fp8.product(here, wide, x.dtype, fast=True)
        inner, inner_turned = _activation(projected)
        if turned is not None:
            ctx.came_low, ctx.split = (first_values is not None, second_values is not None), len(taps) > 0
            weights = (
                first if first_values is None else first_values,
                wide.scale,
                second if second_values is None else second_values,
                narrow.scale,
            )
            ctx.save_for_backward(*turned, projected, *inner_turned, *weights)
        return fp8.product(inner, narrow, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *x_turned, projected, values, scale, first, first_scale, second, second_scale = ctx.saved_tensors
        inner_turned, fp8_dtype = Low(values, scale), GRADIENT["tensorwise"]
        here, turned = fp8.low_both(grad.flatten(0, -2), "tensorwise", fp8_dtype)
        narrow = fp8.weight_turned(second, second_scale, "tensorwise", ctx.came_low[1], here.scale)
        slope = fp8.product(here, narrow, grad.dtype)
        wide_here, wide_turned = _activation_gradient(projected, slope, fp8_dtype)
        x_grad = None
        if ctx.needs_input_grad[0]:
            wide = fp8.weight_turned(first, first_scale, "tensorwise", ctx.came_low[0], wide_here.scale)
            x_grad = fp8.product(wide_here, wide, grad.dtype).unflatten(0, grad.shape[:-1])
        came = (None,) * 5
        if ctx.split:
            return (x_grad, None, None, *came, *wide_turned, *x_turned, *turned, *inner_turned)
        first_grad = fp8.weight_gradient(wide_turned, Low(*x_turned), grad.dtype) if ctx.needs_input_grad[1] else None
        second_grad = fp8.weight_gradient(turned, inner_turned, grad.dtype) if ctx.needs_input_grad[2] else None
        return (x_grad, first_grad, second_grad, *came)


def _activation(projected: Tensor) -> tuple[Low, Low]:
    """silu(gate) · up in fp8, and turned, of `(tokens, 2 · width)`."""
    made = _swiglu(projected)
    scale = fp8.scale_of(made.abs().amax(dim=1).amax(), E4M3)
    if projected.is_cuda:
        from meshwright.kernels.gated_triton import round_swiglu

        values, turned = round_swiglu(projected, fp8.inverse(scale), E4M3)
        return Low(values, scale), Low(turned, scale)
    values = fp8.rounded(made, scale, E4M3)
    return Low(values, scale), Low(values.t().contiguous(), scale)


def _activation_gradient(projected: Tensor, slope: Tensor, fp8_dtype: torch.dtype) -> tuple[Low, Low]:
    """The gradient of `(tokens, 2 · width)` in fp8, and turned, from that of the activation `(tokens, width)`."""
    halves = _swiglu_gradient(projected, slope)
    largest = torch.maximum(halves[0].abs().amax(dim=1), halves[1].abs().amax(dim=1)).amax()
    scale = fp8.scale_of(largest, fp8_dtype)
    if projected.is_cuda:
        from meshwright.kernels.gated_triton import round_swiglu_gradient

        values, turned = round_swiglu_gradient(projected, slope, fp8.inverse(scale), fp8_dtype)
        return Low(values, scale), Low(turned, scale)
    values = fp8.rounded(torch.cat(halves, dim=1), scale, fp8_dtype)
    return Low(values, scale), Low(values.t().contiguous(), scale)


def _swiglu(projected: Tensor) -> Tensor:
    gate, up = projected.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_gradient(projected: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = projected.float().chunk(2, dim=-1)
    slope, sigmoid = slope.float(), torch.sigmoid(gate)
    silu = gate * sigmoid
    return slope * up * (sigmoid + silu * (1 - sigmoid)), slope * silu
