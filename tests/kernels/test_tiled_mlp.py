"""A feed-forward network in tiles of tokens equals the whole one, in values, gradients and without its wide activations."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from meshwright.models.mlp import MLP, GatedMLP, feed_forward_of
from meshwright.parallel.recompute import with_recompute
from meshwright.spec.blocks.feed_forward import Activation, FeedForwardSpec

HIDDEN, WIDTH = 8, 24
PLAIN = FeedForwardSpec(width=WIDTH, activation="gelu")


def network(activation: Activation, bias: bool) -> GatedMLP | MLP:
    torch.manual_seed(0)
    module = feed_forward_of(FeedForwardSpec(width=WIDTH, activation=activation), HIDDEN, reference=True)
    if bias:
        for linear in module.children():
            assert isinstance(linear, nn.Linear)
            linear.bias = nn.Parameter(torch.randn(linear.out_features))
    return module.double()


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    out = module(x)
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads = [parameter.grad for parameter in module.parameters()]
    assert x.grad is not None and all(grad is not None for grad in grads)
    return [out.detach(), x.grad, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("tile", [1, 5, 14, 64])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("bias", [False, True])
def test_tiles_have_the_values_and_gradients_of_the_whole(activation: Activation, bias: bool, tile: int) -> None:
    """14 tokens in float64: tiles of one, with a remainder, one tile, and a tile that is longer than the batch."""
    whole = network(activation, bias)
    tiled = copy.deepcopy(whole)
    tiled.tile = tile
    x = torch.randn(2, 7, HIDDEN, dtype=torch.float64)
    for expected, value in zip(step(whole, x), step(tiled, x), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(tiled(x), whole(x), rtol=1e-12, atol=1e-13)


def test_gradients_of_weights_in_bf16_are_summed_in_fp32() -> None:
    """Tiles of one token: sums in bf16 would lose most of 4,096 equal terms."""
    module = MLP(PLAIN, HIDDEN).to(torch.bfloat16)
    module.tile = 1
    x = torch.ones(1, 4096, HIDDEN, dtype=torch.bfloat16)
    module(x).sum().backward()
    grad, module.tile = copy.deepcopy(module.down.weight.grad), 0
    module.zero_grad()
    module(x).sum().backward()
    assert grad is not None and module.down.weight.grad is not None
    torch.testing.assert_close(grad, module.down.weight.grad, rtol=0.02, atol=1e-3)


def test_only_the_input_is_saved() -> None:
    module, saved = network("swiglu", False), []
    module.tile = 4
    x = torch.randn(16, HIDDEN, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape), lambda _: None):
        module(x)
    assert sorted(saved) == sorted([x.shape, *(parameter.shape for parameter in module.parameters())])


@pytest.mark.slow
def test_a_compiled_block_stays_one_graph_and_runs_the_forward_once() -> None:
    module = network("swiglu", False)
    module.tile = 4

    def block(x: Tensor) -> Tensor:
        return x + module(torch.nn.functional.silu(x))

    x = torch.randn(2, 7, HIDDEN, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(block(x).square().sum(), x)[0]
    compiled = torch.compile(with_recompute(block, "full"), fullgraph=True)
    grad = torch.autograd.grad(compiled(x).square().sum(), x)[0]
    with torch.profiler.profile() as profile:
        torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-12)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert (counts["meshwright::tiled_mlp"], counts["meshwright::tiled_mlp_backward"]) == (1, 1)
