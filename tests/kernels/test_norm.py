"""Fused norms against their formulas."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.norm import layer_norm, rms_norm


def tensors(dtype):
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((3, 5, 16), (16,), (16,)))
    return [t.to(dtype).requires_grad_() for t in (x * 3 + 1, weight, bias)]


@pytest.mark.parametrize("norm", ["rms", "rms, weights minus one", "layer"])
def test_fast_equals_plain_with_gradients(norm):
    x, weight, bias = tensors(torch.float64)
    results = []
    for reference in (True, False):
        if norm != "layer":
            out = rms_norm(x, weight, 1e-5, plus_one=norm != "rms", reference=reference)
            results.append([out, *torch.autograd.grad(out.pow(3).sum(), (x, weight))])
        else:
            out = layer_norm(x, weight, bias, 1e-5, reference=reference)
            results.append([out, *torch.autograd.grad(out.pow(3).sum(), (x, weight, bias))])
    for plain_value, fast_value in zip(*results, strict=True):
        assert torch.allclose(plain_value, fast_value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reference", [True, False])
def test_statistics_are_wider_than_bfloat16(reference):
    x, weight, bias = tensors(torch.bfloat16)
    for actual, exact in (
        (rms_norm(x, weight, 1e-5, reference=reference), rms_norm(x.double(), weight.double(), 1e-5, reference=True)),
        (
            layer_norm(x, weight, bias, 1e-5, reference=reference),
            layer_norm(x.double(), weight.double(), bias.double(), 1e-5, reference=True),
        ),
    ):
        assert actual.dtype == torch.bfloat16
        assert torch.allclose(actual.double(), exact, rtol=2**-7, atol=2**-8)


def test_norm_of_a_known_vector():
    x = torch.tensor([3.0, 4.0])
    vector = torch.ones(2)
    assert torch.allclose(rms_norm(x, vector, 0.0), x / 12.5**0.5)
    assert torch.allclose(layer_norm(x, vector, torch.zeros(2), 0.0), torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize("reference", [True, False])
def test_one_is_added_to_a_weight_in_fp32(reference):
    """1 + 2^-9 is 1 in bf16: there the weights would change nothing."""
    x, weight = torch.linspace(-2, 2, 64).bfloat16(), torch.full((64,), 2.0**-9).bfloat16()
    exact = rms_norm(x.double(), weight.double(), 1e-6, plus_one=True, reference=True).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6, plus_one=True, reference=reference), exact)
    assert not torch.equal(rms_norm(x, 1 + weight, 1e-6, reference=reference), exact)
