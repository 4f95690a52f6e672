"""The engine against the trainer's forward over whole texts, on a CPU in fp32."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.serve.engine import Engine
from meshwright.serve.generation import Generation, Update
from meshwright.serve.readback import LaunchedStep
from meshwright.serve.sampling import SamplingOptions
from meshwright.spec.engine import EngineOptions
from meshwright.spec.errors import BadInput
from tests.models.tiny import ALL, DENSE, LLAMA, built
from tests.serve.helpers import (
    PROMPTS,
    TOKENS,
    assert_all_free,
    continued_texts,
    engine_of,
    greedy,
    record_logits,
    texts,
    tiny,
)
from tests.slow import quick_first

MODELS = {**ALL, **DENSE}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_prefill_and_decode_are_those_of_the_trainer(name: str) -> None:
    model = tiny(MODELS[name])
    engine = engine_of(model)
    seen = record_logits(engine)
    new = texts(engine)
    with torch.no_grad():
        for number, (prompt, tokens) in enumerate(zip(PROMPTS, new, strict=True)):
            whole = model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
            assert (torch.stack(seen[number]) - whole).abs().max() < 1e-5
            assert tokens == whole.argmax(1).tolist()
    if name in DENSE:
        assert texts(engine) == new
        assert engine._policy.cached_tokens > 0


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return greedy(tiny(LLAMA))


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"sequences": 1},
        {"step_tokens": 4, "overlap": True},
        {"step_tokens": 512},
        {"tokens_per_block": 16, "prefix_cache": False},
        {"cache_blocks": 16},
        {"cache_blocks": 16, "overlap": True, "step_tokens": 7},
    ],
    ids=str,
)
def test_texts_do_not_depend_on_batches_chunks_blocks_and_preemption(
    options: dict[str, Any], expected: list[list[int]]
) -> None:
    engine = engine_of(tiny(LLAMA), **options)
    assert texts(engine) == expected
    assert (engine._policy.preemptions > 0) == (options.get("cache_blocks") == 16)
    assert_all_free(engine)


@pytest.mark.parametrize("overlap", quick_first(1, [True, False]))
def test_texts_go_on_after_another_engine_has_computed_their_prompts(overlap: bool, expected: list[list[int]]) -> None:
    sender, receiver = (engine_of(tiny(LLAMA), overlap=overlap, sequences=8) for _ in range(2))
    assert continued_texts(sender, receiver) == expected
    assert_all_free(sender)
    assert_all_free(receiver)


def test_a_text_may_end_at_the_first_token_behind_a_moved_prompt(expected: list[list[int]]) -> None:
    sender, receiver = (engine_of(tiny(LLAMA), sequences=8) for _ in range(2))
    assert continued_texts(sender, receiver, new_tokens=2) == [text[:2] for text in expected]
    assert_all_free(receiver)


def test_prefix_hits_do_not_change_texts(expected: list[list[int]]) -> None:
    engine = engine_of(tiny(LLAMA))
    assert [texts(engine, [prompt])[0] for prompt in PROMPTS] == expected
    assert engine._policy.cached_tokens == 32  # of the last prompt, which begins like the first
    assert texts(engine) == expected


def test_drawn_texts_depend_on_seed_and_text_alone() -> None:
    model, drawn = tiny(LLAMA), SamplingOptions(temperature=1.5, top_k=40, seed=7)
    alone = [texts(engine_of(model), [prompt], sampling=drawn)[0] for prompt in PROMPTS]
    assert texts(engine_of(model, overlap=True, step_tokens=6), sampling=drawn) == alone
    other = texts(engine_of(model), sampling=SamplingOptions(temperature=1.5, top_k=40, seed=8))
    assert all(left != right for left, right in zip(alone, other, strict=True))


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False, "overlap": True}], ids=str)
def test_samples_share_one_computation_of_their_prompt(options: dict[str, Any]) -> None:
    model, drawn = tiny(LLAMA), SamplingOptions(temperature=1.5, seed=2**63 - 1)
    engine = engine_of(model, **options)
    numbers = engine.submit_samples(PROMPTS[0], 3, sampling=drawn, new_tokens=TOKENS)
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.unfinished:
        for update in engine.step():
            tokens[update.number] += update.tokens
    # All full blocks before the last token of the prompt: its logits are needed.
    assert engine._policy.cached_tokens == 2 * 36
    alone = [texts(engine_of(model), PROMPTS[:1], sampling=drawn.sample(index))[0] for index in range(3)]
    assert list(tokens.values()) == alone
    assert len({tuple(text) for text in alone}) == 3
    assert_all_free(engine)


def test_updates_say_what_was_cached_and_which_token_ended_a_text(expected: list[list[int]]) -> None:
    engine = engine_of(tiny(LLAMA), cache_blocks=20, overlap=True)
    stop, prompts = expected[1][5], [*PROMPTS, *PROMPTS]
    cached, tokens, ends = Counter(), Counter(), {}
    for prompt in prompts:
        engine.submit(prompt, new_tokens=TOKENS, stop_ids=[0, stop])
    for update in engine.run():
        assert not update.cached_tokens or not tokens[update.number], "with the first tokens only"
        cached[update.number] += update.cached_tokens
        tokens[update.number] += len(update.tokens)
        ends[update.number] = update.reason, update.stop_token
        figures = engine.figures()
        assert figures.cached_tokens <= figures.looked_up_tokens
    stopped = [stop in text for text in expected * 2]
    assert [ends[number] == ("stop", stop) for number in range(len(prompts))] == stopped
    assert [ends[number] == ("length", None) for number in range(len(prompts))] == [not each for each in stopped]
    assert engine._policy.preemptions and cached[4] == 32
    assert engine.figures().cached_tokens == cached.total()
    assert engine.figures().looked_up_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_without_reports_of_steps_gets_one_update_with_all_tokens(
    overlap: bool, expected: list[list[int]]
) -> None:
    engine = engine_of(tiny(LLAMA), overlap=overlap)
    sampling = SamplingOptions(temperature=0.0, logprobs=True)
    for prompt in PROMPTS:
        engine.submit(prompt, new_tokens=TOKENS, sampling=sampling, reports_steps=False)
    spoken = engine.submit(PROMPTS[0], new_tokens=TOKENS, sampling=sampling)
    updates = list(engine.run())
    *single, steps = ([update for update in updates if update.number == number] for number in range(spoken + 1))
    assert len(steps) > 1
    assert [[update.tokens for update in each] for each in single] == [[tuple(tokens)] for tokens in expected]
    logprobs = [logprob.chosen for update in steps for logprob in update.logprobs]
    assert [logprob.chosen for logprob in single[0][0].logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert {each[0].reason for each in single} == {"length"}


def test_details_have_only_what_has_a_value() -> None:
    update = Update(3, (1,), "", None)
    assert update.details == {}
    assert update._replace(reason="stop", stop_token=0).details == {"reason": "stop", "stop_token": 0}
    assert update._replace(cached_tokens=8).details == {"cached_tokens": 8}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_token_ends_a_text_before_it(overlap: bool, expected: list[list[int]]) -> None:
    stop = expected[0][5]
    engine = engine_of(tiny(LLAMA), overlap=overlap)
    until = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in expected]
    assert texts(engine, stop_ids=[stop]) == until
    assert_all_free(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_request_frees_its_blocks_and_the_others_go_on(overlap: bool, expected: list[list[int]]) -> None:
    engine = engine_of(tiny(LLAMA), overlap=overlap)
    numbers = [engine.submit(prompt, new_tokens=TOKENS) for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ends: dict[int, object] = {}
    while engine.unfinished:
        for update in engine.step():
            tokens[update.number] += update.tokens
            ends[update.number] = update.reason
        if len(tokens[1]) == 3:
            engine.abort(1)
    assert ends == {0: "length", 1: "abort", 2: "length", 3: "length", 4: "length"}
    assert tokens[1] == expected[1][:3]
    assert [tokens[number] for number in (0, 2, 3, 4)] == [expected[number] for number in (0, 2, 3, 4)]
    assert_all_free(engine)


@pytest.mark.parametrize("method", ["logits", "add"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(
    method: str, overlap: bool, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sixth launch raises, or the sixth time that a request takes a token in."""
    engine = engine_of(tiny(LLAMA), overlap=overlap, sequences=2)
    target = engine._runner if method == "logits" else Generation
    call, calls = getattr(target, method), []

    def raises_once(*inputs: Any) -> Any:
        calls.append(inputs)
        if len(calls) == 6:
            raise ValueError("out of luck")
        return call(*inputs)

    monkeypatch.setattr(target, method, raises_once)
    numbers = [engine.submit(prompt, new_tokens=TOKENS) for prompt in PROMPTS]
    ends, tokens = {}, {number: [] for number in numbers}
    for update in engine.run():
        tokens[update.number] += update.tokens
        ends[update.number] = update.reason, update.error
    failed = [number for number, end in ends.items() if end == ("failed", "ValueError: out of luck")]
    assert 1 <= len(failed) <= 2
    assert all(ends[number] == ("length", None) for number in set(numbers) - set(failed))
    for number in numbers:
        assert tokens[number] == expected[number][: len(tokens[number])]
        assert (len(tokens[number]) == TOKENS) == (number not in failed)
    assert texts(engine) == expected
    assert_all_free(engine)


