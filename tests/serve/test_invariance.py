"""Results of an invariant engine do not depend on the batch, bit for bit; on a CPU. `tests/gpu` has the same for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.serve.engine import Engine
from meshwright.serve.invariance import InvariantSampler
from meshwright.serve.sampling import SamplingOptions
from meshwright.spec.engine import EngineOptions, Speculation
from meshwright.spec.errors import BadInput
from tests.models.tiny import ALL, LLAMA
from tests.serve.helpers import PROMPTS, engine_of, greedy, record_logits, texts, tiny
from tests.slow import quick_first

SIZES = [
    {"sequences": 1},
    {"step_tokens": 4, "overlap": True},
    {"step_tokens": 512},
    {"cache_blocks": 16, "step_tokens": 7},
]
"""Alone, in small and in whole chunks, and with preemption."""


def run(engine: Engine, **request: Any) -> dict[int, Tensor]:
    seen = record_logits(engine)
    texts(engine, **request)
    return {number: torch.stack(rows) for number, rows in seen.items()}


def equal(ours: dict[int, Tensor], theirs: dict[int, Tensor]) -> bool:
    return all(torch.equal(ours[number], theirs[number]) for number in range(len(PROMPTS)))


FP8 = {"weights": "fp8", "kv_cache": "fp8"}
FORMATS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({}, SIZES),
    (FP8, SIZES[-1:]),
    (FP8, SIZES[:-1]),
    ({"weights": "int8"}, SIZES),
]


@pytest.mark.parametrize(("formats", "cases"), quick_first(2, FORMATS, unpack=True))
def test_bits_do_not_depend_on_batches_chunks_and_preemption(
    formats: dict[str, Any], cases: list[dict[str, Any]]
) -> None:
    expected = run(engine_of(tiny(LLAMA), invariant=True, **formats))
    for sizes in cases:
        engine = engine_of(tiny(LLAMA), invariant=True, **formats, **sizes)
        ours = run(engine)
        assert (engine._policy.preemptions > 0) == ("cache_blocks" in sizes)
        assert equal(ours, expected)


@pytest.mark.parametrize("name", quick_first(1, ["sliding", "gpt2", "mixtral"]))
def test_bits_of_other_families(name: str) -> None:
    model = tiny(ALL[name])
    assert equal(
        run(engine_of(model, invariant=True)), run(engine_of(model, invariant=True, sequences=2, step_tokens=9))
    )


def test_bits_do_not_depend_on_prefix_hits() -> None:
    engine = engine_of(tiny(LLAMA), invariant=True)
    first = run(engine)
    texts_before = engine._policy.cached_tokens
    seen = record_logits(engine)
    texts(engine)
    assert engine._policy.cached_tokens > texts_before
    again = [torch.stack(rows) for _, rows in sorted(seen.items())]
    assert all(torch.equal(ours, first[number]) for number, ours in enumerate(again))


def test_texts_are_those_of_the_trainer() -> None:
    assert texts(engine_of(tiny(LLAMA), invariant=True)) == greedy(tiny(LLAMA))


def test_prompt_lookup_does_not_change_bits_and_a_draft_model_is_refused() -> None:
    lookup = engine_of(tiny(LLAMA), invariant=True, speculation=Speculation(tokens=2))
    assert texts(lookup) == greedy(tiny(LLAMA)) and lookup.drafts[1] > 0
    with pytest.raises(BadInput, match="cannot have a draft model"):
        Engine(tiny(LLAMA), options=EngineOptions(invariant=True), draft_model=tiny(LLAMA))


def test_draws_and_log_probabilities_do_not_depend_on_the_batch() -> None:
    """A row with each option, alone and among the others."""
    torch.manual_seed(0)
    options = [
        SamplingOptions(temperature=0.7, seed=1, logprobs=True, top_logprobs=3),
        SamplingOptions(temperature=1.3, top_p=0.7, seed=2),
        SamplingOptions(temperature=0.0, repetition_penalty=1.5),
        SamplingOptions(temperature=1.0, logit_bias={3: 2.0}, top_k=20, seed=4),
    ]
    vocab, device = 1003, torch.device("cpu")
    logits, positions = 3 * torch.randn(len(options), vocab), torch.tensor([9, 5, 7, 2])
    together = InvariantSampler(len(options), device, vocab)
    for row, each in enumerate(options):
        together.assign(row, each, [1, 2, 3], 2)
    rows = torch.arange(len(options))
    tokens = together.sample(logits, rows, positions)
    logprobs = together.logprobs(logits, tokens)
    for row, each in enumerate(options):
        alone, part = InvariantSampler(len(options), device, vocab), slice(row, row + 1)
        alone.assign(row, each, [1, 2, 3], 2)
        assert torch.equal(alone.sample(logits[part], rows[part], positions[part]), tokens[part])
        if each.logprobs:
            ours = alone.logprobs(logits[part], tokens[part])
            assert all(torch.equal(one, all_rows[part]) for one, all_rows in zip(ours, logprobs, strict=True))
