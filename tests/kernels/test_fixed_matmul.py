"""The matmul of fixed order against float64, in Triton's interpreter, and what its order depends on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.kernels.fixed_matmul import (
    MIN_TILES,
    PROGRAMS,
    TILE_BYTES,
    few_linear,
    fixed_linear,
    fp8_linear,
    inner_splits,
    is_few,
)
from meshwright.kernels.fp8_matmuls import quantize

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")


def operands(tokens: int, columns: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=draw) for size in ((tokens, inner), (columns, inner), (columns,)))
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@interpreted
@pytest.mark.parametrize(
    ("tokens", "columns", "inner", "splits", "dtype"),
    [
        (1, 20, 256, 4, torch.float32),
        (19, 32, 72, 2, torch.float16),
        pytest.param(1, 70, 256, 4, torch.float32, marks=pytest.mark.slow),
        pytest.param(16, 130, 250, 1, torch.float32, marks=pytest.mark.slow),
        pytest.param(20, 65, 96, 3, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_matmul_has_the_same_bits_in_any_batch(
    tokens: int, columns: int, inner: int, splits: int, dtype: torch.dtype
) -> None:
    """Parts by one program or by several, tokens alone or together. (Other tiles: numpy's matmuls have other bits.)"""
    pytest.importorskip("triton")
    from meshwright.kernels.dependent_launch_triton import arrivals
    from meshwright.kernels.fixed_matmul_triton import Tile, tiled_matmul

    x, weight, bias = operands(tokens, columns, inner, dtype)
    exact = x.double() @ weight.double().t() + bias.double()
    small = Tile(16, 16, 4, 1)
    out = tiled_matmul(x, weight, None, None, bias, dtype, tile=small, splits=splits, across=True)
    bound = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=bound, atol=4 * bound)
    assert not arrivals(x.device).any(), "the next matmul finds zeros"
    assert torch.equal(tiled_matmul(x, weight, None, None, bias, dtype, tile=small, splits=splits, across=False), out)
    wide = tiled_matmul(x, weight, None, None, bias, dtype, tile=Tile(64, 32, 4, 1), splits=splits, across=True)
    torch.testing.assert_close(wide.double(), exact, rtol=bound, atol=4 * bound)
    for token in (0, tokens - 1):
        alone = tiled_matmul(x[token : token + 1], weight, None, None, bias, dtype, tile=small, splits=splits)
        assert torch.equal(alone[0], out[token])


@interpreted
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_linear_of_few_tokens_is_that_of_torch(tokens: int) -> None:
    """One token has more parts of the inner dimension than several."""
    pytest.importorskip("triton")
    from meshwright.kernels.dependent_launch_triton import arrivals

    x, weight, bias = operands(tokens, 72, 1040, torch.float16)
    assert inner_splits(72, 1040, 2) == 4, "sums of parts are tested"
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(few_linear(x[None], weight, bias)[0].double(), expected, rtol=2e-3, atol=4e-3)
    torch.testing.assert_close(few_linear(x, weight).double(), expected - bias.double(), rtol=2e-3, atol=4e-3)
    assert not arrivals(x.device).any()
    assert not is_few(x, weight), "elsewhere torch multiplies"


@interpreted
@pytest.mark.parametrize("across", [True, False])
def test_fp8_matmul_is_that_of_the_reference(across: bool) -> None:
    pytest.importorskip("triton")
    from meshwright.kernels.fixed_matmul_triton import Tile, tiled_matmul

    x, weight, bias = operands(5, 48, 300, torch.float32)
    x, weight = quantize(x, "rowwise"), quantize(weight, "rowwise")
    expected = fp8_linear(x, weight, bias, torch.float32)
    out = tiled_matmul(
        x.values,
        weight.values,
        x.scale,
        weight.scale,
        bias,
        torch.float32,
        tile=Tile(16, 16, 4, 1),
        splits=2,
        across=across,
    )
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-5)


def test_without_a_gpu_torch_multiplies() -> None:
    x, weight, bias = operands(6, 8, 32, torch.float32)
    torch.testing.assert_close(fixed_linear(x.view(2, 3, 32), weight, bias), (x @ weight.t() + bias).view(2, 3, 8))


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (64, 64)])
def test_splits_follow_from_the_weight_alone(columns: int, inner: int, itemsize: int) -> None:
    splits = inner_splits(columns, inner, itemsize)
    assert splits >= 1 and splits & (splits - 1) == 0
    if splits > 1:
        assert -(-columns // 64) * splits <= PROGRAMS
        assert inner * itemsize // TILE_BYTES // splits >= MIN_TILES


def test_narrow_weights_are_split_and_wide_ones_are_not() -> None:
    assert inner_splits(4096, 14336, 1) == 2
    assert inner_splits(28672, 4096, 1) == 1
