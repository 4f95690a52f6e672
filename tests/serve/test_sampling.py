"""Sampling against exact distributions, transformers' logits processors and closed forms."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from meshwright.serve.logit_filters import NEW_TOKEN, keep_allowed, penalise
from meshwright.serve.sampling import GREEDY, Sampler, SamplingOptions
from meshwright.spec.errors import BadInput
from tests.models.tiny import LLAMA
from tests.serve.helpers import PROMPTS, engine_of, texts, tiny

VOCAB, DRAWS = 12, 20_000
LOGITS = torch.tensor([0.3, 1.0, -1.0, 2.0, 0.5, -3.0, 1.7, 0.0, 2.4, -0.5, 1.2, -2.0])
TEXT, PROMPT_TOKENS = (3, 8, 3, 1, 8, 8, 6), 3
"""A prompt of three tokens and four new ones."""
FAR_TAIL = 60.0
"""Chi-square of 11 degrees of freedom exceeds this with a probability of 1e-8."""
CPU = torch.device("cpu")


def sampler_with(*options: SamplingOptions, vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(len(options) + 1, CPU, vocab)
    for row, each in enumerate(options):
        sampler.assign(row, each, TEXT, PROMPT_TOKENS)
    return sampler


def frequencies(options: SamplingOptions) -> Tensor:
    """Counts of tokens drawn at many positions of one request."""
    sampler = sampler_with(options)
    # All draws follow the same text.
    sampler._history.add = sampler._excluded.add = lambda rows, tokens: None
    rows = torch.zeros(DRAWS, dtype=torch.int64)
    return torch.bincount(sampler.sample(LOGITS.expand(DRAWS, -1), rows, torch.arange(DRAWS)), minlength=VOCAB)


def exact(**options: Any) -> Tensor:
    """Probabilities of tokens, in fp64 and token by token."""
    logits = LOGITS.double().clone()
    for token in range(VOCAB):
        new = TEXT[PROMPT_TOKENS:].count(token)
        if token in TEXT:
            factor = options.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= new * options.get("frequency_penalty", 0.0) + (new > 0) * options.get("presence_penalty", 0.0)
        logits[token] += options.get("logit_bias", {}).get(token, 0.0)
        if token not in options.get("allowed_token_ids", range(VOCAB)):
            logits[token] = float("-inf")
        for *begin, last in options.get("bad_words", ()):
            if token == last and begin == list(TEXT[PROMPT_TOKENS:])[4 - len(begin) :]:
                logits[token] = float("-inf")
    order = logits.argsort(descending=True).tolist()
    weights = (logits / options.get("temperature", 1.0)).exp()
    kept = order[: options.get("top_k") or VOCAB]
    total, mass, nucleus = weights[kept].sum(), 0.0, []
    for token in kept:
        if mass < options.get("top_p", 1.0):
            nucleus.append(token)
        mass += float(weights[token] / total)
    kept = [token for token in nucleus if weights[token] >= options.get("min_p", 0.0) * weights[order[0]]]
    probabilities = torch.zeros(VOCAB, dtype=torch.float64)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.7, "min_p": 0.3, "temperature": 1.5},
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.1},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3, "top_k": 5},
        {"logit_bias": {0: 2.0, 8: -100.0, 5: 3.5}},
        {"allowed_token_ids": (1, 0, 9, 3)},
        {"bad_words": ((8,), (8, 6, 2), (6, 3), (1, 8, 4), (1, 8, 8, 6, 1))},
        {"allowed_token_ids": (1, 0, 8, 3), "bad_words": ((6, 3),), "top_k": 2, "temperature": 0.7},
    ],
    ids=str,
)
def test_draws_have_the_exact_distribution(options: dict[str, Any]) -> None:
    counts, expected = frequencies(SamplingOptions(seed=11, **options)).double(), exact(**options) * DRAWS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < FAR_TAIL


def test_filters_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    scores, ids = 3 * torch.randn(64, 500), torch.zeros(64, 1, dtype=torch.int64)
    for temperature, top_k, top_p, min_p in (
        (1.0, 7, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.3, 0, 1.0, 0.05),
        (1.5, 80, 0.6, 0.1),
    ):
        expected = TemperatureLogitsWarper(temperature)(ids, scores)
        if top_k:
            expected = TopKLogitsWarper(top_k)(ids, expected)
        expected = MinPLogitsWarper(min_p)(ids, TopPLogitsWarper(top_p)(ids, expected))
        options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        rows = torch.zeros(64, dtype=torch.int64)
        ours = sampler_with(options, vocab=500).scores(scores, rows, rows)
        assert torch.equal(ours.isinf(), expected.isinf())
        assert (ours.softmax(1) - expected.softmax(1)).abs().max() < 1e-6


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    scores, ids = torch.randn(8, 50), torch.randint(50, (8, 20))
    counts = torch.zeros(8, 50, dtype=torch.int32).scatter_(1, ids, 1)
    one = torch.ones(8)
    ours = penalise(scores, counts, 1.7 * one, 0 * one, 0 * one)
    assert torch.allclose(ours, RepetitionPenaltyLogitsProcessor(1.7)(ids, scores))


def test_penalties_count_the_tokens_that_were_drawn() -> None:
    options = SamplingOptions(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.4, repetition_penalty=1.3)
    stepwise = sampler_with(options, GREEDY)
    text, rows = list(TEXT), torch.tensor([0, 1])
    for position in range(7, 15):
        tokens = stepwise.sample(LOGITS.expand(2, -1), rows, torch.full((2,), position)).tolist()
        at_once = Sampler(1, CPU, VOCAB)
        at_once.assign(0, options, text, PROMPT_TOKENS)
        assert tokens == [int(at_once.sample(LOGITS[None], rows[:1], rows[:1])), int(LOGITS.argmax())]
        text.append(tokens[0])
    assert len(set(text[7:])) > 3
    counts = stepwise._history.counts[stepwise._integers.here[2, 0]]
    assert counts[3] == 1 + NEW_TOKEN * text[3:].count(3)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    every = [
        GREEDY,
        SamplingOptions(seed=5),
        SamplingOptions(top_k=4, seed=2**62),
        SamplingOptions(top_p=0.5, temperature=2.0, logit_bias={3: 1.0}),
        SamplingOptions(min_p=0.1, frequency_penalty=0.5, seed=5),
    ]
    logits, positions = 2 * torch.randn(len(every), VOCAB), torch.arange(40, 40 + len(every))
    together = sampler_with(*every).sample(logits, torch.arange(len(every)), positions)
    for index, options in enumerate(every):
        alone = sampler_with(options).sample(logits[index : index + 1], torch.tensor([0]), positions[index : index + 1])
        assert alone == together[index]


def test_rows_forget_the_options_of_released_requests() -> None:
    sampler = sampler_with(SamplingOptions(top_k=2, presence_penalty=1.0, logit_bias={0: 50.0}, logprobs=True), GREEDY)
    assert not sampler.greedy and sampler.wants_logprobs
    sampler.release(0)
    assert sampler.greedy and not sampler.wants_logprobs
    sampler.assign(0, SamplingOptions(logit_bias={1: 50.0}))
    drawn = sampler.sample(LOGITS.expand(2, -1), torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert drawn.tolist() == [1, 8]
    sampler.assign(0, SamplingOptions(temperature=0.0, presence_penalty=1.0), (8, 8), 1)
    assert sampler.sample(LOGITS[None], torch.tensor([0]), torch.tensor([0])) == 3


def test_slots_for_penalties_are_used_again() -> None:
    sampler = Sampler(40, CPU, VOCAB)
    for turn in range(120):
        sampler.assign(turn % 6, SamplingOptions(presence_penalty=1.0), TEXT, PROMPT_TOKENS)
    assert len(sampler._history.counts) <= 2 * (6 + 1)


def test_log_probabilities_are_those_of_the_model() -> None:
    few = SamplingOptions(temperature=0.3, top_k=2, logprobs=True, top_logprobs=1)
    sampler = sampler_with(few, SamplingOptions(logprobs=True, top_logprobs=4))
    logits = torch.stack((LOGITS, LOGITS.flip(0)))
    logprobs = sampler.logprobs(logits, torch.tensor([2, 5], dtype=torch.int32))
    expected = logits - logits.exp().sum(1, keepdim=True).log()
    assert torch.allclose(logprobs.chosen, torch.stack((expected[0, 2], expected[1, 5])))
    assert logprobs.top_tokens.tolist() == [[8, 3, 6, 10], [3, 8, 5, 1]]
    assert torch.allclose(logprobs.top, expected.gather(1, logprobs.top_tokens))


def test_a_bitmask_removes_tokens() -> None:
    scores = torch.zeros(2, 70)
    allowed = {0: {0, 31, 32, 69}, 1: set(range(70)) - {63}}
    words = [
        [sum(1 << bit for bit in range(32) if word * 32 + bit in allowed[row]) for word in range(3)] for row in (0, 1)
    ]
    bitmask = torch.tensor(words).to(torch.int32)
    kept = keep_allowed(scores, bitmask)
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in kept] == [allowed[0], allowed[1]]
    assert sampler_with(GREEDY, vocab=70).sample(
        kept + torch.arange(70), torch.tensor([0, 0]), torch.tensor([0, 0]), bitmask
    ).tolist() == [69, 69]


def test_samples_of_one_prompt_have_seeds_of_their_own() -> None:
    options = SamplingOptions(seed=7, top_k=5)
    samples = [options.sample(index) for index in range(100)]
    assert samples[0] == options and {sample.top_k for sample in samples} == {5}
    other = [SamplingOptions(seed=8).sample(index).seed for index in range(100)]
    assert len({sample.seed for sample in samples} | set(other)) == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature: expected 0 to 100, got -0.1; the nearest valid value is 0"),
        ({"temperature": float("nan")}, "temperature: expected a number from 0 to 100, got nan"),
        ({"top_p": 1.5}, "top_p: expected 0 to 1, got 1.5; the nearest valid value is 1"),
        ({"top_p": "1"}, "top_p: expected a number from 0 to 1, got '1'"),
        ({"min_p": 2}, "min_p: expected 0 to 1, got 2; the nearest valid value is 1"),
        ({"top_k": -1}, "top_k: expected 0 to 2147483647, got -1; the nearest valid value is 0"),
        ({"top_k": 1.5}, "top_k: expected a whole number, got 1.5"),
        ({"seed": 2**63}, "seed: expected 0 to 9223372036854775807"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected 0.01 to 100, got 0; the nearest valid value is 0.01"),
        ({"presence_penalty": -3}, "presence_penalty: expected -2 to 2, got -3; the nearest valid value is -2"),
        ({"frequency_penalty": 3}, "frequency_penalty: expected -2 to 2, got 3; the nearest valid value is 2"),
        ({"top_logprobs": 3}, "top_logprobs: 3 needs logprobs: true, or set top_logprobs to 0"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs: expected 0 to 20, got 21; the nearest valid value is 20",
        ),
        (
            {"logit_bias": {4: 101}},
            "logit_bias of token 4: expected -100 to 100, got 101; the nearest valid value is 100",
        ),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias: expected at most 1024 tokens, got 2000"),
        ({"min_tokens": -1}, "min_tokens: expected 0 to 2147483647, got -1; the nearest valid value is 0"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected a list of 1 to 1024 token ids, got 0"),
        ({"allowed_token_ids": range(5)}, "allowed_token_ids: expected a list of 1 to 1024 token ids, got range"),
        ({"allowed_token_ids": [1, True]}, "allowed_token_ids: expected token ids, got True"),
        ({"bad_words": [[1]] * 129}, "bad_words: expected a list of at most 128 words, got 129"),
        ({"bad_words": [[1], []]}, "bad_words: expected a list of 1 to 32 token ids, got 0"),
        ({"bad_words": [5]}, "bad_words: expected a list of 1 to 32 token ids, got 5"),
        ({"bad_words": [["a"]]}, "bad_words: expected token ids, got 'a'"),
        (
            {"allowed_token_ids": [1, 2], "bad_words": [[2], [1], [3]]},
            "bad_words: expected to leave one of allowed_token_ids, got all of them",
        ),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {12: 1.0}), ("allowed_token_ids", (11, 12)), ("bad_words", ((3, 12, 4),))]
)
def test_an_unknown_token_is_refused(name: str, value: Any) -> None:
    options = SamplingOptions(**{name: value})
    options.check_tokens(VOCAB + 1)
    with pytest.raises(BadInput, match=f"{name}: expected token ids of 0 to 11, got 12; the nearest is 11"):
        options.check_tokens(VOCAB)


def test_stop_ids_are_drawn_from_the_first_position_behind_min_tokens() -> None:
    sampler = Sampler(2, CPU, VOCAB)
    sampler.assign(0, SamplingOptions(temperature=0.0, min_tokens=4), TEXT, PROMPT_TOKENS, stop_ids=(8, 3))
    sampler.assign(1, SamplingOptions(temperature=0.0, min_tokens=4), TEXT, PROMPT_TOKENS)
    rows = torch.tensor([0, 1])
    early, late = (torch.full((2,), PROMPT_TOKENS + number) for number in (3, 4))
    assert sampler.sample(LOGITS.expand(2, -1), rows, early).tolist() == [6, 8]
    assert sampler.sample(LOGITS.expand(2, -1), rows, late).tolist() == [8, 8]


def test_what_would_leave_no_token_does_not_apply() -> None:
    def drawn(options: SamplingOptions, allowed: Tensor | None = None) -> int:
        sampler = Sampler(1, CPU, VOCAB)
        sampler.assign(0, options, TEXT, PROMPT_TOKENS, stop_ids=(8, 3))
        return int(sampler.sample(LOGITS[None], torch.tensor([0]), torch.tensor([4]), allowed))

    only = {token: torch.tensor([[1 << token]], dtype=torch.int32) for token in range(VOCAB)}
    early = SamplingOptions(temperature=0.0, min_tokens=9)
    assert drawn(early) == 6 and drawn(early, only[3]) == 3, "a grammar that allows only the end wins"
    assert drawn(SamplingOptions(temperature=0.0, allowed_token_ids=(5, 0)), only[2]) == 2
    assert drawn(SamplingOptions(temperature=0.0, allowed_token_ids=(3, 8), min_tokens=9)) == 8
    assert drawn(SamplingOptions(temperature=0.0, allowed_token_ids=(6, 0), bad_words=((6, 6), (6, 0)))) == 6


def test_rows_forget_what_released_requests_exclude() -> None:
    every = SamplingOptions(temperature=0.0, allowed_token_ids=(5, 7), bad_words=((8,),), min_tokens=9)
    sampler = Sampler(2, CPU, VOCAB)
    sampler.assign(0, every, TEXT, PROMPT_TOKENS, stop_ids=(8,))
    assert not sampler.greedy
    sampler.release(0)
    assert sampler.greedy
    sampler.assign(0, GREEDY, TEXT, PROMPT_TOKENS, stop_ids=(8,))
    sampler.assign(1, every, TEXT, PROMPT_TOKENS, stop_ids=(8,))
    drawn = sampler.sample(LOGITS.expand(2, -1), torch.tensor([0, 1]), torch.tensor([4, 4]))
    assert drawn.tolist() == [8, 7]


def test_options_are_the_same_after_json() -> None:
    options = SamplingOptions(logit_bias={3: 1.5}, allowed_token_ids=[1, 2], bad_words=[[1], [2, 3]], min_tokens=4)
    assert SamplingOptions.from_plain(json.loads(json.dumps(asdict(options)))) == options


def test_texts_with_penalties_do_not_depend_on_batches_and_preemption() -> None:
    model = tiny(LLAMA)
    options = SamplingOptions(seed=3, top_p=0.9, repetition_penalty=2.0, frequency_penalty=2.0, logit_bias={5: 4.0})
    alone = [texts(engine_of(model), [prompt], sampling=options)[0] for prompt in PROMPTS]
    assert alone != texts(engine_of(model), sampling=SamplingOptions(seed=3))
    engine = engine_of(model, cache_blocks=16, overlap=True, step_tokens=7)
    assert texts(engine, sampling=options) == alone and engine._policy.preemptions
    assert engine._sampler.greedy
