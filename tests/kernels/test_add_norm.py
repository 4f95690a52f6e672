"""The sum and its norm where separate operators compute them."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.add_norm import add_rms_norm


@pytest.mark.parametrize("reference", [True, False])
def test_sum_and_norm_of_known_vectors(reference: bool) -> None:
    x, delta = torch.tensor([[2.0, -1.0], [0.0, 3.0]]), torch.tensor([[1.0, 5.0], [0.0, -3.0]])
    total, normed = add_rms_norm(x, delta, torch.tensor([1.0, 2.0]), 1e-30, reference=reference)
    assert torch.equal(total, torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    torch.testing.assert_close(normed, torch.tensor([[3.0, 8.0], [0.0, 0.0]]) / 12.5**0.5)


@pytest.mark.parametrize("reference", [True, False])
def test_the_norm_is_of_the_rounded_sum(reference: bool) -> None:
    """257 and -255.5 round to 256 and -256 in bf16; the norm of the exact sum would round to 1 and -0.996."""
    x, delta = torch.tensor([256.0, -256.0]).bfloat16(), torch.tensor([1.0, 0.5]).bfloat16()
    total, normed = add_rms_norm(x, delta, torch.ones(2, dtype=torch.bfloat16), 0.0, reference=reference)
    assert total.tolist() == [256.0, -256.0]
    assert normed.tolist() == [1.0, -1.0]


def test_gradients_flow() -> None:
    x, delta = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *tensors: add_rms_norm(*tensors, 1e-5), (x, delta, weight))
