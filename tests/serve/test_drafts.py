"""Speculative decoding in the engine, on a CPU in fp32: texts beside those of an engine without drafts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.policies.drafting import TRIAL
from meshwright.serve.batch_inputs import PackedStep
from meshwright.serve.engine import Engine
from meshwright.serve.generation import Generation, TokenLogprob
from meshwright.serve.graphs import Graphs
from meshwright.serve.sampling import GREEDY, SamplingOptions
from meshwright.spec.engine import EngineOptions, Speculation
from meshwright.spec.errors import BadInput
from tests.models.tiny import LLAMA, SLIDING
from tests.serve.helpers import PROMPTS, assert_all_free, engine_of, texts, tiny
from tests.slow import quick_first

NEW = 20
LOOKUP = Speculation(tokens=3, shortest=1)
SAMPLING = {"greedy": GREEDY, "drawn": SamplingOptions(temperature=0.1, seed=5)}
"""At a low temperature texts repeat themselves, so that prompt lookup is right at times."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {"sequences": 5, "step_tokens": 64},
    {"step_tokens": 7, "overlap": True},
    {"cache_blocks": 18},
)
"""Large steps; chunks beside drafts under a small budget; preemptions."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny(LLAMA)


@pytest.fixture(scope="module")
def draft_model() -> Decoder:
    return tiny(replace(LLAMA, layers=1, heads=2, kv_heads=1))


@pytest.fixture(scope="module")
def expected(model: Decoder) -> dict[str, list[list[int]]]:
    return {name: texts(engine_of(model), new_tokens=NEW, sampling=sampling) for name, sampling in SAMPLING.items()}


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("name", SAMPLING)
def test_prompt_lookup_does_not_change_texts(
    name: str, options: dict[str, Any], model: Decoder, expected: dict[str, list[list[int]]]
) -> None:
    engine = engine_of(model, speculation=LOOKUP, **options)
    assert texts(engine, new_tokens=NEW, sampling=SAMPLING[name]) == expected[name]
    proposed, accepted = engine.drafts
    assert 0 < accepted < proposed
    assert (engine._policy.preemptions > 0) == ("cache_blocks" in options)
    assert_all_free(engine)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_draft_model_does_not_change_greedy_texts(
    options: dict[str, Any], model: Decoder, draft_model: Decoder, expected: dict[str, list[list[int]]]
) -> None:
    engine = engine_of(model, draft_model=draft_model, speculation=LOOKUP, **options)
    assert texts(engine, new_tokens=NEW) == expected["greedy"]
    assert engine.drafts[0] > 0
    assert_all_free(engine)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_drafts_of_the_model_itself_are_accepted(
    temperature: float, options: dict[str, Any], model: Decoder
) -> None:
    """So the draft model's cache has all tokens, whatever happened before."""
    engine = engine_of(model, draft_model=model, **options)
    sampling = SamplingOptions(temperature=temperature, top_k=20, seed=3)
    for _ in range(2):  # the second time with prefixes from the cache
        assert all(len(text) == NEW for text in texts(engine, new_tokens=NEW, sampling=sampling))
    proposed, accepted = engine.drafts
    assert accepted == proposed > NEW


def test_windows_leave_the_cache_of_both_models() -> None:
    model = tiny(SLIDING)
    expected = texts(engine_of(model), new_tokens=NEW)
    assert texts(engine_of(model, speculation=LOOKUP), new_tokens=NEW) == expected
    engine = engine_of(model, draft_model=tiny(replace(SLIDING, layers=1, sliding_window=5)))
    assert texts(engine, new_tokens=NEW) == expected


class Repeated(NamedTuple):
    """In the place of a CUDA graph: computes the same again, from and into the same tensors."""

    replay: Callable[[], None]


