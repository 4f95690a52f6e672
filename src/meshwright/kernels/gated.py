"""The gated feed-forward network (Shazeer 2020) as one operator: its two fp8 matmuls with the SiLU between them.

With separate layers the activation is written in bf16, and read twice: for its largest magnitude and for the rounding to
fp8. The backward does the same with the gradient of the gate/up projection, which is twice as wide. The fused network
computes both from the projection instead, once for the largest magnitude and once for the rounding, and never writes
them in bf16.

Bytes moved per element of the activation: 10 in the forward (12 with separate layers) and 16 in the backward (22).
6 bytes fewer are saved for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import fp8_matmuls as fp8
from meshwright.kernels.fp8_matmuls import E4M3, GRADIENT, Fp8Matrix
from meshwright.kernels.linear import Linear
from meshwright.kernels.swiglu import gated_activation


def gated_mlp(x: Tensor, gate_up: Linear, down: Linear, *, gelu: bool = False, reference: bool = False) -> Tensor:
    """Return down(gated_activation(gate_up(x))) `(…, out)` of x `(…, in)`, with SiLU, or with `gelu`.

    The output of `gate_up` `(…, 2 · width)` has the gates first.

    The fused operator runs if all of these hold: SiLU; both layers multiply in fp8 with one scale per tensor; neither
    has a bias or an adapter; and with gradients enabled both weights are trained. Otherwise, and with `reference`, the layers
    run separately.
    """
    layers = (gate_up, down)
    fused = all(layer.scaling == "tensorwise" and layer.bias is None and layer.adapter is None for layer in layers)
    fused = fused and (not torch.is_grad_enabled() or all(layer.weight.requires_grad for layer in layers))
    if reference or gelu or not fused:
        return down(gated_activation(gate_up(x), gelu=gelu, reference=reference))
    with_grad = torch.is_grad_enabled()
    taps = (*(gate_up.taps or ()), *(down.taps or ())) if with_grad else ()
    save = with_grad and (gate_up.weight.requires_grad or down.weight.requires_grad)
    fp8_weights = [part for layer in (gate_up, down) for part in (layer.fp8_weight or (None, None))]
    return _Gated.apply(x, gate_up.weight, down.weight, *fp8_weights, save, *taps)


def find_miscompiled_kernel(device: torch.device) -> str | None:
    """Return the name of a kernel that was compiled incorrectly, or None.

    Some assemblers have compiled these kernels incorrectly. Each kernel writes a matrix and its transpose. They are
    compared for a small matrix on `device`.
    """
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(256, 192, generator=generator).to(device, torch.bfloat16)
    grad_out = projected[:, :96].contiguous()
    pairs = {
        "fp8_round_both": fp8.quantize_both(projected, "tensorwise"),
        "fp8_swiglu": _activation(projected),
        "fp8_swiglu_gradient": _activation_gradient(projected, grad_out, GRADIENT["tensorwise"]),
    }
    for name, (straight, transposed) in pairs.items():
        if not torch.equal(straight.values.view(torch.uint8).t(), transposed.values.view(torch.uint8)):
            return name
    return None


class _Gated(torch.autograd.Function):
    """The fused network.

    `first` is the weight `(2 · width, in)` of gate and up, `second` the weight `(in, width)` of down. `first_values` to
    `second_scale` are both weights in fp8 if they were gathered so, else None. `taps`: see `fp8_matmuls.linear`.
    """

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
        save: bool,
        *taps: Tensor,
    ) -> Tensor:
        wide = fp8.weight_as_fp8(first, first_values, first_scale)
        narrow = fp8.weight_as_fp8(second, second_values, second_scale)
        rows = x.flatten(0, -2)
        x_fp8, transposed = fp8.quantize_both(rows, "tensorwise") if save else (fp8.quantize(rows, "tensorwise"), None)
        projected = fp8.matmul(x_fp8, wide, x.dtype, fast=True)
        inner, inner_transposed = _activation(projected)
        if transposed is not None:
            ctx.weight_in_fp8 = (first_values is not None, second_values is not None)
            ctx.split = len(taps) > 0
            weights = (
                first if first_values is None else first_values,
                wide.scale,
                second if second_values is None else second_values,
                narrow.scale,
            )
            ctx.save_for_backward(*transposed, projected, *inner_transposed, *weights)
        return fp8.matmul(inner, narrow, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *x_transposed, projected, values, scale, first, first_scale, second, second_scale = ctx.saved_tensors
        inner_transposed = Fp8Matrix(values, scale)
        fp8_dtype = GRADIENT["tensorwise"]
        grad_fp8, grad_transposed = fp8.quantize_both(grad.flatten(0, -2), "tensorwise", fp8_dtype)
        narrow = fp8.transposed_weight(second, second_scale, "tensorwise", ctx.weight_in_fp8[1], grad_fp8.scale)
        activation_grad = fp8.matmul(grad_fp8, narrow, grad.dtype)
        gate_up_grad, gate_up_transposed = _activation_gradient(projected, activation_grad, fp8_dtype)
        x_grad = None
        if ctx.needs_input_grad[0]:
            wide = fp8.transposed_weight(first, first_scale, "tensorwise", ctx.weight_in_fp8[0], gate_up_grad.scale)
            x_grad = fp8.matmul(gate_up_grad, wide, grad.dtype).unflatten(0, grad.shape[:-1])
        # Gradients in the order of the forward's arguments; the fp8 weights, their scales and `save` have none.
        unused = (None,) * 5
        if ctx.split:
            return (
                x_grad,
                None,
                None,
                *unused,
                *gate_up_transposed,
                *x_transposed,
                *grad_transposed,
                *inner_transposed,
            )
        first_grad = (
            fp8.weight_gradient(gate_up_transposed, Fp8Matrix(*x_transposed), grad.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        second_grad = (
            fp8.weight_gradient(grad_transposed, inner_transposed, grad.dtype) if ctx.needs_input_grad[2] else None
        )
        return (x_grad, first_grad, second_grad, *unused)


def _activation(projected: Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return silu(gate) · up `(tokens, width)` in fp8, and its transpose, of `projected` `(tokens, 2 · width)`."""
    activation = _swiglu(projected)
    scale = fp8.scale_of(activation.abs().amax(dim=1).amax(), E4M3)
    if projected.is_cuda:
        from meshwright.kernels.gated_triton import round_swiglu

        values, transposed = round_swiglu(projected, fp8.inverse(scale), E4M3)
        return Fp8Matrix(values, scale), Fp8Matrix(transposed, scale)
    values = fp8.round_with_scale(activation, scale, E4M3)
    return Fp8Matrix(values, scale), Fp8Matrix(values.t().contiguous(), scale)


