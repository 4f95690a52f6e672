"""Tokens that requests exclude, in the engine: texts beside those of the trainer's forward with the same rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from meshwright.models.decoder import Decoder
from meshwright.serve.sampling import SamplingOptions
from meshwright.spec.engine import Speculation
from tests.models.tiny import LLAMA
from tests.serve.helpers import PROMPTS, assert_all_free, continued_texts, engine_of, texts, tiny
from tests.slow import quick_first

NEW = 16
LOOKUP = Speculation(tokens=3, shortest=1, least=0.0)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"overlap": True, "step_tokens": 7},
    {"speculation": LOOKUP},
    {"cache_blocks": 16, "overlap": True},
    {"invariant": True},
    {},
)
"""Overlap with chunks, drafts, preemptions, single tokens, neither."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny(LLAMA)


@torch.no_grad()
def likeliest(model: Decoder, prompt: tuple[int, ...], options: dict[str, Any], stops: set[int]) -> list[int]:
    """The likeliest continuation under the rules, up to a stop token."""
    new: list[int] = []
    while len(new) < NEW:
        logits = model(torch.tensor([[*prompt, *new]]))[0, -1]
        excluded = set(range(len(logits))) - set(options.get("allowed_token_ids") or range(len(logits)))
        for *begin, last in options.get("bad_words", ()):
            if new[len(new) - len(begin) :] == begin and len(new) >= len(begin):
                excluded.add(last)
        if len(new) < options.get("min_tokens", 0):
            excluded |= stops
        logits[list(excluded)] = float("-inf")
        if (token := int(logits.argmax())) in stops:
            break
        new.append(token)
    return new


@pytest.fixture(scope="module")
def free(model: Decoder) -> list[list[int]]:
    return [likeliest(model, prompt, {}, set()) for prompt in PROMPTS]


class Rules(NamedTuple):
    options: dict[str, Any]
    stops: set[int]
    expected: list[list[int]]
    """The texts of `likeliest`."""


@pytest.fixture(scope="module")
def rules(model: Decoder, free: list[list[int]]) -> dict[str, Rules]:
    """Rules that the free texts break at many places."""

    def obeyed(options: dict[str, Any], stops: set[int]) -> Rules:
        return Rules(options, stops, [likeliest(model, prompt, options, stops) for prompt in PROMPTS])

    def words(texts: list[list[int]]) -> list[list[int]]:
        return [text[start : start + length] for text in texts for start, length in ((0, 2), (3, 3), (5, 4))]

    once = obeyed({"bad_words": words(free)}, set())
    every = {"allowed_token_ids": list(range(0, 131, 2)), "bad_words": [[2, 4], [6]], "min_tokens": 5}
    return {
        "words": obeyed({"bad_words": words(free) + words(once.expected)}, set()),
        "stops": obeyed({"min_tokens": 7}, {token for text in free for token in text[:4]}),
        "all": obeyed(every, {8, 10, 12}),
    }


@pytest.mark.parametrize("settings", quick_first(3, SETTINGS), ids=str)
@pytest.mark.parametrize("name", ["words", "stops", "all"])
def test_texts_exclude_the_same_tokens_in_every_engine(
    model: Decoder, free: list[list[int]], rules: dict[str, Rules], name: str, settings: dict[str, Any]
) -> None:
    options, stops, expected = rules[name]
    assert not any(text == other[: len(text)] for text, other in zip(expected, free, strict=True))
    engine = engine_of(model, **settings)
    sampling = SamplingOptions(temperature=0.0, **options)
    assert texts(engine, new_tokens=NEW, sampling=sampling, stop_ids=stops) == expected
    assert_all_free(engine)
    assert engine._sampler.greedy and texts(engine, new_tokens=NEW) == free


@pytest.mark.parametrize("drafts", ["lookup", "model", "modules"])
def test_drawn_texts_keep_the_rules_beside_drafts(rules: dict[str, Rules], drafts: str) -> None:
    """Prompt lookup changes no text at all."""
    model = tiny(replace(LLAMA, prediction_depth=2 * (drafts == "modules")))
    options, stops, _ = rules["all"]
    sampling = SamplingOptions(seed=5, temperature=0.7, **{**options, "bad_words": [[6], [20]]})
    speculation = {"lookup": LOOKUP, "model": replace(LOOKUP, tokens=2), "modules": replace(LOOKUP, tokens=2, mtp=True)}
    engine = engine_of(model, speculation=speculation[drafts], draft_model=tiny(LLAMA) if drafts == "model" else None)
    found = texts(engine, new_tokens=NEW, sampling=sampling, stop_ids=stops)
    assert engine.drafts[0] > 0
    if drafts == "lookup":
        assert found == texts(engine_of(model), new_tokens=NEW, sampling=sampling, stop_ids=stops)
    for text in found:
        assert len(text) >= 5 and not any(token % 2 or token in (6, 20) for token in text)


def test_requests_whose_bad_words_have_several_tokens_get_no_drafts(model: Decoder) -> None:
    engine = engine_of(model, speculation=LOOKUP)
    texts(engine, new_tokens=NEW, sampling=SamplingOptions(temperature=0.0, bad_words=[[1, 2]]))
    assert engine.drafts == (0, 0)


def test_rules_go_on_where_another_engine_began_the_text(model: Decoder, rules: dict[str, Rules]) -> None:
    options, stops, expected = rules["words"]
    sampling = SamplingOptions(temperature=0.0, **options, min_tokens=3)
    engines = [engine_of(model, sequences=8) for _ in range(2)]
    found = continued_texts(*engines, new_tokens=NEW, sampling=sampling, stop_ids=stops)
    assert found == expected


def test_stop_strings_count_behind_min_tokens(model: Decoder, free: list[list[int]]) -> None:
    words = [*"abcdefghijklmnopqrstuvwxyz", *(chr(number) for number in range(0x100, 0x100 + 131 - 26))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    whole = tokenizer.decode(free[0])
    stops = [*whole[:5], whole[6:9]]
    at = next(end for end in range(5, NEW + 1) if whole[:end].endswith(tuple(stops)) and end > 5)
    start = min(at - len(stop) for stop in stops if whole[:at].endswith(stop))
    engine = engine_of(model, tokenizer=tokenizer)
    engine.submit(
        PROMPTS[0],
        new_tokens=NEW,
        sampling=SamplingOptions(temperature=0.0, min_tokens=5),
        stop_strings=stops,
    )
    updates = list(engine.run())
    assert "".join(update.text for update in updates) == whole[:start] and updates[-1].reason == "stop"
    assert sum(len(update.tokens) for update in updates) == at
