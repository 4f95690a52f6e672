"""Grouped matmuls in fp8 against an independent emulation in float64, and the matmuls of experts in a model."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels.fp8_matmuls import E4M3, scale_of
from meshwright.kernels.grouped_fp8 import GROUPED_FP8_OPERATOR, grouped_linear_fp8, transposed_matrices
from tests.kernels.test_fp8_matmuls import OUTPUT_BOUND, emulated_matrix, numbers
from tests.kernels.test_grouped import SIZES

IN, OUT = 32, 48


class EmulatedGroups(torch.autograd.Function):
    """Each row of x times its group's matrix as fp8 has both; the weight gradient is exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, groups)
        matrices = torch.stack([emulated_matrix(matrix, "rowwise", E4M3, 1) for matrix in weight])
        return (matrices[groups] @ emulated_matrix(x, "rowwise", E4M3, 1)[..., None])[..., 0].to(x.dtype)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, groups = ctx.saved_tensors
        matrices = torch.stack([emulated_matrix(matrix, "tensorwise", E4M3, 0).t() for matrix in weight])
        x_grad = (matrices[groups] @ emulated_matrix(grad, "rowwise", E4M3, 1)[..., None])[..., 0]
        outer = grad.double()[:, :, None] * x.double()[:, None, :]
        weight_grad = torch.zeros(weight.shape, dtype=torch.float64).index_add_(0, groups, outer)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None


def operands(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, weight, offsets, the group of each row, and the gradient of the output."""
    x = numbers(0, sum(sizes), IN).requires_grad_()
    weight = torch.stack([numbers(seed, OUT, IN) for seed in range(1, len(sizes) + 1)]).requires_grad_()
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return x, weight, torch.tensor(sizes).cumsum(0).to(torch.int32), groups, numbers(9, sum(sizes), OUT)


@pytest.mark.parametrize("case", SIZES)
def test_output_and_gradients_equal_the_emulation(case: str) -> None:
    x, weight, offsets, groups, grad_out = operands(SIZES[case])
    ours, theirs = grouped_linear_fp8(x, weight, offsets), EmulatedGroups.apply(x, weight, groups)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.detach().abs().max()))
    for actual, expected in zip(*(torch.autograd.grad(y, (x, weight), grad_out) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    exact = (weight[groups] @ x[..., None])[..., 0]
    assert 0 < (ours - exact).norm() < OUTPUT_BOUND * exact.norm(), "fp8 rounds, but no more than its digits"


def test_a_row_s_numbers_do_not_depend_on_the_other_rows() -> None:
    """Experts on other ranks, or a different micro-batch, therefore round alike."""
    x, weight, offsets, _, _ = operands(SIZES["uneven"])
    whole = grouped_linear_fp8(x, weight, offsets)
    alone = grouped_linear_fp8(x[3:4], weight[2:3], torch.tensor([1], dtype=torch.int32))
    torch.testing.assert_close(whole[3:4], alone, rtol=1e-5, atol=1e-5 * float(alone.detach().abs().max()))


def test_values_that_are_not_finite_reach_the_result() -> None:
    x, weight, offsets, groups, _ = operands(SIZES["even"])
    with torch.no_grad():
        weight[1, 3, 5] = torch.nan
    out = grouped_linear_fp8(x, weight, offsets)
    assert out[groups == 1, 3].isnan().all() and out[groups != 1].isfinite().all()
    grad = torch.autograd.grad(out, x, torch.ones_like(out))[0]
    assert grad[groups == 1].isnan().all() and grad[groups != 1].isfinite().all()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_it_compiles() -> None:
    x, weight, offsets, _, grad_out = operands(SIZES["uneven"])
    compiled = torch.compile(grouped_linear_fp8, fullgraph=True, backend="aot_eager")
    for matmul in (compiled, grouped_linear_fp8):
        out = matmul(x, weight, offsets)
        gradients = torch.autograd.grad(out, (x, weight), grad_out)
        assert out.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    assert torch.equal(compiled(x, weight, offsets), grouped_linear_fp8(x, weight, offsets))
    torch.library.opcheck(
        GROUPED_FP8_OPERATOR, (x, weight, offsets, True), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", SIZES)
def test_on_a_gpu_it_equals_the_processor(case: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch multiplies groups in fp8 on Hopper only")
    x, weight, offsets, _, grad_out = operands(SIZES[case])
    x, weight, grad_out = (tensor.detach().bfloat16() for tensor in (x, weight, grad_out))
    results = []
    for device in ("cpu", "cuda"):
        rows, matrices = (tensor.to(device).requires_grad_() for tensor in (x, weight))
        out = grouped_linear_fp8(rows, matrices, offsets.to(device))
        results.append((out, *torch.autograd.grad(out, (rows, matrices), grad_out.to(device))))
    for expected, actual in zip(*results, strict=True):
        assert (actual.cpu().float() - expected.float()).norm() <= 2e-2 * expected.float().norm()
    scale = scale_of(weight.abs().amax((1, 2)), E4M3)  # beyond it a GPU's cast saturates, a CPU's gives NaN
    ours, theirs = transposed_matrices(weight.cuda(), scale.cuda()), transposed_matrices(weight, scale)
    assert torch.equal(ours.scale.cpu(), theirs.scale)
    assert torch.equal(ours.values.cpu().view(torch.uint8), theirs.values.view(torch.uint8))