def test_a_deadline_ends_a_request() -> None:
    engine = engine_of(tiny(LLAMA))
    now = [0.0]
    engine._clock = lambda: now[0]
    engine.submit(PROMPTS[0], new_tokens=TOKENS, seconds=5.0)
    engine.submit(PROMPTS[1], new_tokens=TOKENS)
    ends = {}
    while engine.unfinished:
        now[0] += 1.0
        ends.update({update.number: update.reason for update in engine.step()})
    assert ends == {0: "deadline", 1: "length"}
    assert_all_free(engine)


def test_a_text_ends_at_the_end_of_the_context(expected: list[list[int]]) -> None:
    engine = engine_of(tiny(LLAMA), context=len(PROMPTS[0]) + 4)
    engine.submit(PROMPTS[0], new_tokens=TOKENS)
    updates = list(engine.run())
    assert [token for update in updates for token in update.tokens] == expected[0][:4]
    assert updates[-1].reason == "length"


@pytest.mark.parametrize(
    ("prompt", "request_options", "message"),
    [
        ((), {}, "at least one"),
        ((3, LLAMA.vocab_size), {}, "expected token ids of 0 to 130"),
        ((1,) * 64, {}, "a prompt of 64 tokens leaves no room in a context of 64 tokens; shorten it to 63"),
        ((1,), {"new_tokens": 0}, "new_tokens: expected at least 1"),
        ("text", {}, "needs an engine with a tokenizer"),
        ((1,), {"stop_strings": ["x"]}, "stop strings need an engine with a tokenizer"),
    ],
)
def test_a_wrong_request_is_refused(prompt: Any, request_options: dict[str, Any], message: str) -> None:
    engine = engine_of(tiny(LLAMA))
    with pytest.raises(BadInput, match=message):
        engine.submit(prompt, **{"new_tokens": 3, **request_options})
    assert not engine.unfinished


