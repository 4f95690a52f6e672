"""GPU: the Triton kernel packs gradients like torch's own operator, bit for bit."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.pack import pack

pytestmark = pytest.mark.gpu

SHAPES = [(1025, 33), (64, 3, 5), (4096,), (1, 7), (3,), (512, 4096)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(
    ("gradient_dtype", "out_dtype"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_equals_its_plain_twin(ranks: int, gradient_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    gradients = [torch.randn(shape, device="cuda").to(gradient_dtype) for shape in SHAPES]
    count = sum(-(-gradient.shape[0] // ranks) * gradient[0].numel() for gradient in gradients)
    packed, by_torch = (torch.full((ranks * count,), torch.nan, device="cuda", dtype=out_dtype) for _ in range(2))
    pack(gradients, packed, ranks)
    pack(gradients, by_torch, ranks, reference=True)
    assert torch.equal(packed, by_torch)
    wrong = packed.clone()
    pack([gradient + 1 for gradient in gradients], wrong, ranks)
    assert not torch.equal(wrong, by_torch)
