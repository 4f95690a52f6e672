"""The fused gated network equals its separate layers, also with compilation, recomputation or a split backward."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import gated
from meshwright.kernels.fp8_matmuls import E4M3, Fp8Matrix, quantize
from meshwright.kernels.gated import gated_mlp
from meshwright.kernels.linear import Linear, WeightQueue
from meshwright.kernels.swiglu import gated_activation
from meshwright.spec.plan import Recompute
from tests.kernels.test_fp8_matmuls import numbers, relative
from tests.kernels.test_linear import SLOWLY, gradients, with_sink, wrap

WIDTH, HIDDEN, TOKENS = 32, 48, 32
ROUNDED = 1e-2
"""Bound where a last bit may differ before a rounding to fp8: now and then it is the next fp8 number."""


class Network(nn.Module):
    def __init__(self, together: bool, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(WIDTH, 2 * HIDDEN, bias=bias)
        self.down = Linear(HIDDEN, WIDTH, bias=bias)
        self.gate_up.scaling = self.down.scaling = "tensorwise"
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        return x + gated_mlp(x, self.gate_up, self.down, reference=not self.together)


def step(together: bool, compiler: str | None, mode: Recompute, *, split: bool, deferred: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Network(together) for _ in range(2)))
    wrap(model, compiler, mode, split=split)
    inputs = [numbers(seed, 2, TOKENS // 2, WIDTH).requires_grad_() for seed in range(2)]
    sink = with_sink(model)
    for x in inputs:
        queue = WeightQueue()
        if deferred:
            with sink.defer_to(queue):
                F.softplus(model(x)).sum().backward()
            assert queue.pending == 4
            queue.drain(list(model.parameters()))
        else:
            F.softplus(model(x)).sum().backward()
    return gradients(model, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", get_args(Recompute)[::-1])
@pytest.mark.parametrize("compiler", SLOWLY)
def test_the_fused_network_equals_separate_layers(compiler: str | None, mode: Recompute) -> None:
    apart = step(False, None, "none", split=False, deferred=False)
    for split, deferred in ((False, False), (True, False), (True, True)):
        actual = step(True, compiler, mode, split=split, deferred=deferred)
        assert max(relative(actual[name], grad) for name, grad in apart.items()) < ROUNDED


def test_what_is_rounded_is_the_activation_and_its_gradient() -> None:
    projected, grad_out = numbers(0, TOKENS, 2 * HIDDEN).requires_grad_(), numbers(1, TOKENS, HIDDEN)
    activation = gated_activation(projected, reference=True)
    activation.backward(grad_out)
    rounded, transposed = gated._activation(projected.detach())
    rounded_gradient, transposed_gradient = gated._activation_gradient(projected.detach(), grad_out, E4M3)
    expected, expected_gradient = quantize(activation.detach(), "tensorwise"), quantize(projected.grad, "tensorwise")
    for ours, ours_transposed, theirs in (
        (rounded, transposed, expected),
        (rounded_gradient, transposed_gradient, expected_gradient),
    ):
        assert torch.equal(ours.scale, theirs.scale) and torch.equal(ours_transposed.scale, theirs.scale)
        assert (
            torch.equal(ours.values.t().float(), ours_transposed.values.float())
            and ours_transposed.values.is_contiguous()
        )
        assert relative(ours.values.float(), theirs.values.float()) < 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_the_gated_network_uses_separate_layers_where_required(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(gated._Gated, "apply", lambda *inputs: calls.append(inputs) or inputs[0])
    network = Network(together=True, bias=bias)
    network(torch.ones(TOKENS, WIDTH))
    assert bool(calls) == (not bias)
    network.down.scaling, calls[:] = "rowwise", []
    network(torch.ones(TOKENS, WIDTH))
    assert not calls


def test_weights_that_came_in_fp8_are_used_as_they_came() -> None:
    network, x = Network(together=True), numbers(2, TOKENS, WIDTH).requires_grad_()
    network(x).sum().backward()
    expected = {"x": x.grad, "gate_up": network.gate_up.weight.grad, "down": network.down.weight.grad}
    x.grad = None
    for layer in (network.gate_up, network.down):
        fp8_weight = quantize(layer.weight.detach(), "tensorwise")
        layer.fp8_weight = Fp8Matrix(fp8_weight.values, fp8_weight.scale)
        layer.weight = nn.Parameter(torch.full((), torch.nan).expand(layer.weight.shape))
    network(x).sum().backward()
    actual = {"x": x.grad, "gate_up": network.gate_up.weight.grad, "down": network.down.weight.grad}
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())
