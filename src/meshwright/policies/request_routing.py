"""Which instance gets a request: the one with the least work, counting what its prefix cache saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

REQUEST_TOKENS = 32
"""Prompt tokens that are as much work as one more request whose tokens are being decoded: a guess."""


class InstanceLoad(NamedTuple):
    """Work of an instance that the router knows of."""

    requests: int
    """Requests that have not ended."""
    prompt_tokens: int
    """Tokens of their prompts that are not computed yet."""


def choose_instance(loads: Sequence[InstanceLoad], cached_tokens: Sequence[int] = ()) -> int:
    """Index of the instance for a request, the first of equals. `cached_tokens`: those of its prompt in each prefix cache."""
    best, least = 0, float("inf")
    for index, (requests, prompt_tokens) in enumerate(loads):
        work = prompt_tokens + REQUEST_TOKENS * requests - (cached_tokens[index] if cached_tokens else 0)
        if work < least:
            best, least = index, work
    return best
