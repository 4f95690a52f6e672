"""Matmuls with a scale for each block of 128 × 128: rounding by its formula, matmuls against fp64, kernels in Triton's
interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshwright.kernels.add_norm import add_rms_norm
from meshwright.kernels.block_matmuls import (
    Fp8Blocks,
    Fp8Groups,
    block_linear,
    block_values,
    group_values,
    quantize_blocks,
    quantize_groups,
    scale_shape,
)
from meshwright.kernels.row_quantize import quantize_add_rms_norm, quantize_gated
from meshwright.kernels.swiglu import gated_activation
from tests.kernels.test_row_quantize import draws

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")


def grouped_draws(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers with another spread in each row and each 128 columns."""
    x = draws(*shape, dtype=torch.float32)
    return (x * torch.exp2(torch.arange(shape[-1]) // 128 % 3 * 2.0 - 4)).to(dtype)


def stored_weight(outer: int, inner: int) -> Fp8Blocks:
    """A weight as folders have it, whose scales are no powers of two, with scales as the library reads them."""
    draw = torch.Generator().manual_seed(outer)
    values = quantize_blocks(torch.randn(outer, inner, generator=draw)).values
    scale = torch.zeros(scale_shape(outer, inner))
    scale[:, : -(-inner // 128)] = torch.rand(scale.shape[0], -(-inner // 128), generator=draw) * 0.01 + 1e-3
    return Fp8Blocks(values, scale)


def exact_matmul(x: Fp8Groups, weight: Fp8Blocks) -> Tensor:
    return group_values(x).double() @ block_values(weight).double().t()


@pytest.mark.parametrize("inner", [384, 200, 40])
def test_inputs_are_divided_by_the_smallest_power_of_two_that_fits(inner: int) -> None:
    """Computed a group at a time, with logarithms."""
    x = grouped_draws(5, inner)
    values, scale = quantize_groups(x)
    assert scale.shape == (-(-inner // 128), 8)
    for row in range(5):
        for group in range(scale.shape[0]):
            numbers = x[row, 128 * group : 128 * (group + 1)].double()
            largest = max(float(numbers.abs().max()), 2.0**-100)
            expected = 2.0 ** math.ceil(math.log2(largest / 448))
            assert scale[group, row] == expected
            rounded = (numbers / expected).float().to(values.dtype)
            assert torch.equal(
                values[row, 128 * group : 128 * (group + 1)].view(torch.uint8), rounded.view(torch.uint8)
            )


def test_a_number_that_is_not_finite_spoils_its_group_only() -> None:
    x = torch.ones(2, 256)
    x[1, 130] = torch.inf
    scale = quantize_groups(x).scale[:, :2]
    assert scale[1, 1].isnan() and scale.isnan().sum() == 1


@pytest.mark.parametrize(("outer", "inner"), [(256, 384), (130, 200)])
def test_a_weight_has_a_scale_for_each_block(outer: int, inner: int) -> None:
    weight = torch.randn(outer, inner) * torch.rand(outer, 1)
    rounded = quantize_blocks(weight)
    assert rounded.scale.shape == (-(-outer // 128), -(-inner // 128))
    assert ((block_values(rounded) - weight).abs() <= weight.abs() / 16 + 2.0**-17 * weight.abs().max()).all()
    block = weight[128:256, 128:256]
    assert rounded.scale[1, 1] == 2.0 ** math.ceil(math.log2(float(block.abs().max()) / 448))


def test_linear_of_stored_numbers() -> None:
    x, weight, bias = quantize_groups(grouped_draws(2, 3, 320)), stored_weight(200, 320), torch.randn(200)
    expected = (exact_matmul(x, weight) + bias).view(2, 3, 200)
    out = block_linear(x, weight, bias, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@interpreted
@pytest.mark.parametrize(
    ("tokens", "outer", "inner", "splits", "columns"),
    [(3, 192, 512, 2, 64), (17, 130, 320, 1, 128), (5, 40, 256, 1, 16)],
)
def test_matmul_kernel(tokens: int, outer: int, inner: int, splits: int, columns: int) -> None:
    """Blocks that end with the weight; parts of the inner dimension by one program or several, to the same bits."""
    pytest.importorskip("triton")
    from meshwright.kernels.fixed_matmul_triton import Tile, block_matmul

    x, weight, bias = quantize_groups(grouped_draws(tokens, inner)), stored_weight(outer, inner), torch.randn(outer)
    expected = exact_matmul(x, weight) + bias
    tile = Tile(columns, 16, 4, 1)
    out = block_matmul(x, weight, bias, torch.float32, tile=tile, splits=splits, across=True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(block_matmul(x, weight, bias, torch.float32, tile=tile, splits=splits, across=False), out)
    alone = Fp8Groups(x.values[-1:], x.scale[:, tokens - 1 : tokens].expand(-1, 4).contiguous())
    assert torch.equal(block_matmul(alone, weight, bias, torch.float32, tile=tile, splits=splits)[0], out[-1])


@interpreted
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3, 300), torch.bfloat16), ((1, 40), torch.float32), ((0, 256), torch.float32)]
)
def test_rounding_kernels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Asked for fp32, because the interpreter rounds wrongly to fp8: then values times scales are the rows themselves."""
    pytest.importorskip("triton")
    from meshwright.kernels.row_quantize_triton import round_add_rms_norm, round_gated_rows, round_rows

    x, delta, weight = (grouped_draws(*size, dtype=dtype) for size in (shape, shape, shape[-1:]))
    rows, step = math.prod(shape[:-1]), 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 2e-6
    gate_up = grouped_draws(*shape[:-1], 2 * shape[-1], dtype=dtype)
    rounded = round_rows(x, torch.float32, group=128)
    _, normed = round_add_rms_norm(x, delta, weight + 1, 1e-5, torch.float32, group=128)
    gated = group_values(Fp8Groups(*round_gated_rows(gate_up, torch.float32, group=128)))
    assert torch.equal(rounded.scale[:, :rows], quantize_groups(x).scale[:, :rows])
    assert torch.equal(group_values(Fp8Groups(*rounded)), x.float())
    expected = quantize_add_rms_norm(x, delta, weight + 1, 1e-5, "fp8 blocks")[1]
    near = (normed.scale / expected.scale)[:, :rows]
    assert ((near == 1) | (near == 2) | (near == 0.5)).all(), "a number may be rounded up to the next power of two"
    exact = gate_up.double()[..., : shape[-1]]
    exact = exact * exact.sigmoid() * gate_up.double()[..., shape[-1] :]
    torch.testing.assert_close(gated, exact.float(), rtol=step, atol=1e-6)


def test_fused_operations_round_what_the_separate_ones_return() -> None:
    x, delta, weight = (grouped_draws(*shape) for shape in ((3, 300), (3, 300), (300,)))
    total, normed = quantize_add_rms_norm(x, delta, weight, 1e-5, "fp8 blocks")
    expected_total, expected = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, expected_total)
    gate_up = grouped_draws(3, 600)
    gated = quantize_gated(gate_up, "fp8 blocks")
    for ours, separate in ((normed, expected), (gated, gated_activation(gate_up))):
        values, scale = quantize_groups(separate)
        assert torch.equal(ours.values.view(torch.uint8), values.view(torch.uint8)) and torch.equal(ours.scale, scale)
