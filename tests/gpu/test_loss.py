"""The loss's kernel on a GPU against its eager twin, from the same logits."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.loss import _gradient_eager, linear_cross_entropy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 7), (333, 1000), (300, 8192), (40, 50257), (150, 128256)])
def test_the_kernel_equals_its_twin(tokens: int, columns: int, dtype: torch.dtype) -> None:
    gradients_agree(tokens, columns, dtype, "cuda")


def gradients_agree(tokens: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Of random logits, a fifth of them minus infinity and every fifth target left out."""
    from meshwright.kernels.loss_triton import gradient_in_place

    torch.manual_seed(0)
    logits = (4 * torch.randn(tokens, columns, device=device)).to(dtype)
    logits[:, columns - columns // 5 :] = -torch.inf  # what an unaligned vocabulary is padded with
    targets = torch.randint(0, columns - columns // 5, (tokens,), device=device)
    targets[::5] = -1
    drawn = torch.randn(tokens, device=device)
    for z_loss, weights in ((0.0, None), (0.01, None), (0.0, drawn), (0.01, drawn)):
        sums, grad_out = _gradient_eager(logits, targets, z_loss, weights)
        in_place = logits.clone()
        losses, squares = gradient_in_place(in_place, targets, z_loss, weights)
        assert losses[targets < 0].eq(0).all()
        assert losses.sum().item() == pytest.approx(sums.loss.item(), rel=1e-5, abs=1e-5 * losses.abs().sum().item())
        assert squares.sum().item() == pytest.approx(sums.squares.item(), rel=1e-5)
        assert (sums.squares > 0) == (z_loss > 0 and tokens > 1)  # the only target of one token is left out
        step = torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-4
        assert ((in_place - grad_out).float().abs() <= step * grad_out.float().abs() + 1e-7).all()


def test_values_that_are_not_finite_reach_the_result() -> None:
    from meshwright.kernels.loss_triton import gradient_in_place

    logits = torch.randn(3, 20000, device="cuda", dtype=torch.bfloat16)
    logits[1, 15000] = torch.nan
    logits[2, 3] = torch.inf
    losses, _ = gradient_in_place(logits, torch.tensor([0, 1, 2], device="cuda"))
    assert losses.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_head_and_loss_together(z_loss: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(700, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(30001, 256, device="cuda") / 16).bfloat16().requires_grad_()
    targets = torch.randint(-1, 30001, (700,), device="cuda")
    fast, squares = linear_cross_entropy(hidden, weight, targets, 256, z_loss=z_loss)
    by_torch, exact = linear_cross_entropy(
        hidden.double(), weight.double(), targets, 256, z_loss=z_loss, reference=True
    )
    assert squares.item() == pytest.approx(exact.item(), rel=1e-3)
    assert fast.item() == pytest.approx(by_torch.item(), rel=1e-3)
    for ours, theirs in zip(
        torch.autograd.grad(fast, (hidden, weight)), torch.autograd.grad(by_torch, (hidden, weight)), strict=True
    ):
        assert (ours.double() - theirs.double()).norm() < 5e-3 * theirs.double().norm()