def _activation_gradient(projected: Tensor, grad_out: Tensor, fp8_dtype: torch.dtype) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Return the gradient of `projected` `(tokens, 2 · width)` in fp8, and its transpose.

    `grad_out` `(tokens, width)` is the gradient of the activation.
    """
    halves = _swiglu_gradient(projected, grad_out)
    largest = torch.maximum(halves[0].abs().amax(dim=1), halves[1].abs().amax(dim=1)).amax()
    scale = fp8.scale_of(largest, fp8_dtype)
    if projected.is_cuda:
        from meshwright.kernels.gated_triton import round_swiglu_gradient

        values, transposed = round_swiglu_gradient(projected, grad_out, fp8.inverse(scale), fp8_dtype)
        return Fp8Matrix(values, scale), Fp8Matrix(transposed, scale)
    values = fp8.round_with_scale(torch.cat(halves, dim=1), scale, fp8_dtype)
    return Fp8Matrix(values, scale), Fp8Matrix(values.t().contiguous(), scale)


def _swiglu(projected: Tensor) -> Tensor:
    """Return silu(gate) · up `(tokens, width)` in fp32."""
    gate, up = projected.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_gradient(projected: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and of up, each `(tokens, width)` in fp32."""
    gate, up = projected.float().chunk(2, dim=-1)
    grad_out = grad_out.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return grad_out * up * (sigmoid + silu * (1 - sigmoid)), grad_out * silu
