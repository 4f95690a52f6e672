"""Gradients are added up, scaled and multiplied in the format of the sum."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.sums import add, add_matmul, matmul, scale

DTYPES = [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]


@pytest.mark.parametrize(("gradient_dtype", "sum_dtype"), DTYPES)
def test_a_sum_is_kept_in_its_own_format(gradient_dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
    total, gradient = torch.full((3, 5), 256, dtype=sum_dtype), torch.ones(3, 5, dtype=gradient_dtype)
    for _ in range(3):  # in bf16 256 + 1 is 256
        add(total, gradient)
    assert total.dtype == sum_dtype and torch.equal(total, torch.full_like(total, 259))


@pytest.mark.parametrize(("gradient_dtype", "sum_dtype"), DTYPES)
def test_matmuls_are_added_in_the_sums_format(gradient_dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 32, generator=draw, dtype=torch.float64).to(gradient_dtype) for _ in range(2))
    exact, bound = a.double().t() @ b.double(), {torch.bfloat16: 3e-3, torch.float64: 1e-14}[gradient_dtype]
    total = matmul(a.t(), b, sum_dtype)
    for count in (1, 2, 3):
        assert total.dtype == sum_dtype and (total - count * exact).norm() < bound * (count * exact).norm()
        add_matmul(total, a.t(), b)


def test_a_factor_is_not_rounded_to_what_it_scales() -> None:
    gradient, factor = torch.full((4, 4), 3.0, dtype=torch.bfloat16), torch.tensor(1 / 3)
    gradient_dtype = scale(gradient, factor, torch.float32)
    assert gradient_dtype.dtype == torch.float32 and torch.equal(gradient_dtype, torch.full((4, 4), 3.0) * factor)
    assert scale(gradient, factor, torch.bfloat16).dtype == torch.bfloat16
