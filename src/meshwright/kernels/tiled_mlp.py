"""A feed-forward network computed in tiles of tokens, so that its wide activations never exist for all tokens.

Only the input is saved. The backward computes the activations of a tile again, and directly after that the gradients of the tile. Gradients
of the weights are summed over tiles in fp32 (fp64 for fp64). Forward and backward are one custom operator each, so a compiled block stays
one graph. If the block is recomputed, this forward does not run again, because the backward does not need its output. Method: Bekman et al.
2025 (arXiv 2506.13996).

Shapes: x `(…, tokens, hidden)`; `first` `(width, hidden)`, or `(2 · width, hidden)` for gates and up; `second` `(hidden, width)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.linear import Linear
from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.swiglu import gated_activation
from meshwright.spec.blocks.feed_forward import Activation


def tiled_mlp(
    x: Tensor, first: Linear, second: Linear, tile: int, *, activation: Activation, reference: bool
) -> Tensor:
    """Return second(activation(first(x))), computed for `tile` tokens at a time.

    With `reference` torch's operators compute gated activations, instead of our kernel.
    """
    assert first.scaling is None and second.scaling is None, "matmuls in fp8 are not tiled"
    arguments = (x, first.weight, first.bias, second.weight, second.bias, tile, activation, reference)
    return _Tiled.apply(*arguments) if torch.is_grad_enabled() else tiled_forward(*arguments)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        first_bias: Tensor | None,
        second: Tensor,
        second_bias: Tensor | None,
        tile: int,
        activation: str,
        reference: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, first, first_bias, second, second_bias)
        ctx.options = tile, activation, reference
        return tiled_forward(x, first, first_bias, second, second_bias, tile, activation, reference)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, first, first_bias, second, second_bias = ctx.saved_tensors
        x_grad, *grads = tiled_backward(grad, x, first, first_bias, second, *ctx.options)
        first_grad, first_bias_grad, second_grad, second_bias_grad = grads
        return (
            x_grad,
            first_grad,
            None if first_bias is None else first_bias_grad,
            second_grad,
            None if second_bias is None else second_bias_grad,
            None,
            None,
            None,
        )


@torch.library.custom_op("meshwright::tiled_mlp", mutates_args=())
def tiled_forward(
    x: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    tile: int,
    activation: str,
    reference: bool,
) -> Tensor:
    """Return the network's output, shaped like x."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for tokens, part in _tiles(x, tile):
        activated = _activated(F.linear(part, first, first_bias), activation, reference)
        out.flatten(0, -2)[tokens] = F.linear(activated, second, second_bias)
    return out


@tiled_forward.register_fake
def _(
    x: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    tile: int,
    activation: str,
    reference: bool,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("meshwright::tiled_mlp_backward", mutates_args=())
def tiled_backward(
    grad: Tensor,
    x: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    tile: int,
    activation: str,
    reference: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, `first`, its bias, `second` and its bias. Gradients of biases are returned even if there are none."""
    x_grad = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = _Sums(x)
    grads = grad.flatten(0, -2)
    for tokens, part in _tiles(x, tile):
        out_grad = grads[tokens]
        projected = F.linear(part, first, first_bias)
        sums.add("second", out_grad.t() @ _activated(projected, activation, reference))
        sums.add("second_bias", out_grad.sum(0, dtype=sums.dtype))
        projected_grad = _activation_grad(projected, out_grad @ second, activation, reference)
        sums.add("first", projected_grad.t() @ part)
        sums.add("first_bias", projected_grad.sum(0, dtype=sums.dtype))
        x_grad.flatten(0, -2)[tokens] = projected_grad @ first
    return (
        x_grad,
        sums.result("first"),
        sums.result("first_bias"),
        sums.result("second"),
        sums.result("second_bias"),
    )


@tiled_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    tile: int,
    activation: str,
    reference: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x_grad = torch.empty_like(x, memory_format=torch.contiguous_format)
    weights = first, first.new_empty(first.shape[0]), second, second.new_empty(second.shape[0])
    first_grad, first_bias_grad, second_grad, second_bias_grad = (weight.new_empty(weight.shape) for weight in weights)
    return x_grad, first_grad, first_bias_grad, second_grad, second_bias_grad


class _Sums:
    """Sums over tiles, in the accumulation dtype of `like`. If there is only one tile, its values are not converted."""

    def __init__(self, like: Tensor) -> None:
        self.dtype = accumulate_dtype(like.dtype)
        self._result = like.dtype
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Tensor) -> None:
        count = self._counts.get(name, 0)
        if count == 1:
            self._sums[name] = self._sums[name].to(self.dtype)
        self._sums[name] = value if count == 0 else self._sums[name].add_(value)
        self._counts[name] = count + 1

    def result(self, name: str) -> Tensor:
        return self._sums.pop(name).to(self._result)


def _tiles(x: Tensor, tile: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of tokens, each with these tokens of x."""
    tokens = x.flatten(0, -2)
    for start in range(0, len(tokens), tile):
        yield slice(start, start + tile), tokens[start : start + tile]


def _activated(projected: Tensor, activation: str, reference: bool) -> Tensor:
    if activation == "gelu":
        return F.gelu(projected, approximate="tanh")
    return gated_activation(projected, gelu=activation == "geglu", reference=reference)


def _activation_grad(projected: Tensor, grad: Tensor, activation: str, reference: bool) -> Tensor:
    """Return the gradient of `projected`, given the gradient of its activation."""
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(grad, projected, approximate="tanh")
    gelu = activation == "geglu"
    if projected.is_cuda and projected.element_size() <= 4 and not reference:
        from meshwright.kernels.swiglu_triton import fused_gated_activation_backward

        return fused_gated_activation_backward(projected, grad, None, gelu)[0]
    gate, up = projected.chunk(2, dim=-1)
    if gelu:
        gate_grad = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return torch.cat((gate_grad, grad * F.gelu(gate, approximate="tanh")), dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)
