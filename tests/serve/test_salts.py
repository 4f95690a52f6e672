"""Salts and priorities in the engine: requests of different salts share no block, whatever is shared beside them."""

from __future__ import annotations

import json
import random
from itertools import takewhile
from typing import Any

import pytest

from meshwright.policies.batch_request import LARGEST_PRIORITY, LONGEST_SALT
from meshwright.serve.sampling import GREEDY, SamplingOptions
from meshwright.serve.text_request import TextRequest
from meshwright.spec.errors import BadInput
from tests.models.tiny import LLAMA
from tests.serve.helpers import PROMPTS, assert_all_free, engine_of, texts, tiny

SALTS = ("", "a", "a ", "\udc80", "é")


def common(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_finds_the_longest_beginning_of_an_equal_salt(seed: int) -> None:
    """Never more than that. Whole texts are known to the cache, in blocks of 4 tokens; a text's last token is not computed."""
    draw, model = random.Random(seed), tiny(LLAMA)
    engine = engine_of(model, cache_blocks=1000)
    alone = dict(zip(PROMPTS, texts(engine_of(model)), strict=True))
    known: dict[str, list[list[int]]] = {salt: [] for salt in SALTS}
    for _ in range(25):
        prompt, salt, samples = draw.choice(PROMPTS), draw.choice(SALTS), draw.choice([1, 1, 3])
        before = engine.figures().cached_tokens
        numbers = engine.submit_samples(prompt, samples, sampling=GREEDY, new_tokens=12, salt=salt)
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        for update in engine.run():
            tokens[update.number] += update.tokens
        assert all(text == alone[prompt] for text in tokens.values())
        whole = (len(prompt) - 1) // 4 * 4
        longest = max((common(list(prompt), text[:-1]) for text in known[salt]), default=0)
        expected = min(whole, longest // 4 * 4) + (samples - 1) * whole
        assert engine.figures().cached_tokens - before == expected
        known[salt].append([*prompt, *alone[prompt]])
    assert_all_free(engine)


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}], ids=str)
def test_a_sample_of_another_salt_computes_its_prompt_itself(options: dict[str, Any]) -> None:
    engine = engine_of(tiny(LLAMA), **options)
    first = engine.submit(PROMPTS[0], new_tokens=3)
    engine.submit(PROMPTS[0], new_tokens=3, samples_of=first, salt="other")
    for _ in engine.run():
        pass
    assert engine.figures().cached_tokens == 0


def test_requests_of_a_larger_priority_go_first() -> None:
    engine = engine_of(tiny(LLAMA), sequences=1)
    numbers = [engine.submit(PROMPTS[1], new_tokens=2, priority=priority) for priority in (0, -1, 2, 1)]
    ends = [update.number for update in engine.run() if update.reason is not None]
    assert ends == [numbers[index] for index in (2, 3, 0, 1)]


def test_salts_and_priorities_have_bounds() -> None:
    engine = engine_of(tiny(LLAMA))
    engine.submit(PROMPTS[1], new_tokens=2, salt="s" * LONGEST_SALT, priority=-LARGEST_PRIORITY)
    with pytest.raises(BadInput, match="expected a salt of at most 256 characters, got 257"):
        engine.submit(PROMPTS[1], new_tokens=2, salt="s" * (LONGEST_SALT + 1))
    with pytest.raises(BadInput, match="expected a priority of at most 2147483647"):
        engine.submit(PROMPTS[1], new_tokens=2, priority=LARGEST_PRIORITY + 1)


def test_other_ranks_get_all_options() -> None:
    sampling = SamplingOptions(bad_words=[[1], [2, 3]], allowed_token_ids=[4, 5], min_tokens=2, logit_bias={3: 1.0})
    request = TextRequest(
        prompt=[1, 2],
        new_tokens=3,
        stop_ids=[7],
        stop_strings=[],
        given=[],
        salt="\udc80",
        priority=4,
        sampling=sampling,
    )
    assert TextRequest.from_plain(json.loads(json.dumps(request.to_plain()))) == request