@pytest.mark.parametrize("spec", quick_first(1, [LLAMA, SLIDING]), ids=["full", "window"])
@pytest.mark.parametrize("source", ["lookup", "model", "modules"])
def test_graphs_and_padding_do_not_change_texts(source: str, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither requests that are padding nor those with fewer drafts than others."""

    def capture(graphs: Any, key: Any, call: Callable[[], None]) -> None:
        call()
        graphs._graphs[key] = Repeated(call)

    monkeypatch.setattr(Graphs, "capture", capture)
    modules, seen = source == "modules", Counter()
    model = tiny(replace(spec, prediction_depth=LOOKUP.tokens * modules))
    draft_model, speculation = model if source == "model" else None, replace(LOOKUP, mtp=modules, least=0.0)
    options = {"speculation": speculation, "graphs": True, "prompt_graphs": False}
    engine = engine_of(model, sequences=8, draft_model=draft_model, **options)
    assert not engine._inputs.tables.any(), "captured steps are padding"
    logits = engine._runner.logits

    def record(packed: PackedStep) -> Tensor:
        if packed.drafts is not None and packed.mixed is None:
            counts = packed.drafts.counts
            assert (packed.decode_size, 1 + LOOKUP.tokens) in engine._runner._graphs._graphs
            seen["drafts"] += 1
            seen["padding"] += packed.decode_size != packed.decodes
            seen["fewer"] += len(counts) < packed.decodes or min(counts) < 1 + LOOKUP.tokens
        return logits(packed)

    engine._runner.logits = record
    # Drawn texts depend on the drafts, which are those of an engine with the same requests before.
    eager = engine_of(model, sequences=8, speculation=speculation) if modules else engine
    for name, sampling in SAMPLING.items():
        new = texts(engine, new_tokens=NEW, sampling=sampling)
        if source == "lookup" or name == "greedy":
            assert new == texts(engine_of(model), new_tokens=NEW, sampling=sampling)
        if modules:
            assert new == texts(eager, new_tokens=NEW, sampling=sampling)
    assert seen["drafts"] and seen["padding"] and seen["fewer"]
    proposed, accepted = engine.drafts
    assert source != "model" or accepted == proposed


def test_drafts_pause_where_few_are_accepted(model: Decoder) -> None:
    """No draft pays for itself five times over; steps overlap meanwhile."""
    engine = engine_of(model, speculation=replace(LOOKUP, least=5.0), overlap=True, sequences=5, step_tokens=64)
    launched, overlapping = engine._launch, []

    def launch(*inputs: Any) -> Any:
        overlapping.append(engine._in_flight is not None)
        return launched(*inputs)

    engine._launch = launch
    assert texts(engine, new_tokens=NEW) == texts(engine_of(model), new_tokens=NEW)
    assert 0 < engine.drafts[0] <= len(PROMPTS) * TRIAL * LOOKUP.tokens
    assert not any(overlapping[:TRIAL]) and any(overlapping[TRIAL:])
    assert not engine._drafter._pauses._trials


def ends(engine: Engine, **request: Any) -> list[tuple[list[int], str, str | None]]:
    """Tokens, text and reason of the end for each prompt."""
    numbers = [engine.submit(prompt, **{"new_tokens": NEW, **request}) for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    pieces, reasons = dict.fromkeys(numbers, ""), {}
    for update in engine.run():
        tokens[update.number] += update.tokens
        pieces[update.number] += update.text
        reasons[update.number] = update.reason
    return [(tokens[number], pieces[number], reasons[number]) for number in numbers]


def test_a_stop_within_accepted_drafts_ends_a_text_where_it_ends_without(model: Decoder) -> None:
    words = {chr(0x100 + token): token for token in range(LLAMA.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    whole, _, _ = ends(engine_of(model, tokenizer=tokenizer))[0]
    accepted = 0
    for last in range(4, NEW, 3):
        stops: tuple[dict[str, Any], ...] = (
            {"stop_ids": whole[last : last + 1]},
            {"stop_strings": [tokenizer.decode(whole[last - 1 : last + 1])]},
        )
        engine = engine_of(model, tokenizer=tokenizer, speculation=LOOKUP, sequences=5, step_tokens=64)
        for stop in stops[last % 2 :][:1]:
            assert ends(engine, **stop) == ends(engine_of(model, tokenizer=tokenizer), **stop)
        assert_all_free(engine)
        accepted += engine.drafts[1]
    assert accepted > 0


def test_drafts_end_with_the_context(model: Decoder) -> None:
    for context in range(len(PROMPTS[0]) + 2, len(PROMPTS[0]) + 6):
        for drafts in ({"speculation": LOOKUP}, {"draft_model": model}):
            plain, drafted = engine_of(model, context=context), engine_of(model, context=context, **drafts)
            assert ends(drafted) == ends(plain)


def test_samples_of_a_prompt_share_it_beside_drafts(model: Decoder) -> None:
    def samples(engine: Engine) -> list[list[int]]:
        first, tokens = 0, {}
        for index in range(4):
            options = SAMPLING["drawn"].sample(index)
            number = engine.submit(PROMPTS[0], new_tokens=NEW, sampling=options, samples_of=first if index else None)
            tokens[number] = []
        for update in engine.run():
            tokens[update.number] += update.tokens
        return list(tokens.values())

    engine = engine_of(model, speculation=LOOKUP)
    assert samples(engine) == samples(engine_of(model))
    assert engine.drafts[1] > 0 and engine._policy.cached_tokens > 0


def test_penalties_biases_and_log_probabilities_beside_drafts(model: Decoder) -> None:
    options = [
        SamplingOptions(temperature=0.1, seed=1, repetition_penalty=1.3, logprobs=True),
        SamplingOptions(temperature=0.1, seed=2, logit_bias={7: 3.0, 3: 3.0}, logprobs=True, top_logprobs=3),
        SamplingOptions(temperature=0.0, logprobs=True, top_logprobs=1),
        SamplingOptions(temperature=0.1, seed=3, top_k=5, min_p=0.1),
    ]

    def outcome(engine: Engine) -> tuple[list[list[int]], list[list[TokenLogprob]]]:
        for prompt, sampling in zip(PROMPTS, options, strict=False):
            engine.submit(prompt, new_tokens=NEW, sampling=sampling)
        tokens: list[list[int]] = [[] for _ in options]
        logprobs: list[list[TokenLogprob]] = [[] for _ in options]
        for update in engine.run():
            tokens[update.number] += update.tokens
            logprobs[update.number] += update.logprobs
        return tokens, logprobs

    plain = outcome(engine_of(model))
    for drafts in ({"speculation": LOOKUP}, {"draft_model": model}):
        engine = engine_of(model, **drafts)
        tokens, logprobs = outcome(engine)
        assert engine.drafts[1] > 0
        # Of the draft model's requests only the penalised and the greedy one have the same draws.
        same = (0, 1, 2, 3) if "speculation" in drafts else (0, 2)
        assert all(tokens[index] == plain[0][index] for index in same)
        for index in set(same) - {3}:
            for ours, theirs in zip(logprobs[index], plain[1][index], strict=True):
                assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-5)
                assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_step_with_drafts_that_raises_ends_its_requests_alone(
    model: Decoder, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = Generation.add_drafted, []

    def raises_once(*inputs: Any) -> Any:
        calls.append(inputs)
        if len(calls) == 3:
            raise ValueError("out of luck")
        return add(*inputs)

    monkeypatch.setattr(Generation, "add_drafted", raises_once)
    engine = engine_of(model, speculation=LOOKUP, sequences=2)
    reasons = [reason for _, _, reason in ends(engine)]
    assert 1 <= reasons.count("failed") <= 2 and reasons.count("length") == len(reasons) - reasons.count("failed")
    assert texts(engine, new_tokens=NEW) == expected["greedy"]
    assert_all_free(engine)


VOCAB, REQUESTS, TEMPERATURE = 4, 2000, 3.0
FAR_TAIL = 140.0
"""Chi-square of 63 degrees of freedom exceeds this with a probability of 1e-7."""


SMALL = replace(LLAMA, vocab_size=VOCAB, layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, init_std=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{}, {"bad_words": [[1]], "min_tokens": 3}], ids=["free", "rules"])
@pytest.mark.parametrize("source", ["modules", "model"])
def test_drawn_texts_have_the_model_s_distribution(source: str, rules: dict[str, Any]) -> None:
    """The first token of a text follows the prompt; the next two are drafts, accepted or replaced. The rules exclude tokens 1 and 2."""
    mtp, prompt = source == "modules", (1, 3, 0, 2)
    model, draft_model = (
        tiny(replace(SMALL, prediction_depth=2 * mtp)),
        None if mtp else tiny(replace(SMALL, hidden=24)),
    )
    options = EngineOptions(
        sequences=80,
        tokens_per_block=4,
        cache_blocks=401,
        context=16,
        speculation=Speculation(tokens=2, mtp=mtp, least=0.0),
    )
    engine = Engine(copy.deepcopy(model), None, options, draft_model=draft_model)
    for seed in range(REQUESTS):
        sampling = SamplingOptions(seed=seed, temperature=TEMPERATURE, **rules)
        engine.submit(prompt, new_tokens=4, sampling=sampling, stop_ids=[2] if rules else [])
    tokens: list[list[int]] = [[] for _ in range(REQUESTS)]
    for update in engine.run():
        tokens[update.number] += update.tokens
    first = torch.tensor([new[:3] for new in tokens])
    counts = torch.bincount(first @ torch.tensor([16, 4, 1]), minlength=VOCAB**3).double()

    continued = torch.tensor([[*prompt, *new] for new in product(range(VOCAB), repeat=3)])
    with torch.no_grad():
        logits = model(continued)[:, len(prompt) - 1 : -1].double()
        if rules:
            logits[:, :, 1:3] = float("-inf")
        p = (logits / TEMPERATURE).softmax(2)
    expected = p.gather(2, continued[:, len(prompt) :, None])[:, :, 0].prod(1) * REQUESTS
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum().clamp(min=1e-9)[None]))
    assert ((counts - expected) ** 2 / expected).sum() < FAR_TAIL
    proposed, accepted = engine.drafts
    assert 0.1 < accepted / proposed < 0.9


@pytest.mark.parametrize(
    ("draft", "context", "message"),
    [
        (replace(LLAMA, vocab_size=130), 64, "expected the model's vocabulary of 131 tokens, got 130"),
        (replace(LLAMA, max_seq_len=32), 64, "its context of 32 tokens is shorter than the engine's of 64"),
        (LLAMA, 64, "it attends to all tokens, but only 9 stay in the cache"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(draft: Any, context: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        engine_of(tiny(SLIDING), draft_model=tiny(draft), context=context)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"shortest": 0}, {"longest": 2, "shortest": 3}])
def test_sizes_of_drafts_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="speculation: expected"):
        Speculation(**wrong)
