from __future__ import annotations

from meshwright.policies.batch_request import BatchLimits, CacheGroup, Ended, Request
from meshwright.policies.batching import BatchPolicy


def make_policy(blocks: int = 65, tokens: int = 32, sequences: int = 8, **limits: object) -> BatchPolicy:
    return BatchPolicy(BatchLimits(tokens, sequences, **limits), [CacheGroup(blocks)], 4)


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    policy = make_policy(tokens=8)
    policy.add(Request(1, range(18), 3))
    chunks = []
    while (step := policy.next_step(0.0)) is not None:
        chunks += [(part.start, part.count, part.samples, len(part.blocks)) for part in step.parts]
        policy.complete(step, [100 + step.number] * len(step.sampling))
    assert chunks == [(0, 8, False, 2), (8, 8, False, 4), (16, 2, True, 5), (18, 1, True, 5), (19, 1, True, 5)]
    assert policy.drain_ended() == [Ended(1, "length", 3)]
    assert policy.cache.pools[0].free == 64


def test_a_step_planned_ahead_counts_the_tokens_in_flight() -> None:
    policy = make_policy()
    policy.add(Request(1, range(5), 3))
    first = policy.next_step(0.0)
    second = policy.next_step(0.0)
    assert [(part.start, part.count) for part in second.parts] == [(5, 1)]
    policy.complete(first, [7])
    third = policy.next_step(0.0)
    assert [part.start for part in third.parts] == [6]
    assert policy.next_step(0.0) is None
    policy.complete(second, [8])
    policy.complete(third, [9])
    assert policy.drain_ended() == [Ended(1, "length", 3)]
    assert first.parts[0].tokens == [0, 1, 2, 3, 4, 7, 8, 9]
