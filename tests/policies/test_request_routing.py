"""Choice of a request's instance: fewest requests, and prefixes while they save more than a longer queue costs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from meshwright.policies import request_routing
from meshwright.policies.request_routing import REQUEST_TOKENS, RequestRouting


@dataclass(eq=False)
class Load:
    requests: int = 0
    answered: int = 0


def test_without_prefixes_the_fewest_requests_and_answers_count() -> None:
    loads = [Load(2, 0), Load(1, 5), Load(1, 4)]
    assert RequestRouting[Load]().choose(loads) is loads[2]


def test_a_prefix_counts_as_the_requests_that_take_as_long() -> None:
    loads, routing = [Load(), Load()], RequestRouting[Load]()
    assert routing.choose(loads, ["a", "ab"], REQUEST_TOKENS) is loads[0]
    loads[0].requests = 1
    assert routing.choose(loads, ["a", "ab", "abc"], REQUEST_TOKENS) is loads[0]  # three requests' worth for one
    loads[0].requests = 3
    assert routing.choose(loads, ["a", "other"], REQUEST_TOKENS) is loads[1]
    # The first instance still has the longer prefixes, the second the short one.
    loads[0].requests, loads[1].requests = 2, 1
    assert routing.choose(loads, ["a", "ab", "abc"], REQUEST_TOKENS) is loads[0]


def test_old_prefixes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_routing, "MOST_PREFIXES", 2)
    loads, routing = [Load(), Load()], RequestRouting[Load]()
    routing.choose(loads, ["a"], REQUEST_TOKENS)
    routing.choose(loads, ["b"], REQUEST_TOKENS)
    routing.choose(loads, ["a"], REQUEST_TOKENS)
    loads[1].requests = 1
    loads[0].requests = 1
    routing.choose(loads[1:], ["c"], REQUEST_TOKENS)  # forgets b, which was used before a
    loads[0].requests = 2
    assert routing.choose(loads, ["b"], REQUEST_TOKENS) is loads[1]
    loads[0].requests, loads[1].requests = 1, 1
    assert routing.choose(loads, ["c"], REQUEST_TOKENS) is loads[1]
