"""On a GPU, log-probabilities of an invariant engine are the trainer's exact ones, bit for bit, however requests are batched."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.runs import needs
from tests.models.tiny import GPT2, LLAMA, PARALLEL, QWEN2, QWEN3, SCALED, SMOLLM3, built
from tests.serve.helpers import PROMPTS

from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.rl.exact_blocks import use_exact_blocks
from meshwright.serve.engine import Engine
from meshwright.serve.sampling import SamplingOptions
from meshwright.spec.engine import EngineOptions

pytestmark = pytest.mark.gpu
WIDE = replace(LLAMA, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn_hidden=2816, vocab_size=32000, init_std=0.03)
SPECS = {
    "wide": WIDE,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
    "gpt2": GPT2,
    "scaled": SCALED,
    "parallel": PARALLEL,
}
CONTEXT, NEW = 128, 40


def sampled(model: Decoder, **sizes: Any) -> list[tuple[list[int], list[float]]]:
    """New tokens of each prompt, and their log-probabilities."""
    options = EngineOptions(context=CONTEXT, cache_blocks=256, invariant=True, texts=False, **sizes)
    engine = Engine(copy.deepcopy(model), options=options)
    drawing = SamplingOptions(temperature=1.0, seed=3, logprobs=True)
    numbers = [engine.submit(prompt, new_tokens=NEW, sampling=drawing) for prompt in PROMPTS]
    results: dict[int, tuple[list[int], list[float]]] = {number: ([], []) for number in numbers}
    for update in engine.run():
        results[update.number][0].extend(update.tokens)
        results[update.number][1].extend(logprob.chosen for logprob in update.logprobs)
    return [results[number] for number in numbers]


def trained(model: Decoder, texts: list[list[int]], seq: int) -> list[list[float]]:
    """The log-probability of each next token of the texts, packed into rows of `seq` tokens, by a model with the exact forward."""
    rows: list[list[list[int]]] = [[]]
    for text in texts:
        if sum(map(len, rows[-1])) + len(text) > seq:
            rows.append([])
        rows[-1].append(text)
    lengths = [[*map(len, row), seq - sum(map(len, row))] for row in rows]
    filled = zip(rows, lengths, strict=True)
    tokens = torch.tensor([[*(token for text in row for token in text), *[0] * of[-1]] for row, of in filled])
    positions = torch.tensor([[place for length in of for place in range(length)] for of in lengths])
    documents = torch.stack([torch.arange(len(of)).repeat_interleave(torch.tensor(of)) for of in lengths])
    with torch.enable_grad():  # kernels that run without gradients only must not make a difference
        shared = model.shared_inputs(tokens.cuda(), positions.cuda(), documents.cuda(), torch.bfloat16)
        x = model.embed_tokens(tokens.cuda(), shared.positions)
        for block in model.layers.values():
            assert isinstance(block, Block)
            x = block(x, *shared.of(block.attention_kind), shared.counted)
        tied = model.embed.weight if model.spec.tied else None
        targets = tokens.roll(-1, dims=1).cuda()
        values = model.head.log_probabilities(model.norm(x), targets, tied).tolist()
    parts = []
    for row, of in zip(values, lengths, strict=True):
        for length in of[:-1]:
            parts.append(row[: length - 1])
            row = row[length:]
    return parts


@pytest.mark.parametrize("name", SPECS)
def test_the_engine_samples_with_the_probabilities_of_the_trainer(name: str) -> None:
    needs(1)
    model = built(SPECS[name], dtype=torch.float32).to("cuda", torch.bfloat16).requires_grad_(False)
    exact = copy.deepcopy(model).requires_grad_()
    use_exact_blocks(exact, torch.bfloat16, CONTEXT)
    for sizes in ({"sequences": 8}, {"sequences": 2, "step_tokens": 7}, {"sequences": 4, "graphs": False}):
        answers = sampled(model, **sizes)
        texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)]
        for seq in (80, 512):
            for prompt, (tokens, ours), theirs in zip(PROMPTS, answers, trained(exact, texts, seq), strict=True):
                assert len(tokens) == NEW and ours == theirs[len(prompt) - 1 :]


def test_the_last_norm_does_not_depend_on_gradients() -> None:
    """The engine computes it without, the trainer with gradients."""
    needs(1)
    engine, exact = (built(WIDE, dtype=torch.float32).to("cuda", torch.bfloat16) for _ in range(2))
    Engine(engine, options=EngineOptions(context=CONTEXT, cache_blocks=256, invariant=True, texts=False, sequences=2))
    use_exact_blocks(exact, torch.bfloat16, CONTEXT)
    rows = torch.randn(1, 1 << 17, WIDE.hidden, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        sampled_rows = engine.norm(rows)
    assert torch.equal(exact.norm(rows), sampled_rows)
    exact.norm.kernel = True
    with torch.no_grad():
        assert not torch.equal(exact.norm(rows), sampled_rows), (
            "the kernel rounds some of 134 million numbers otherwise"
        )


@pytest.mark.parametrize("name", ["wide", "qwen3", "gpt2"])
def test_gradients_are_those_of_the_trainers_blocks(name: str) -> None:
    """Within the rounding of bf16, which the exact forward does otherwise."""
    needs(1)
    gradients = []
    for exact in (False, True):
        model = built(SPECS[name], dtype=torch.float32).to("cuda", torch.bfloat16)
        if exact:
            use_exact_blocks(model, torch.bfloat16, CONTEXT)
        tokens = torch.arange(96, device="cuda").view(2, 48) % SPECS[name].vocab_size
        shared = model.shared_inputs(tokens, None, None, torch.bfloat16)
        x = model.embed_tokens(tokens, shared.positions)
        for block in model.layers.values():
            x = block(x, *shared.of(block.attention_kind), shared.counted)
        model.logits_or_loss(x, tokens.roll(-1, dims=1), None, None).loss.backward()
        gradients.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        assert (gradients[1][key] - gradient).norm() < 0.03 * gradient.norm() + 1e-6, key


@pytest.mark.parametrize("columns", [131, 50257, 128256])
def test_log_probabilities_do_not_depend_on_the_other_rows(columns: int) -> None:
    needs(1)
    from meshwright.kernels.loss import log_probabilities_of_logits

    logits = (4 * torch.randn(300, columns, device="cuda")).bfloat16()
    targets = torch.randint(0, columns, (300,), device="cuda")
    targets[7] = -1
    whole = log_probabilities_of_logits(logits, targets)
    expected = logits.double().log_softmax(-1).gather(1, targets.clamp_min(0)[:, None])[:, 0]
    assert whole[7] == 0 and torch.allclose(whole[8:], expected[8:].float(), rtol=1e-5, atol=1e-5)
    for part in (slice(0, 1), slice(5, 22), slice(100, 300)):
        assert torch.equal(log_probabilities_of_logits(logits[part], targets[part]), whole[part])
