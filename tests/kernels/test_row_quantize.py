"""Rounding by rows fused into other operations against the separate operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.kernels.add_norm import add_rms_norm
from meshwright.kernels.fp8_matmuls import E4M3, Fp8Matrix, quantize
from meshwright.kernels.row_quantize import quantize_add_rms_norm, quantize_gated, quantize_rows
from meshwright.kernels.swiglu import gated_activation

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
DTYPES = [torch.bfloat16, torch.float32]


def draws(*shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers with another spread in each row; the first row is 0."""
    draw = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=draw) * torch.exp(2 * torch.randn(*shape[:-1], 1, generator=draw))
    x.view(-1, shape[-1])[:1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_times_scales_are_the_input_rounded_to_e4m3(dtype: torch.dtype) -> None:
    x = draws(2, 5, 48, dtype=dtype)
    values, scale = quantize_rows(x)
    assert values.dtype == E4M3 and values.shape == x.shape and scale.shape == (2, 5, 1)
    error = (values.float() * scale - x.float()).abs()
    assert (error <= x.float().abs() / 16 + scale * 2.0**-10).all()
    largest = x.float().abs().amax(-1, keepdim=True) / scale
    assert ((largest <= 448) & ((largest > 224) | (largest == 0))).all()


@pytest.mark.parametrize("gemma", [False, True])
def test_fused_operations_round_what_the_separate_ones_return(gemma: bool) -> None:
    x, delta, weight = (draws(*shape, dtype=torch.bfloat16) for shape in ((3, 40), (3, 40), (40,)))
    total, normed = quantize_add_rms_norm(x, delta, weight.abs() + 1, 1e-5, plus_one=gemma)
    expected_total, expected = add_rms_norm(x, delta, weight.abs() + 1, 1e-5, plus_one=gemma)
    assert torch.equal(total, expected_total)
    assert_same(normed, quantize(expected, "rowwise"))
    gate_up = draws(3, 80, dtype=torch.bfloat16)
    assert_same(quantize_gated(gate_up, gelu=gemma), quantize(gated_activation(gate_up, gelu=gemma), "rowwise"))


def assert_same(ours: Fp8Matrix, theirs: Fp8Matrix) -> None:
    assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))
    assert torch.equal(ours.scale, theirs.scale)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "gemma"), [((2, 3, 48), False), ((2, 3, 48), True), ((1, 1000), False), ((0, 16), True)]
)
def test_kernels(shape: tuple[int, ...], gemma: bool, dtype: torch.dtype) -> None:
    """With SiLU, or with GELU and norms whose weights are stored minus one.

    Asked for fp32, because the interpreter rounds wrongly to fp8: then values times scales are the rows themselves.
    """
    pytest.importorskip("triton")
    from meshwright.kernels.row_quantize_triton import round_add_rms_norm, round_gated_rows, round_rows

    x, delta, weight = (draws(*size, dtype=dtype) for size in (shape, shape, shape[-1:]))
    rounded = round_rows(x, torch.float32)
    assert torch.equal(rounded.scale, quantize_rows(x).scale)
    assert torch.equal(rounded.values * rounded.scale, x.float())
    step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 2e-6
    total, normed = round_add_rms_norm(x, delta, weight + 1, 1e-5, torch.float32, plus_one=gemma)
    expected_total, expected = add_rms_norm(x, delta, weight + 1, 1e-5, plus_one=gemma)
    torch.testing.assert_close(total, expected_total, rtol=step, atol=0)
    torch.testing.assert_close(normed.values * normed.scale, expected.float(), rtol=2 * step, atol=1e-6)
    gate_up = draws(*shape[:-1], 2 * shape[-1], dtype=dtype)
    gated = round_gated_rows(gate_up, torch.float32, gelu=gemma)
    expected = gated_activation(gate_up.double(), gelu=gemma).float()
    torch.testing.assert_close(gated.values * gated.scale, expected, rtol=2 * step, atol=1e-6)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_row_with_a_number_that_is_not_finite_has_no_scale(number: float) -> None:
    pytest.importorskip("triton")
    from meshwright.kernels.row_quantize_triton import round_rows

    x = torch.ones(2, 16)
    x[1, 3] = number
    for scale in (quantize_rows(x).scale, round_rows(x, torch.float32).scale):
        assert scale[0].item() == 2.0**-8 and scale[1].isnan()
