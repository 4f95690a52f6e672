"""int8 rounding and matmuls against integers in numpy, and the kernels in Triton's interpreter to the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.kernels.add_norm import add_rms_norm
from meshwright.kernels.int8_matmuls import Int8Matrix, grouped_int8, int8_linear
from meshwright.kernels.row_quantize import (
    quantize_add_copies_rms_norm,
    quantize_add_rms_norm,
    quantize_gated,
    quantize_rows,
)
from meshwright.kernels.swiglu import gated_activation
from tests.kernels.test_row_quantize import draws
from tests.slow import quick_first

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")


def rounded(x: Tensor) -> Int8Matrix:
    """x in int8, computed in fp64."""
    numbers = x.double().numpy()
    scale = np.maximum(np.abs(numbers).max(-1, keepdims=True), 2.0**-100) / 127
    return Int8Matrix(torch.from_numpy(np.rint(numbers / scale)), torch.from_numpy(scale))


def exact_matmul(x: Int8Matrix, weight: Int8Matrix) -> Tensor:
    sums = x.values.numpy().astype(np.int64) @ weight.values.numpy().astype(np.int64).T
    return torch.from_numpy(sums) * x.scale.double() * weight.scale.double().T


def matrices(*shapes: tuple[int, ...]) -> list[Int8Matrix]:
    draw = torch.Generator().manual_seed(0)
    return [
        Int8Matrix(
            torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8),
            torch.rand(*shape[:-1], 1, generator=draw) + 0.1,
        )
        for shape in shapes
    ]


def groups(sizes: list[int], columns: int, inner: int) -> tuple[Int8Matrix, Int8Matrix, Tensor, Tensor]:
    """Rows, a matrix for each group, the ends of groups, and each row's matmul in fp64."""
    x, stacked = matrices((sum(sizes), inner), (len(sizes), columns, inner))
    index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    expected = torch.empty(sum(sizes), columns, dtype=torch.float64)
    for row, group in enumerate(index.tolist()):
        token = Int8Matrix(x.values[row : row + 1], x.scale[row : row + 1])
        expected[row] = exact_matmul(token, Int8Matrix(stacked.values[group], stacked.scale[group]))
    return x, stacked, torch.tensor(sizes).cumsum(0).to(torch.int32), expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_number_of_a_row_becomes_127(dtype: torch.dtype) -> None:
    x = draws(2, 5, 48, dtype=dtype)
    values, scale = quantize_rows(x, "int8")
    expected = rounded(x)
    assert values.dtype == torch.int8 and values.shape == x.shape and scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), expected.scale, rtol=1e-6, atol=0)
    assert (values.double() - expected.values).abs().max() == 0
    assert (values.abs().amax(-1)[x.abs().amax(-1) > 0] == 127).all()
    x[1, 2, 3] = float("inf")
    assert quantize_rows(x, "int8").scale.isnan().sum() == 1


def test_matmuls_have_exact_sums() -> None:
    x, weight = matrices((2, 3, 300), (7, 300))
    bias = torch.linspace(-50, 50, 7)
    flat = Int8Matrix(x.values.flatten(0, 1), x.scale.flatten(0, 1))
    expected = exact_matmul(flat, weight).view(2, 3, 7)
    torch.testing.assert_close(
        int8_linear(x, weight, bias, torch.float32).double(), expected + bias, rtol=1e-6, atol=1e-4
    )
    most = Int8Matrix(torch.full((1, 133_144), 127, dtype=torch.int8), torch.ones(1, 1))
    least = Int8Matrix(-most.values, most.scale)
    assert int8_linear(most, least, None, torch.float64).item() == pytest.approx(-(127**2) * 133_144, rel=1e-7)
    for sizes in ([3, 0, 5, 1], [0, 4], [0]):
        rows, stacked, ends, expected = groups(sizes, 6, 40)
        torch.testing.assert_close(grouped_int8(rows, stacked, ends, torch.float64), expected, rtol=1e-6, atol=0)


