from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.kernels.swiglu import gated_activation


def gradient(x: torch.Tensor, grad_out: torch.Tensor, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = gated_activation(x, **options)
    y.backward(grad_out)
    assert x.grad is not None
    return y.detach(), x.grad


def test_the_first_half_is_the_gate() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(gated_activation(x), F.silu(x[:, :4]) * x[:, 4:])
    torch.testing.assert_close(gated_activation(x, gelu=True), F.gelu(x[:, :4], approximate="tanh") * x[:, 4:])


@pytest.mark.parametrize("gelu", [False, True])
def test_rows_are_weighted(gelu: bool) -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        gated_activation(x, weights, gelu=gelu), gated_activation(x, gelu=gelu) * weights[:, None]
    )
    assert torch.autograd.gradcheck(lambda *inputs: gated_activation(*inputs, gelu=gelu), (x, weights))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("shape", [(2, 100, 2 * 344), (5, 2 * 3), (1, 2 * 14336)])
@pytest.mark.parametrize("gelu", [False, True])
def test_the_kernel_equals_the_plain_twin(gelu: bool, shape: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype) * 3
    grad_out = torch.randn(*shape[:-1], shape[-1] // 2, device="cuda", dtype=dtype)
    fast = gradient(x, grad_out, gelu=gelu)
    true = gradient(x.double(), grad_out.double(), gelu=gelu, reference=True)
    for ours, theirs in zip(fast, true, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < bound


@pytest.mark.gpu
def test_it_compiles_into_one_graph() -> None:
    weight = torch.randn(64, 32, device="cuda", requires_grad=True)
    x = torch.randn(16, 32, device="cuda")
    compiled = torch.compile(lambda a: gated_activation(F.linear(a, weight)).square().sum(), fullgraph=True)
    loss = compiled(x)
    loss.backward()
    assert weight.grad is not None
    ours, weight.grad = weight.grad, None
    gated_activation(F.linear(x, weight), reference=True).square().sum().backward()
    torch.testing.assert_close(ours, weight.grad, rtol=1e-3, atol=1e-3)
