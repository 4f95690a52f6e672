"""An error in the work for one request ends that request only; the others get the tokens of an undisturbed run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from meshwright.serve.engine import Engine
from meshwright.serve.generation import Generation, Update
from meshwright.serve.grammar import Grammar
from meshwright.serve.sampling_options import SamplingOptions
from meshwright.server.grammar_check import byte_tokenizer
from meshwright.spec.engine import Speculation
from tests.models.tiny import LLAMA
from tests.serve.helpers import assert_all_free, engine_of, tiny

needs_llguidance = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra grammar")
PROMPTS = [[3, 1, 4, index, 3, 1, 4, index, 3, 1] for index in range(8)]
BROKEN = 3
"""Index of the request whose work fails, and its number."""
OPTIONS = SamplingOptions(temperature=0.8, seed=5, logprobs=True, top_logprobs=2, presence_penalty=0.5)


class Broken(Exception):
    """The injected error."""


def fail(*_: Any, **__: Any) -> Any:
    raise Broken("injected")


def break_generation(name: str) -> Callable[[Engine], None]:
    """Let a method of the request's generation raise."""

    def breaks(engine: Engine) -> None:
        setattr(engine._generations[BROKEN], name, fail)

    return breaks


def break_part(attribute: str, name: str) -> Callable[[Engine], None]:
    """Let a method of an object of the request's generation raise."""

    def breaks(engine: Engine) -> None:
        part: Any = getattr(engine._generations[BROKEN], attribute)
        broken = type("Broken", (type(part),), {name: fail})
        copy = object.__new__(broken)
        copy.__dict__.update(part.__dict__)
        setattr(engine._generations[BROKEN], attribute, copy)

    return breaks


def break_logprobs(engine: Engine) -> None:
    generation = engine._generations[BROKEN]
    generation._logprobs = Unwritable()


class Unwritable(list[Any]):
    append = fail


def break_sampling_row(engine: Engine) -> None:
    assign, broken = engine._sampler.assign, engine._generations[BROKEN].sampling

    def assigned(row: int, options: Any, *others: Any) -> None:
        assign(row, options, *others)
        if options is broken:
            fail()

    engine._sampler.assign = assigned


def break_lookup(engine: Engine) -> None:
    look_up = engine._drafter._look_up  # pyrefly: ignore[missing-attribute]

    def looked_up(part: Any) -> Any:
        return fail() if part.request.number == BROKEN else look_up(part)

    engine._drafter._look_up = looked_up  # pyrefly: ignore[missing-attribute]


PLACES: dict[str, tuple[Callable[[Engine], None], str]] = {
    "sampling row": (break_sampling_row, "sampled"),
    "token": (break_generation("add"), "sampled"),
    "detokeniser": (break_part("_stream", "add"), "sampled"),
    "end of the text": (break_part("_stream", "finish"), "sampled"),
    "stop strings": (break_part("_stops", "add"), "sampled"),
    "log probabilities": (break_logprobs, "sampled"),
    "update": (break_generation("update"), "sampled"),
    "draft": (break_lookup, "drafts"),
    "drafted tokens": (break_generation("add_drafted"), "drafts"),
    "update with drafts": (break_generation("update"), "drafts"),
    "mask": (break_part("matcher", "write_bitmask"), "grammar"),
    "advance": (break_part("matcher", "advance"), "grammar"),
}


def updates_of(kind: str, breaks: Callable[[Engine], None] | None, tokenizer: Tokenizer, overlap: bool) -> list[Update]:
    speculation = Speculation(tokens=2) if kind == "drafts" else None
    engine = engine_of(tiny(LLAMA), tokenizer=tokenizer, sequences=8, overlap=overlap, speculation=speculation)
    grammar = Grammar("regex", "[a-z]*") if kind == "grammar" else None
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingOptions(temperature=0) if kind == "drafts" else OPTIONS.sample(index)
        engine.submit(prompt, new_tokens=10, sampling=sampling, grammar=grammar, stop_ids=(0,), stop_strings=("never",))
    if breaks is not None:
        breaks(engine)
    updates = list(engine.run())
    assert_all_free(engine)
    assert not engine._failures and not engine._sampler._assigned and not engine._sampler._history._slot_of
    return updates