@interpreted
@pytest.mark.parametrize(
    ("tokens", "columns", "inner", "across"), quick_first(1, [(5, 20, 300, True), (33, 70, 256, False)], unpack=True)
)
def test_matmul_kernel(tokens: int, columns: int, inner: int, across: bool) -> None:
    pytest.importorskip("triton")
    from meshwright.kernels.fixed_matmul_triton import Tile, tiled_matmul

    x, weight = matrices((tokens, inner), (columns, inner))
    bias = torch.linspace(-1, 1, columns)
    sizes = {"tile": Tile(16, 16, 4, 1), "splits": 2, "across": across}
    out = tiled_matmul(x.values, weight.values, x.scale, weight.scale, bias, torch.float32, **sizes)
    assert torch.equal(out, int8_linear(x, weight, bias, torch.float32))


@interpreted
@pytest.mark.parametrize("sizes", quick_first(1, [[3, 0, 18, 1], [3, 0, 37, 16, 1], [20], [0, 0]]), ids=str)
def test_grouped_kernel(sizes: list[int]) -> None:
    pytest.importorskip("triton")
    from meshwright.kernels.fixed_matmul_triton import Tile
    from meshwright.kernels.grouped_int8_triton import grouped_matmul

    x, stacked, ends, _ = groups(sizes, 20, 200)
    expected = grouped_int8(x, stacked, ends, torch.float32)
    for tile in (Tile(16, 16, 4, 1), None):
        out = grouped_matmul(x.values, stacked.values, x.scale, stacked.scale, ends, torch.float32, tile=tile)
        assert torch.equal(out, expected)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("dtype", quick_first(1, [torch.bfloat16, torch.float32]))
def test_rounding_kernels(dtype: torch.dtype) -> None:
    """Alone to the same bits; fused, numbers that differ by the order of a sum may round to a neighbour."""
    pytest.importorskip("triton")
    from meshwright.kernels.row_quantize_triton import round_add_rms_norm, round_gated_rows, round_rows

    x, delta, weight, gate_up = (draws(*shape, dtype=dtype) for shape in ((3, 200), (3, 200), (200,), (3, 400)))
    alone, (total, normed) = round_rows(x, torch.int8), round_add_rms_norm(x, delta, weight, 1e-5, torch.int8)
    gated, expected = round_gated_rows(gate_up, torch.int8), quantize_rows(x, "int8")
    assert torch.equal(alone.values, expected.values) and torch.equal(alone.scale, expected.scale)
    assert_near(normed, quantize_add_rms_norm(x, delta, weight, 1e-5, "int8")[1])
    assert_near(normed, quantize_rows(add_rms_norm(x, delta, weight, 1e-5)[1], "int8"))
    torch.testing.assert_close(total, x + delta)
    assert_near(gated, quantize_gated(gate_up, "int8"))
    assert_near(gated, quantize_rows(gated_activation(gate_up), "int8"))
    x[1, 3] = float("nan")
    assert round_rows(x, torch.int8).scale.isnan().flatten().tolist() == [False, True, False]


@interpreted
@pytest.mark.parametrize("shared", [False, True])
def test_sums_of_copies_are_normed_and_rounded(shared: bool) -> None:
    pytest.importorskip("triton")
    from meshwright.kernels.row_quantize_triton import round_add_copies_rms_norm

    x, copies, other, weight = (
        draws(*shape, dtype=torch.float32) for shape in ((1, 3, 200), (3, 2, 200), (1, 3, 200), (200,))
    )
    arguments = x, copies, other if shared else None, weight, 1e-5
    total, normed = round_add_copies_rms_norm(*arguments, torch.int8)
    expected_total, expected = quantize_add_copies_rms_norm(*arguments, "int8")
    torch.testing.assert_close(total, expected_total, rtol=1e-6, atol=1e-5)
    assert_near(normed, expected)


def assert_near(ours: Int8Matrix, theirs: Int8Matrix) -> None:
    assert ours.values.dtype == torch.int8
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-2, atol=0)
    assert (ours.values.int() - theirs.values.int()).abs().max() <= 1
