"""`min_tokens` over HTTP: neither stop tokens nor stop strings end a text before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.helpers import JSON, RunningServer, call


def answered(server: RunningServer, **options: Any) -> tuple[str, str, int]:
    """Text, reason and tokens of an answer."""
    body = {"prompt": "abc", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **options}
    answer = server.run(call(server.app, "POST", "/v1/completions", json.dumps(body).encode(), JSON))
    assert answer.status == 200, answer.body
    content = json.loads(answer.body)
    (choice,) = content["choices"]
    return choice["text"], choice["finish_reason"], content["usage"]["completion_tokens"]


@pytest.mark.parametrize("least", [1, 7, 20])
def test_a_stop_string_counts_only_behind_min_tokens(server: RunningServer, least: int) -> None:
    """At temperature 1.5 with a seed most tokens are bytes that are no character; each such byte is one character here."""
    drawn = {"temperature": 1.5, "seed": 3}
    whole, _, tokens = answered(server, **drawn)
    assert tokens == 24
    stops = sorted({*whole[:4], whole[-2:]})
    text, reason, taken = answered(server, **drawn, stop=stops, min_tokens=least)
    assert whole.startswith(text) and (reason == "length" or taken > least)
    assert answered(server, **drawn, stop=stops)[2] <= taken


@pytest.mark.parametrize("least", [0, 9])
def test_a_stop_token_is_drawn_only_behind_min_tokens(server: RunningServer, least: int) -> None:
    stops = list(range(1, 200))
    _, reason, tokens = answered(server, stop_token_ids=stops[:64], min_tokens=least, temperature=1.5, seed=3)
    assert tokens >= least and (reason == "length" or least or tokens < 24)
