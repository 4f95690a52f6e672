"""GPU: Triton kernels sum and scale gradients to the bits of torch's operators; matmuls add to sums in a wider dtype."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.sums import MIN_FUSED_ELEMENTS, add, add_matmul, matmul, scale

pytestmark = pytest.mark.gpu

SIZES = [MIN_FUSED_ELEMENTS, MIN_FUSED_ELEMENTS + 1, 8192 * 4096 + 3]
PAIRS = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("gradient_dtype", "sum_dtype"), PAIRS)
def test_equals_its_plain_twin(size: int, gradient_dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
    gradient, total = (torch.randn(size, device="cuda") for _ in range(2))
    gradient, fused, by_torch = gradient.to(gradient_dtype), total.to(sum_dtype), total.to(sum_dtype)
    add(fused, gradient)
    add(by_torch, gradient, reference=True)
    assert torch.equal(fused, by_torch)
    factor = torch.tensor(1 / 3, device="cuda")
    assert torch.equal(scale(gradient, factor, sum_dtype), scale(gradient, factor, sum_dtype, reference=True))
    assert not torch.equal(scale(gradient, 3 * factor, sum_dtype), scale(gradient, factor, sum_dtype, reference=True))


def test_places_off_the_grid_and_rows_apart() -> None:
    total, gradient = (
        torch.zeros(4, MIN_FUSED_ELEMENTS + 8, device="cuda"),
        torch.randn(4, MIN_FUSED_ELEMENTS + 8, device="cuda").bfloat16(),
    )
    add(total[1:3, 3:-2], gradient[1:3, 3:-2])
    add(total[3, 1:], gradient[3, 1:])
    expected = torch.zeros_like(total)
    expected[1:3, 3:-2] = gradient[1:3, 3:-2].float()
    expected[3, 1:] = gradient[3, 1:].float()
    assert torch.equal(total, expected)


def test_matmuls_are_added_unrounded() -> None:
    a, b = (torch.randn(1024, 512, device="cuda").bfloat16() for _ in range(2))
    exact = a.t().double() @ b.double()
    total = matmul(a.t(), b, torch.float32)
    assert total.dtype == torch.float32
    assert (total - exact).norm() < 1e-5 * exact.norm(), "nothing was rounded to bf16 on the way"
    for _ in range(3):
        add_matmul(total, a.t(), b)
    assert (total - 4 * exact).norm() < 1e-5 * (4 * exact).norm()
