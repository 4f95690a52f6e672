"""The plain fp8 matmuls against an independent emulation in float64, which computes scales by logarithms."""

from __future__ import annotations

import math
from itertools import product as pairs
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import fp8_matmuls as fp8
from meshwright.kernels.fp8_matmuls import (
    E4M3,
    E5M2,
    Fp8Matrix,
    inverse,
    matmul,
    quantize,
    quantize_both,
    quantize_transposed,
    scale_of,
)
from meshwright.kernels.linear import Linear, WeightQueue
from meshwright.spec.plan import Recompute
from tests.kernels.test_linear import SLOWLY, Layer, gradients, with_sink, wrap

SCALINGS = get_args(fp8.Scaling)
DIGITS, SMALLEST_EXPONENT, LARGEST = {E4M3: 3, E5M2: 2}, {E4M3: -6, E5M2: -14}, {E4M3: 448.0, E5M2: 57344.0}
TOKENS, IN, OUT = 32, 64, 48
OUTPUT_BOUND = 0.05
"""Relative error of a product of normal random numbers: two roundings of at most 2^-4 each, 2^-5.5 in the mean."""
GRADIENT_BOUND = {"tensorwise": 0.08, "rowwise": 0.05}
"""The same of gradients, one of whose factors has one digit fewer where a tensor has one scale."""