def ends_of(updates: list[Update]) -> dict[int, tuple[list[int], Any]]:
    """Tokens and reason of each request."""
    ends: dict[int, tuple[list[int], Any]] = {}
    for update in updates:
        tokens, _ = ends.get(update.number, ([], None))
        ends[update.number] = [*tokens, *update.tokens], update.reason
    return ends


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_of_one_request_ends_it_alone(place: str, overlap: bool) -> None:
    breaks, kind = PLACES[place]
    if kind == "grammar" and importlib.util.find_spec("llguidance") is None:
        pytest.skip("needs the extra grammar")
    tokenizer = byte_tokenizer()
    expected = ends_of(updates_of(kind, None, tokenizer, overlap))
    updates = updates_of(kind, breaks, tokenizer, overlap)
    ends = ends_of(updates)
    assert ends.pop(BROKEN)[1] == "failed"
    del expected[BROKEN]
    assert ends == expected
    (failed,) = [update for update in updates if update.reason == "failed"]
    assert failed.code == "request_failed" and failed.error == "Broken: injected"


def poison(engine: Engine, token: int, value: float) -> None:
    """Let all requests whose text has `token` have logits of this value from then on."""
    compute = engine._runner.logits

    def logits(packed: Any) -> Any:
        out = compute(packed).clone()
        counts = () if packed.drafts is None else packed.drafts.counts
        row = 0
        for index, part in enumerate(packed.sampled_parts):
            rows = counts[index] if index < len(counts) else 1
            if token in part.request.prompt:
                out[row : row + rows, 7 if value > 0 or value != value else slice(None)] = value
            row += rows
        return out

    engine._runner.logits = logits


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"speculation": Speculation(tokens=2)}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_without_finite_logits_fails_and_leaves_no_block(
    value: float, options: dict[str, Any], temperature: float
) -> None:
    sampling = SamplingOptions(temperature=temperature, logprobs=True, top_logprobs=3)
    shared = [9, 8, 7, 6] * 3
    prompts = [[120, *shared], [*shared, 1], [5] * 9]

    def run(poisoned: bool) -> tuple[Engine, list[Update]]:
        engine = engine_of(tiny(LLAMA), **options)
        if poisoned:
            poison(engine, 120, value)
        for prompt in prompts:
            engine.submit(prompt, new_tokens=6, sampling=sampling)
        return engine, list(engine.run())

    _, expected = run(False)
    engine, updates = run(True)
    ends, others = ends_of(updates), ends_of(expected)
    assert ends.pop(0) == ([], "failed") and others.pop(0)
    assert ends == others
    (failed,) = [update for update in updates if update.reason == "failed"]
    assert failed.code == "not_finite" and "NaN" in str(failed.error) and not failed.logprobs
    pool, blocks = engine._policy.cache.pools[0], engine.prefix_blocks()
    assert not set(blocks.digests(prompts[0], "")) & set(pool.block_of)
    assert set(blocks.digests(shared, "")) <= set(pool.block_of)
    engine.submit([*shared, 120], new_tokens=1)  # it computes nothing of the shared blocks, yet they may be the fault
    assert [update.code for update in engine.run()] == ["not_finite"]
    assert not set(blocks.digests(shared, "")) & set(pool.block_of)
    assert_all_free(engine)
    assert len(set(pool.take_all(pool.free))) == pool.blocks  # each is free once


def test_log_probabilities_are_finite_where_the_model_excludes_tokens() -> None:
    engine = engine_of(tiny(LLAMA))
    compute = engine._runner.logits

    def logits(packed: Any) -> Any:
        out = torch.full_like(compute(packed), float("-inf"))
        out[:, 5] = 1.0
        return out

    engine._runner.logits = logits
    engine.submit([1, 2], new_tokens=1, sampling=SamplingOptions(temperature=0, logprobs=True, top_logprobs=2))
    (update,) = list(engine.run())
    (logprob,) = update.logprobs
    assert update.tokens == (5,) and logprob.chosen == 0.0 and logprob.top[1][1] == -9999.0


def test_a_failed_sample_leaves_none_of_its_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny(LLAMA))
    built: list[int] = []
    begin = Generation.begin_after

    def second_fails(generation: Generation, tokens: Any) -> None:
        built.append(1)
        if len(built) == 2:
            fail()
        begin(generation, tokens)

    monkeypatch.setattr(Generation, "begin_after", second_fails)
    with pytest.raises(Broken):
        engine.submit_samples([1, 2, 3], 3, sampling=SamplingOptions(), new_tokens=4)
    assert [update.reason for update in engine.run()] == ["abort"]
    assert_all_free(engine)
