from __future__ import annotations

import random

import pytest

from meshwright.policies.batch_request import BatchLimits, CacheGroup, Request
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.batching_player import play
from meshwright.policies.cache_blocks import CacheBlocks


def make_policy(tokens: int = 8, sequences: int = 8, blocks: int = 200) -> BatchPolicy[CacheBlocks]:
    return BatchPolicy(BatchLimits(tokens, sequences), CacheBlocks([CacheGroup(blocks)], 4))


def test_times_of_a_lone_request_have_closed_forms() -> None:
    served = play(make_policy(), [Request(7, range(18), 5, arrival=10.0)], lambda *_: 0.5)
    # Three chunks of at most 8 tokens, then four decodes.
    assert served[0].time_to_first_token == pytest.approx(1.5)
    assert served[0].time_per_token == pytest.approx(0.5)
    assert (served[0].end, served[0].new_tokens, served[0].reason) == (pytest.approx(13.5), 5, "length")


def test_cost_sees_the_positions_that_decodes_attend_to() -> None:
    seen = []

    def cost(decodes: int, context: int, chunks: list) -> float:
        seen.append((decodes, context, [(part.start, part.count) for part in chunks]))
        return 1.0

    play(make_policy(), [Request(0, range(3), 3), Request(1, range(5), 2)], cost, longest_repeat=1)
    assert seen == [(0, 0, [(0, 3), (0, 5)]), (2, 4 + 6, []), (1, 5, [])]


def test_repeated_steps_do_not_change_any_time() -> None:
    draw = random.Random(3)
    requests = [
        Request(
            number,
            [draw.randrange(50) for _ in range(draw.randint(1, 40))],
            draw.randint(1, 90),
            arrival=draw.random() * 300,
            deadline=draw.choice([None, None, 250.0]),
        )
        for number in range(60)
    ]

    def cost(decodes: int, context: int, chunks: list) -> float:
        return 0.2 + 0.01 * decodes + 0.001 * context + 0.05 * sum(part.count for part in chunks)

    single = play(make_policy(blocks=100), requests, cost, longest_repeat=1)
    assert play(make_policy(blocks=100), requests, cost) == single
    assert {served.reason for served in single} == {"length", "deadline"}