def emulated_scale(largest: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    ratio = largest.double() / LARGEST[fp8_dtype]
    return torch.where(ratio > 0, 2.0 ** torch.ceil(torch.log2(ratio.clamp(min=1e-300))), 1.0)


def emulated_rounding(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """float64 numbers rounded to those that fp8 has, ties to even."""
    exponent = torch.floor(torch.log2(x.abs().clamp(min=1e-300))).clamp(min=SMALLEST_EXPONENT[fp8_dtype])
    step = 2.0 ** (exponent - DIGITS[fp8_dtype])
    return torch.round(x / step) * step


def emulated_matrix(x: Tensor, scaling: str, fp8_dtype: torch.dtype, dim: int) -> Tensor:
    """x as its fp8 copy has it, for a matmul that sums over `dim`."""
    x = x.double()
    largest = x.abs().amax(dim, keepdim=True) if scaling == "rowwise" else x.abs().max()
    scale = emulated_scale(largest, fp8_dtype)
    return emulated_rounding(x / scale, fp8_dtype) * scale


class Emulated(torch.autograd.Function):
    """The linear layer in fp8, its matmuls in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling, ctx.biased = scaling, bias is not None
        rows = emulated_matrix(x.flatten(0, -2), scaling, E4M3, 1) @ emulated_matrix(weight, scaling, E4M3, 1).t()
        out = rows.to(x.dtype).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), scaling = ctx.saved_tensors, ctx.scaling
        fp8_dtype = E5M2 if scaling == "tensorwise" else E4M3
        rows = grad.flatten(0, -2)
        x_grad = emulated_matrix(rows, scaling, fp8_dtype, 1) @ emulated_matrix(weight, scaling, E4M3, 0)
        weight_grad = emulated_matrix(rows, scaling, fp8_dtype, 0).t() @ emulated_matrix(
            x.flatten(0, -2), scaling, E4M3, 0
        )
        bias_grad = rows.sum(0) if ctx.biased else None
        return x_grad.to(x.dtype).view_as(x), weight_grad.to(weight.dtype), bias_grad, None


def numbers(seed: int, *shape: int) -> Tensor:
    """Normal random numbers over several orders of magnitude, so that rows and columns want different scales."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape[-2], 1, generator=draw) + torch.randn(1, shape[-1], generator=draw)
    return torch.randn(*shape, generator=draw) * torch.exp(spread)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
def test_scales_are_the_smallest_powers_of_two_that_fit(fp8_dtype: torch.dtype) -> None:
    top = LARGEST[fp8_dtype]
    magnitudes = torch.tensor([top, math.nextafter(top, 2 * top), top / 2, 1.0, 1.75, 1.7500001, 3.1e-5, 7.7e20])
    assert torch.equal(scale_of(magnitudes, fp8_dtype).double(), emulated_scale(magnitudes, fp8_dtype))
    random = torch.exp(20 * torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(scale_of(random, fp8_dtype).double(), emulated_scale(random, fp8_dtype))
    assert torch.equal(scale_of(random, fp8_dtype) * inverse(scale_of(random, fp8_dtype)), torch.ones(1000))


@pytest.mark.parametrize(("scaling", "fp8_dtype"), list(pairs(SCALINGS, (E4M3, E5M2))))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_hold_what_the_emulation_holds(scaling: Any, fp8_dtype: torch.dtype, dtype: torch.dtype) -> None:
    x = numbers(0, TOKENS, IN).to(dtype)
    by_rows, by_columns = emulated_matrix(x, scaling, fp8_dtype, 1), emulated_matrix(x, scaling, fp8_dtype, 0)
    layouts = quantize_both(x, scaling, fp8_dtype)
    for quantized, transposed in (
        layouts,
        (quantize(x, scaling, fp8_dtype), quantize_transposed(x, scaling, fp8_dtype)),
    ):
        assert quantized.values.shape == (TOKENS, IN) and transposed.values.shape == (IN, TOKENS)
        assert quantized.values.is_contiguous() and transposed.values.is_contiguous()
        assert torch.equal(quantized.values.double() * quantized.scale, by_rows)
        assert torch.equal(transposed.values.double() * transposed.scale, by_columns.t())


def test_zeros_stay_zeros_and_values_that_are_not_finite_reach_the_result() -> None:
    x = torch.zeros(TOKENS, IN)
    assert not matmul(quantize(x, "tensorwise"), quantize(x, "tensorwise"), torch.float32).any()
    for scaling in SCALINGS:
        x[3, 5] = math.nan
        product = matmul(quantize(x, scaling), quantize(torch.ones(OUT, IN), scaling), torch.float32)
        assert product[3].isnan().all()
        x[3, 5] = math.inf
        product = matmul(quantize(x, scaling), quantize(torch.ones(OUT, IN), scaling), torch.float32)
        assert not product[3].isfinite().any()


def layer(scaling: Any, dtype: torch.dtype) -> tuple[Linear, Tensor, Tensor]:
    linear = Linear(IN, OUT).to(dtype)
    linear.scaling = scaling
    with torch.no_grad():
        linear.weight.copy_(numbers(1, OUT, IN))
    x = numbers(2, 2, TOKENS // 2, IN).to(dtype).requires_grad_()
    return linear, x, numbers(3, 2, TOKENS // 2, OUT).to(dtype)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_equals_the_emulation(scaling: Any, dtype: torch.dtype) -> None:
    linear, x, grad = layer(scaling, dtype)
    out = linear(x)
    out.backward(grad)
    actual = (out.detach(), x.grad, linear.weight.grad, linear.bias.grad)
    x.grad = linear.weight.grad = linear.bias.grad = None
    expected = Emulated.apply(x, linear.weight, linear.bias, scaling)
    expected.backward(grad)
    # The same fp8 numbers multiplied, their sum rounded once to the layer's format.
    bound = 1e-6 if dtype == torch.float32 else 5e-3
    for ours, theirs in zip(actual, (expected.detach(), x.grad, linear.weight.grad, linear.bias.grad), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert relative(ours, theirs) < bound


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_error_against_exact_matmuls_is_bounded(scaling: Any) -> None:
    draw = torch.Generator().manual_seed(4)
    weight, x = torch.randn(256, 512, generator=draw), torch.randn(1024, 512, generator=draw)
    grad = torch.randn(1024, 256, generator=draw)
    linear = Linear(512, 256, bias=False)
    linear.scaling = scaling
    linear.weight = nn.Parameter(weight.clone())
    x.requires_grad_()
    out = linear(x)
    out.backward(grad)
    exact = x.detach().double(), weight.double(), grad.double()
    errors = (
        relative(out.detach(), exact[0] @ exact[1].t()),
        relative(x.grad, exact[2] @ exact[1]),
        relative(linear.weight.grad, exact[2].t() @ exact[0]),
    )
    assert errors[0] < OUTPUT_BOUND and max(errors[1:]) < GRADIENT_BOUND[scaling], errors
    assert min(errors) > 0.01, "an error this small was not made in fp8"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_one_scale_a_row_saves_small_rows_that_one_scale_a_tensor_loses(scaling: Any) -> None:
    x = numbers(5, TOKENS, IN)
    x[0] *= 1e-9
    exact, weight = x.double(), torch.eye(IN)
    out = matmul(quantize(x, scaling), quantize(weight, scaling), torch.float32)
    assert (relative(out[0], exact[0]) < 0.1) == (scaling == "rowwise")


def test_a_weight_that_came_in_fp8_is_used_as_it_came() -> None:
    linear, x, grad = layer("tensorwise", torch.float32)
    expected = linear(x)
    expected.backward(grad)
    x_grad, weight_grad = x.grad, linear.weight.grad
    x.grad = None
    shape_only = nn.Parameter(torch.full((), math.nan).expand(OUT, IN))
    fp8_weight = quantize(linear.weight.detach(), "tensorwise")
    linear.weight, linear.fp8_weight = shape_only, Fp8Matrix(fp8_weight.values, fp8_weight.scale)
    out = linear(x)
    out.backward(grad)
    assert torch.equal(out, expected) and torch.equal(x.grad, x_grad) and torch.equal(linear.weight.grad, weight_grad)


def step(compiler: str | None, mode: Recompute, scaling: Any, *, split: bool, deferred: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(Linear, bias=True, norm=True) for _ in range(2)))
    for module in model.modules():
        if isinstance(module, Linear):
            module.scaling = scaling
    wrap(model, compiler, mode, split=split)
    inputs = [numbers(seed, 2, 8, 16).requires_grad_() for seed in range(2)]
    sink = with_sink(model)
    for x in inputs:
        queue = WeightQueue()
        if deferred:
            with sink.defer_to(queue):
                F.softplus(model(x)).sum().backward()
            assert (queue.pending == 6 and model[0].gate_up.weight.grad is None) or x is not inputs[0]
            queue.drain(list(model.parameters()))
        else:
            F.softplus(model(x)).sum().backward()
    return gradients(model, inputs)


MODES = [(scaling, mode) for mode in get_args(Recompute) for scaling in SCALINGS]


@pytest.mark.slow
@pytest.mark.parametrize(("scaling", "mode"), MODES[::-1])
@pytest.mark.parametrize("compiler", SLOWLY)
def test_compiled_recomputed_and_split_give_the_same(scaling: Any, compiler: str | None, mode: Recompute) -> None:
    eager = step(None, "none", scaling, split=False, deferred=False)
    for split, deferred in ((False, False), (True, False), (True, True)):
        actual = step(compiler, mode, scaling, split=split, deferred=deferred)
        # Inductor sums a norm in another order; an activation may then round to the next fp8 number.
        bound = 1e-2 if compiler == "inductor" else 1e-6
        assert max(relative(actual[name], grad) for name, grad in eager.items()) < bound


def test_saved_activations_are_in_fp8() -> None:
    linear, x, grad = layer("tensorwise", torch.float32)
    block = nn.Sequential(linear)
    wrap([block], None, "none")
    queue, sink = WeightQueue(), with_sink(block)
    with sink.defer_to(queue):
        block.forward(x).backward(grad)
    saved = queue._deferred[0].tensors
    assert [tensor.dtype for tensor in saved] == [E5M2, torch.float32, E4M3, torch.float32]
    assert [tuple(tensor.shape) for tensor in saved] == [(OUT, TOKENS), (), (IN, TOKENS), ()]


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
