"""The blocks of the engine against those of the trainer."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.moe import RoutedOutput
from meshwright.serve.blocks import add_and_norm, block_forward
from tests.models.tiny import ALL, built


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_bits_are_those_of_the_trainers_blocks(name: str, dtype: torch.dtype) -> None:
    """Each block's output and the last norm, for blocks in sequence, parallel, routed, and parallel and routed."""
    model = built(ALL[name], dtype=dtype)
    x = torch.randn(1, 7, model.spec.hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    stream, delta = x, None
    for layer in model.layers.values():
        stream, delta = block_forward(layer, stream, delta)
        x = layer(x, None, None)
        x = x.x if isinstance(x, RoutedOutput) else x
        assert torch.equal(stream + delta, x)
    total, normed = add_and_norm(stream, delta, model.norm)
    assert torch.equal(total, x) and torch.equal(normed, model.norm(x))
