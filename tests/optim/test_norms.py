"""Norms on a CPU do not lose small addends: equal to float64, for any size and any division of a tensor."""

from __future__ import annotations

import pytest
import torch

from meshwright.optim.clip import gradient_norm
from meshwright.optim.norms import norms

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["normal", "constant"])
def test_a_norm_of_millions_of_elements_is_that_of_float64_however_they_are_divided(kind: str) -> None:
    size = 4_000_003
    values = torch.full((size,), 0.1) if kind == "constant" else torch.randn(size, generator=torch.manual_seed(0))
    exact = values.double().square().sum().sqrt()
    naive = torch._foreach_norm([values])[0]
    assert abs(naive / exact - 1) > 1e-5, "torch's own loses more"
    for parts in ([values], list(values.split(1_000_000)), list(values.split([1, 63, 64, 65, size - 193]))):
        assert abs(gradient_norm(parts, None, CPU) / exact - 1) < 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norms_are_those_of_each_tensor_whatever_its_shape(dtype: torch.dtype) -> None:
    tensors = [torch.full((3, 50), 2.0, dtype=dtype), torch.full((1,), -4.0, dtype=dtype)]
    assert norms(tensors).tolist() == pytest.approx([2 * 150**0.5, 4.0], rel=1e-7)
    assert norms([tensors[0].T]).tolist() == pytest.approx([2 * 150**0.5], rel=1e-7)
    broken = tensors[0].clone()
    broken[0, 0] = torch.inf
    assert norms([broken]).isinf().all() and norms([broken * 0]).isnan().all()