@pytest.mark.parametrize("size", ["sequences", "step_tokens", "tokens_per_block", "cache_blocks", "context"])
def test_sizes_of_an_engine_are_at_least_one(size: str) -> None:
    with pytest.raises(BadInput, match=f"{size}: expected at least 1, got 0"):
        EngineOptions(**{size: 0})


def test_tokens_that_have_come_do_not_wait_for_the_launch_of_a_prompt() -> None:
    sizes = EngineOptions(step_tokens=8, sequences=4, tokens_per_block=4, cache_blocks=50, overlap=True, texts=False)
    engine = Engine(built(LLAMA, dtype=torch.float32), options=sizes)
    with patch.object(LaunchedStep, "has_come", lambda launched: True):
        first = engine.submit([1] * 8, new_tokens=3)
        assert engine.step() == []  # launched
        second = engine.submit([2] * 8, new_tokens=2)
        with patch.object(engine, "_launch", side_effect=AssertionError):
            assert [(update.number, len(update.tokens)) for update in engine.step()] == [(first, 1)]
        assert engine.step() == []
        # Without a prompt a step is launched before the tokens of the last one are read.
        assert {update.number for update in engine.step()} == {first, second} and engine._in_flight is not None
        assert [update.reason for update in engine.run() if update.reason] == ["length", "length"]
