"""Log probabilities of prompts are those of transformers, in any batch, and once each; they take nothing from the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.serve import prompt_scores
from meshwright.serve.engine import Engine
from meshwright.serve.prompt_logprobs import PromptLogprobs
from meshwright.serve.sampling import GREEDY, SamplingOptions
from meshwright.spec.engine import Speculation
from tests.models.tiny import GEMMA, LLAMA, MIXTRAL
from tests.serve.helpers import PROMPTS, engine_of, tiny

MOST = 3
SCORED = SamplingOptions(temperature=0.0, prompt_logprobs=MOST, logprobs=True, top_logprobs=1)


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head gets the tokens of a step in parts of 16."""
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", 1)


def run(engine: Engine, numbers: Sequence[int]) -> dict[int, PromptLogprobs]:
    """The log probabilities of the prompts of all requests."""
    found = {number: PromptLogprobs.empty() for number in numbers}
    begun: set[int] = set()
    for update in engine.run():
        assert update.reason not in ("failed", "abort"), update.error
        if update.prompt_logprobs is not None:
            assert update.number not in begun, "the prompt comes before the text"
            found[update.number].extend(PromptLogprobs.unpack(update.prompt_logprobs.packed()))
        if update.tokens:
            begun.add(update.number)
    return found


def wanted(model: Decoder, prompt: Sequence[int]) -> Tensor:
    """Log probabilities `(tokens - 1, vocab)` by the trainer's forward, which other tests compare with transformers."""
    with torch.no_grad():
        return model(torch.tensor([prompt]))[0, :-1].log_softmax(1)


def check(found: PromptLogprobs, whole: Tensor, prompt: Sequence[int], most: int = MOST) -> None:
    assert found.tokens == len(prompt) - 1
    for token, target, row in zip(found.each(), prompt[1:], whole, strict=True):
        assert token.chosen == pytest.approx(float(row[target]), abs=1e-5)
        assert token.rank == 1 + int((row > row[target]).sum())
        assert [p for _, p in token.top] == pytest.approx(row.topk(most).values.tolist(), abs=1e-5)
        assert all(p == pytest.approx(float(row[id]), abs=1e-5) for id, p in token.top)
        for id, p in token.top:
            assert id != target or p == token.chosen, "the same bits in both"


@pytest.mark.parametrize("options", [
    {},
    {"overlap": True},
    {"invariant": True},
    {"speculation": Speculation(tokens=3, shortest=1)},
    {"step_tokens": 5},
    {"cache_blocks": 26},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("spec", [LLAMA, GEMMA, MIXTRAL], ids=["llama", "windows", "mixture"])
def test_they_are_those_of_the_whole_forward(spec: Any, options: dict[str, Any]) -> None:
    """`cache_blocks` is so small that requests lose their blocks and are computed again."""
    model = tiny(spec)
    engine = engine_of(model, **options)
    free = engine.submit(PROMPTS[3], new_tokens=12)
    numbers = {engine.submit(prompt, new_tokens=9, sampling=SCORED): prompt for prompt in (*PROMPTS, PROMPTS[0])}
    found = run(engine, [free, *numbers])
    for number, prompt in numbers.items():
        check(found[number], wanted(model, prompt), prompt)
    assert found[free].tokens == 0
    assert not engine._scored and engine.figures().running == 0
    if "cache_blocks" in options and spec is LLAMA:
        assert engine.figures().preemptions > 0


@pytest.mark.parametrize("spec", [LLAMA, GEMMA], ids=["rows", "tokens"])
def test_invariant_ones_do_not_depend_on_the_batch(spec: Any) -> None:
    """Of both runners on a CPU: that of the trainer's exact forward, and the one of single tokens."""
    model = tiny(spec)

    def scores(prompts: Sequence[Sequence[int]], **options: Any) -> list[PromptLogprobs]:
        engine = engine_of(model, invariant=True, **options)
        numbers = [engine.submit(prompt, new_tokens=3, sampling=SCORED) for prompt in prompts]
        return [*run(engine, numbers).values()]

    together = scores(PROMPTS, step_tokens=7)
    assert together == [scores([prompt])[0] for prompt in PROMPTS]


def test_cached_tokens_are_computed_again_and_shared() -> None:
    model, prompt = tiny(LLAMA), PROMPTS[0]
    engine = engine_of(model)
    cached: dict[int, int] = {}

    def submit(sampling: SamplingOptions) -> PromptLogprobs:
        number = engine.submit(prompt, new_tokens=2, sampling=sampling)
        found = PromptLogprobs.empty()
        for update in engine.run():
            cached[number] = max(cached.get(number, 0), update.cached_tokens)
            if update.prompt_logprobs is not None:
                found.extend(update.prompt_logprobs)
        return found

    for sampling in (GREEDY, SCORED, SCORED, GREEDY):
        found = submit(sampling)
        if sampling is SCORED:
            check(found, wanted(model, prompt), prompt)
    assert [*cached.values()] == [0, 0, 0, len(prompt) // 4 * 4 - (4 if len(prompt) % 4 == 0 else 0)]


def test_samples_of_a_prompt_have_them_once() -> None:
    model, prompt = tiny(LLAMA), PROMPTS[3]
    engine = engine_of(model)
    numbers = engine.submit_samples(prompt, 3, new_tokens=4, sampling=SamplingOptions(prompt_logprobs=0))
    found = run(engine, numbers)
    check(found[numbers[0]], wanted(model, prompt), prompt, 0)
    assert [found[number].tokens for number in numbers[1:]] == [0, 0]


def test_a_long_prompt_never_has_all_its_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny(LLAMA), step_tokens=60)
    rows: list[int] = []
    head = engine._runner.head
    monkeypatch.setattr(engine._runner, "head", lambda normed: (rows.append(normed.shape[1]), head(normed))[1])
    run(engine, [engine.submit(PROMPTS[0], new_tokens=1, sampling=SCORED)])
    assert max(rows) == 16 and sum(rows) == len(PROMPTS[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_not_finite_fail_their_request_only(overlap: bool) -> None:
    model = tiny(LLAMA)
    with torch.no_grad():
        model.embed.weight[20] = torch.nan
    engine = engine_of(model, overlap=overlap)
    bad = engine.submit((3, 20, 5), new_tokens=2, sampling=SCORED)
    good = engine.submit(PROMPTS[2], new_tokens=2, sampling=SCORED)
    ends = {update.number: update for update in engine.run() if update.reason is not None}
    assert (ends[bad].reason, ends[bad].code) == ("failed", "not_finite")
    assert ends[good].reason == "length"
