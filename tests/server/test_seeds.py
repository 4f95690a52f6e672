"""The noise of drawn texts: one of its own for every choice, or with a seed a function of seed and sample index."""

from __future__ import annotations

import json
from typing import Any

from tests.server.helpers import JSON, RunningServer, call


def drawn(server: RunningServer, prompts: str | list[str], **options: Any) -> list[str]:
    """The texts of one request, in order."""
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 1.5, "ignore_eos": True, **options}
    answer = server.run(call(server.app, "POST", "/v1/completions", json.dumps(body).encode(), JSON))
    assert answer.status == 200, answer.body
    return [choice["text"] for choice in json.loads(answer.body)["choices"]]


def test_without_a_seed_every_choice_is_drawn_for_itself(server: RunningServer) -> None:
    assert len({*drawn(server, ["x"] * 4, n=2), *drawn(server, "x", n=2)}) == 10


def test_with_a_seed_neither_other_prompts_nor_their_samples_change_a_text(server: RunningServer) -> None:
    for seed in (0, 7, -1):
        alone = drawn(server, "x", seed=seed, n=3)
        assert len(set(alone)) == 3 and alone[:1] == drawn(server, "x", seed=seed)
        among = drawn(server, ["y", "x", "x"], seed=seed, n=3)
        assert among[3:6] == among[6:] == alone


def test_samples_of_neighbouring_seeds_differ(server: RunningServer) -> None:
    texts = [text for seed in range(4) for text in drawn(server, "x", seed=seed, n=4)]
    assert len(set(texts)) == 16
