"""Blocks with the engine's forward: it is that of the engine's cache and blocks, and gradients are those of the trainer's blocks.

A CPU has no matmuls in a fixed order, so results are compared within rounding here; `tests/gpu/test_exact.py` compares
bits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.rl.exact_blocks import use_exact_blocks
from tests.models.tiny import GPT2, LLAMA, PARALLEL, QWEN3, SCALED, SMOLLM3

MODELS = {"llama": LLAMA, "qwen3": QWEN3, "gpt2": GPT2, "parallel": PARALLEL, "scaled": SCALED, "smollm3": SMOLLM3}


def initialised(name: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(replace(MODELS[name], vocab_size=64)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def packed(rows: int = 2, seq: int = 24) -> dict[str, Tensor]:
    """Rows of documents of 7, 1, 10 and 6 tokens."""
    lengths = torch.tensor([7, 1, 10, 6])
    documents = torch.arange(4).repeat_interleave(lengths).expand(rows, -1)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()]).expand(rows, -1)
    tokens = torch.randint(64, (rows, seq), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens, "positions": positions, "documents": documents}


def outputs(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    """The residual stream behind the last block."""
    dtype = model.embed.weight.dtype
    shared = model.shared_inputs(batch["tokens"], batch.get("positions"), batch.get("documents"), dtype)
    x = model.embed_tokens(batch["tokens"], shared.positions)
    for block in model.layers.values():
        assert isinstance(block, Block)
        x = block(x, *shared.of(block.attention_kind), shared.counted)
    return x


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_trainers_blocks(name: str, documents: bool) -> None:
    batch = packed() if documents else {"tokens": packed()["tokens"]}
    plain, exact = initialised(name), initialised(name)
    use_exact_blocks(exact, torch.float64, context=32)
    weights = torch.randn(2, 24, plain.spec.hidden, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for model in (plain, exact):
        y = outputs(model, batch)
        (y * weights).sum().backward()
        results.append((y, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (expected, gradients), (found, exact_gradients) = results
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)
    for key, gradient in gradients.items():
        other = exact_gradients[key]
        assert (gradient is None) == (other is None), key
        assert gradient is None or torch.allclose(other, gradient, rtol=1e-7, atol=1e-9), key


def test_a_block_is_left_as_it_was() -> None:
    model = initialised("qwen3")
    block = model.layers["0"]
    assert isinstance(block, Block)
    attend = block.hooks.attend
    use_exact_blocks(model, torch.float64, context=32)
    outputs(model, packed())
    assert block.hooks.attend is attend and block.attention.qk_norm
