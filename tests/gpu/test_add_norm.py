"""GPU: the fused addition and RMSNorm against the separate operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.add_norm import MAX_WIDTH, add_rms_norm
from meshwright.kernels.norm import KERNEL_WIDTHS, rms_norm

pytestmark = pytest.mark.gpu


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    x, delta = 3 * torch.randn(2, *shape, generator=draw, device="cuda") + 0.5
    weight = 1 + torch.randn(shape[-1], generator=draw, device="cuda") / 4
    return x.to(dtype), delta.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 4096), (300, 4096), (7, 1000), (5, 65), (2, MAX_WIDTH), (3, MAX_WIDTH + 8)])
def test_equals_the_separate_operators(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The sums are equal; the norms differ by at most one step of a number's format (fp32: 8, for another order)."""
    x, delta, weight = inputs(shape, dtype)
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    alone = rms_norm(total, weight, 1e-5)
    assert torch.equal(alone, normed) or shape[-1] not in KERNEL_WIDTHS
    for expected in (F.rms_norm(total, weight.shape, weight, 1e-5), rms_norm(total, weight, 1e-5, reference=True)):
        steps, info = 8 if dtype == torch.float32 else 1, torch.finfo(dtype)
        bound = steps * info.eps * expected.double().abs().clamp(min=info.smallest_normal)
        assert normed.dtype == dtype and normed.shape == x.shape
        assert ((normed.double() - expected.double()).abs() <= bound).all()


def test_one_kernel_runs() -> None:
    x, delta, weight = inputs((4, 4096), torch.bfloat16)
    add_rms_norm(x, delta, weight, 1e-5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        add_rms_norm(x, delta, weight, 1e-5)
        torch.cuda.synchronize()
    assert sum("_add_rms_norm" in event.name for event in profile.events()) == 1


def test_gradients_take_the_separate_operators() -> None:
    x, delta, weight = inputs((4, 64), torch.float32)
    x.requires_grad_()
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    (ours,) = torch.autograd.grad((total + normed).sum(), x)
    total = x + delta
    (theirs,) = torch.autograd.grad((total + rms_norm(total, weight, 1e-5, reference=True)).sum(), x)
    torch.testing.assert_close(ours, theirs)
