"""Log-probabilities of an invariant engine on a CPU are the trainer's exact ones, bit for bit, however requests are batched."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

from meshwright.kernels.attention import attention, make_mask
from meshwright.kernels.exact_attention import ROWS, exact_attention, rows_are_alike
from meshwright.kernels.loss import token_log_probabilities
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.serve import invariance
from meshwright.serve.invariance import RowRunner, TokenRunner
from meshwright.serve.sampling import SamplingOptions
from meshwright.spec.model import ModelSpec
from tests.models.tiny import GPT2, LLAMA, PARALLEL, QWEN2, QWEN3, SCALED, SMOLLM3
from tests.serve.helpers import PROMPTS, engine_of, tiny
from tests.slow import quick_first

MODELS = {
    name: replace(spec, vocab_size=136)
    for name, spec in {
        "qwen3": QWEN3,
        "smollm3": SMOLLM3,
        "gpt2": GPT2,
        "llama": LLAMA,
        "qwen2": QWEN2,
        "scaled": SCALED,
        "parallel": PARALLEL,
    }.items()
}


def sampled(model: Decoder, **sizes: Any) -> list[tuple[list[int], list[float]]]:
    """New tokens of each prompt, and their log-probabilities."""
    engine = engine_of(model, invariant=True, **sizes)
    assert isinstance(engine._runner, RowRunner)
    options = SamplingOptions(temperature=1.0, seed=3, logprobs=True)
    numbers = [engine.submit(prompt, new_tokens=12, sampling=options) for prompt in PROMPTS]
    results: dict[int, tuple[list[int], list[float]]] = {number: ([], []) for number in numbers}
    for update in engine.run():
        results[update.number][0].extend(update.tokens)
        results[update.number][1].extend(logprob.chosen for logprob in update.logprobs)
    return [results[number] for number in numbers]


@torch.no_grad()
def trained(model: Decoder, texts: list[list[int]]) -> list[list[float]]:
    """The log-probability of each next token of the texts, packed into one sequence."""
    model = copy.deepcopy(model)
    for block in model.layers.values():
        assert isinstance(block, Block)
        block.hooks.attend = exact_attention
    lengths = [len(text) for text in texts]
    fill = -sum(lengths) % ROWS
    tokens = pad(torch.tensor([token for text in texts for token in text]), (0, fill))[None]
    parts = [*lengths, fill] if fill else lengths
    positions = torch.cat([torch.arange(length) for length in parts])[None]
    documents = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))[None]
    hidden = model._run_blocks(tokens, positions, documents)[0]
    weight = model.embed.weight if model.head.weight is None else model.head.weight
    targets = tokens.roll(-1)[0]
    values = token_log_probabilities(model.norm(hidden)[0], weight, targets, chunk=32)
    return [part[:-1].tolist() for part in values[: sum(lengths)].split(lengths)]


@pytest.mark.parametrize("name", quick_first(3, MODELS))
def test_the_engine_samples_with_the_probabilities_of_the_trainer(name: str) -> None:
    model = tiny(MODELS[name])
    for sizes in ({}, {"sequences": 2, "step_tokens": 7}, {"cache_blocks": 32, "sequences": 16}):
        answers = sampled(model, **sizes)
        texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)]
        for prompt, (tokens, ours), theirs in zip(PROMPTS, answers, trained(model, texts), strict=True):
            assert len(tokens) == 12 and ours == theirs[len(prompt) - 1 :]


@pytest.mark.parametrize("documents", [None, [[0] * 5 + [1] * 27, [0] * 32]])
def test_exact_attention_equals_attention_and_has_its_gradients(documents: list[list[int]] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 32, heads, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    mask = make_mask(
        None if documents is None else torch.tensor(documents), None, 32, torch.device("cpu"), reference=True
    )
    gradients: list[list[Tensor]] = []
    for function in (attention, exact_attention):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*inputs, mask, reference=True)
        weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
        gradients.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_other_models_and_other_cpus_compute_each_token_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    spec: ModelSpec = replace(LLAMA, sliding_window=9)
    assert isinstance(engine_of(tiny(spec), invariant=True)._runner, TokenRunner)
    monkeypatch.setattr(invariance, "rows_are_alike", lambda hidden, dtype: False)
    assert isinstance(engine_of(tiny(LLAMA), invariant=True)._runner, TokenRunner)


def test_the_test_of_a_cpu_finds_rows_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_are_alike(64, torch.float32)
    monkeypatch.setattr(F, "linear", lambda x, weight: x @ weight.t() * (1 + len(x) * 1e-6))
    assert not rows_are_alike.__wrapped__(64, torch.float32)
