from __future__ import annotations

import pytest

from meshwright.policies.batch_request import BatchLimits, CacheGroup, EngineStep, Request, RequestEnded
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.policies.moving_blocks import ReservedBlocks, UnsentBlocks
from meshwright.spec.errors import BadInput

SIZE = 4
"""Tokens of a block."""


def make_policy(
    blocks: int = 64, tokens: int = 32, sequences: int = 8, window: int | None = None, **limits: float
) -> BatchPolicy[CacheBlocks]:
    """A policy with `blocks` usable blocks, none of them held in reserve."""
    return BatchPolicy(
        BatchLimits(tokens, sequences, reserve=0.0, **limits), CacheBlocks([CacheGroup(blocks + 1, window)], SIZE)
    )


def parts_of(step: EngineStep | None) -> list[tuple[int, int, int]]:
    """(request, start, count) of each part."""
    return [(part.request.number, part.start, part.count) for part in step.parts] if step else []


def advance(policy: BatchPolicy[CacheBlocks], now: float = 0.0, token: int = 99) -> list[tuple[int, int, int]]:
    """Plan and complete a step in which every sampled token is `token`; returns its parts."""
    step = policy.next_step(now)
    parts = parts_of(step)
    if step:
        policy.complete(step, [token] * len(step.sampling))
    return parts


def finish(policy: BatchPolicy[CacheBlocks]) -> list[list[tuple[int, int, int]]]:
    steps = []
    while parts := advance(policy):
        steps.append(parts)
    return steps


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    policy = make_policy(tokens=8)
    policy.add(Request(1, range(18), 3))
    assert finish(policy) == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 2)], [(1, 18, 1)], [(1, 19, 1)]]
    assert policy.drain_ended() == [RequestEnded(1, "length", 3)]
    assert policy.cache.pools[0].free == 64


@pytest.mark.parametrize("length", [3, 8, 10])
def test_a_text_goes_on_by_decodes_after_another_engine_has_computed_its_prompt(length: int) -> None:
    """Prompts of less than a block, of full blocks, and of full blocks and a part of one."""
    sender, policy, prompt = make_policy(), make_policy(), range(length)
    sender.add(Request(0, prompt, 1, continued_elsewhere=True))
    finish(sender)
    digests = sender.prompt_digests(prompt, tail=True)
    unsent = UnsentBlocks(sender.cache, digests, 0)
    unsent.extend()
    assert len(unsent) == -(-length // SIZE)
    unsent.release()
    reserved = ReservedBlocks(policy.cache, digests)
    reserved.take()
    reserved.enter(0, len(digests))
    reserved.release()
    for number in (1, 2):
        policy.add(Request(number, prompt, 4, given=[50]))
    start = length // SIZE * SIZE
    first = [(1, length, 1), (2, length, 1)] if length == start else [(1, length, 1), (2, start, length + 1 - start)]
    # The first text takes the block that is not full over: it writes to it.
    assert finish(policy) == [first, *([(1, length + more, 1), (2, length + more, 1)] for more in (1, 2))]
    assert policy.drain_ended() == [RequestEnded(1, "length", 4), RequestEnded(2, "length", 4)]
    assert sender.cache.pools[0].free == policy.cache.pools[0].free == 64


def test_decodes_come_before_chunks_and_beside_the_budget() -> None:
    policy = make_policy(tokens=8)
    policy.add(Request(1, range(3), 9))
    advance(policy)
    policy.add(Request(2, range(20), 9))
    policy.add(Request(3, range(2), 9))
    assert advance(policy) == [(1, 3, 1), (2, 0, 8)]
    assert advance(policy) == [(1, 4, 1), (2, 8, 8)]
    assert advance(policy) == [(1, 5, 1), (2, 16, 4), (3, 0, 2)]
    assert advance(policy) == [(1, 6, 1), (2, 20, 1), (3, 2, 1)]


def test_a_step_planned_ahead_counts_the_tokens_in_flight() -> None:
    policy = make_policy()
    policy.add(Request(1, range(5), 3))
    first = policy.next_step(0.0)
    second = policy.next_step(0.0)
    assert parts_of(second) == [(1, 5, 1)]
    policy.complete(first, [7])
    third = policy.next_step(0.0)
    assert parts_of(third) == [(1, 6, 1)] and third.unchanged
    assert policy.next_step(0.0) is None
    policy.complete(second, [8])
    policy.complete(third, [9])
    assert policy.drain_ended() == [RequestEnded(1, "length", 3)]
    assert first.parts[0].tokens == [0, 1, 2, 3, 4, 7, 8, 9]


def test_a_request_that_stopped_wastes_the_part_planned_ahead() -> None:
    policy = make_policy()
    policy.add(Request(1, range(5), 9))
    policy.add(Request(2, range(5), 9))
    first, second = policy.next_step(0.0), policy.next_step(0.0)
    policy.complete(first, [7, 8], stopped={1})
    assert parts_of(policy.next_step(0.0)) == [(2, 6, 1)]
    policy.complete(second, [5, 6])
    assert second.parts[0].tokens[5:] == [7] and second.parts[1].tokens[5:] == [8, 6]
    assert policy.drain_ended() == [RequestEnded(1, "stop", 1)]


def test_full_blocks_of_a_prefix_are_shared_and_the_last_token_is_computed() -> None:
    policy = make_policy()
    policy.add(Request(1, range(12), 1))
    assert finish(policy) == [[(1, 0, 12)]]
    policy.add(Request(2, range(12), 1))
    policy.add(Request(3, [*range(6), 50, 51, 52], 1))
    assert finish(policy) == [[(2, 8, 4), (3, 4, 5)]]
    assert policy.cached_tokens == 12


def test_generated_tokens_are_shared_too() -> None:
    policy = make_policy()
    policy.add(Request(1, range(4), 5))
    finish(policy)
    policy.add(Request(2, [0, 1, 2, 3, 99, 99, 99, 99, 5], 1))
    assert finish(policy) == [[(2, 8, 1)]]


def test_other_salts_and_other_weights_share_nothing() -> None:
    policy = make_policy()
    policy.add(Request(1, range(12), 1, salt="a"))
    finish(policy)
    policy.add(Request(2, range(12), 1, salt="b"))
    policy.add(Request(3, range(12), 1))
    assert finish(policy) == [[(2, 0, 12), (3, 0, 12)]]
    policy.forget_cache()
    policy.add(Request(4, range(12), 1))
    assert finish(policy) == [[(4, 0, 12)]]
    policy.add(Request(5, range(12), 1))
    assert finish(policy) == [[(5, 8, 4)]]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_wait_for_the_prompt_and_share_its_blocks(prefix_cache: bool) -> None:
    policy = make_policy(tokens=8, prefix_cache=prefix_cache)
    policy.add(Request(1, range(10), 4))
    for number in (2, 3):
        policy.add(Request(number, range(10), 4, samples_of=1))
    assert advance(policy) == [(1, 0, 8)]
    assert advance(policy) == [(1, 8, 2)]
    step = policy.next_step(0.0)
    assert parts_of(step) == [(1, 10, 1), (2, 8, 2), (3, 8, 2)]
    assert step.parts[0].blocks[:2] == step.parts[1].blocks[:2] == step.parts[2].blocks[:2]
    assert len({part.blocks[2] for part in step.parts}) == 3


def test_samples_go_on_when_the_first_of_them_ends() -> None:
    policy = make_policy(tokens=8)
    policy.add(Request(1, range(10), 4))
    for number in (2, 3):
        policy.add(Request(number, range(10), 1, samples_of=1))
    advance(policy)
    policy.abort(1)
    # The third still waits for the second; both begin after the block that the first has left in the cache.
    assert finish(policy) == [[(2, 8, 2)], [(3, 8, 2)]]


def test_the_least_recently_used_block_is_evicted() -> None:
    policy = make_policy(blocks=4)
    for number, first in enumerate((0, 100, 200)):
        policy.add(Request(number, range(first, first + 5), 1))
        finish(policy)
    # Each prompt has left one full block in the cache. The fourth takes the empty block and the oldest cached one.
    policy.add(Request(3, range(300, 305), 1))
    finish(policy)
    for number, first, start in ((4, 200, 4), (5, 100, 4), (6, 0, 0)):
        policy.add(Request(number, range(first, first + 5), 1))
        assert finish(policy) == [[(number, start, 5 - start)]]


def test_the_last_request_in_order_is_preempted_and_computed_again() -> None:
    policy = make_policy(blocks=4, prefix_cache=False)
    policy.add(Request(1, range(7), 9))
    policy.add(Request(2, range(7), 9))
    assert advance(policy) == [(1, 0, 7), (2, 0, 7)]
    assert advance(policy) == [(1, 7, 1), (2, 7, 1)]
    assert advance(policy) == [(1, 8, 1)]
    assert policy.preemptions == 1
    steps = finish(policy)
    assert steps[6:8] == [[(2, 0, 9)], [(2, 9, 1)]]
    assert policy.drain_ended() == [RequestEnded(1, "length", 9), RequestEnded(2, "length", 9)]


def test_a_higher_priority_displaces_a_lower_within_its_limit_of_seconds() -> None:
    policy = make_policy(sequences=1, tokens=8, priority_seconds=10.0)
    policy.add(Request(1, range(3), 9, arrival=0.0))
    advance(policy)
    policy.add(Request(2, range(3), 9, arrival=15.0, priority=1))
    assert advance(policy) == [(1, 3, 1)]
    policy.add(Request(3, range(3), 1, arrival=15.0, priority=2))
    assert advance(policy) == [(3, 0, 3)]
    assert advance(policy)[0][0] == 1


def test_a_request_ends_at_its_deadline() -> None:
    policy = make_policy()
    policy.add(Request(1, range(3), 9, deadline=5.0))
    policy.add(Request(2, range(3), 9, deadline=4.0, arrival=1.0))
    assert policy.next_deadline == 4.0
    advance(policy, 3.9)
    assert [number for number, *_ in advance(policy, 4.0)] == [1]
    assert not advance(policy, 6.0)
    assert policy.drain_ended() == [RequestEnded(2, "deadline", 1), RequestEnded(1, "deadline", 2)]
    assert policy.cache.pools[0].free == 64


def test_blocks_outside_of_the_window_are_released() -> None:
    policy = make_policy(blocks=4, tokens=8, window=6)
    policy.add(Request(1, range(20), 30))
    held = []
    while (step := policy.next_step(0.0)) is not None:
        last = step.parts[0].start + step.parts[0].count - 1
        held.append([index for index, block in enumerate(step.parts[0].blocks) if block])
        first = max(step.parts[0].start - 5, 0) // SIZE
        assert set(range(first, last // SIZE + 1)) <= set(held[-1])
        policy.complete(step, [99] * len(step.sampling))
    # Five tokens before the newest and itself touch three blocks at most.
    assert held[-1] == [10, 11, 12] and max(map(len, held[4:])) == 3


def test_a_prefix_of_windowed_layers_needs_the_blocks_in_the_window_only() -> None:
    policy = BatchPolicy(BatchLimits(32, 4), CacheBlocks([CacheGroup(64), CacheGroup(64, 4)], SIZE))
    policy.add(Request(1, range(24), 1))
    finish(policy)
    policy.add(Request(2, range(24), 1))
    step = policy.next_step(0.0)
    full, windowed = step.parts[0].tables
    assert parts_of(step) == [(2, 20, 4)]
    assert 0 not in full and windowed[:4] == [0, 0, 0, 0] and 0 not in windowed[4:]


def test_draft_tokens_are_verified_and_the_next_step_begins_after_the_accepted() -> None:
    policy = make_policy()
    policy.add(Request(1, range(5), 9))
    advance(policy)
    step = policy.next_step(0.0, {1: 3})
    assert parts_of(step) == [(1, 5, 4)] and len(step.parts[0].blocks) == 3
    with pytest.raises(RuntimeError, match="draft"):
        policy.next_step(0.0)
    policy.complete_drafts(step, [[10, 11]])
    step = policy.next_step(0.0, {1: 8})
    # Of the nine new tokens, three are known: five drafts and the token after them are what is left.
    assert parts_of(step) == [(1, 7, 6)]
    policy.complete_drafts(step, [[12, 13, 14, 15, 16, 17]])
    assert policy.drain_ended() == [RequestEnded(1, "length", 9)]


def test_a_step_that_fails_ends_its_requests_only() -> None:
    policy = make_policy(tokens=8)
    policy.add(Request(1, range(8), 9))
    policy.add(Request(2, range(9), 9))
    first = policy.next_step(0.0)
    second = policy.next_step(0.0)
    assert parts_of(second) == [(1, 8, 1), (2, 0, 8)]
    policy.fail(first)
    assert policy.drain_ended() == [RequestEnded(1, "failed", 0)]
    policy.complete(second, [7])
    # The prompt of the first is not in the cache: the second has computed its own.
    assert advance(policy) == [(2, 8, 1)]


def test_an_impossible_request_is_refused() -> None:
    policy = make_policy(blocks=4)
    policy.add(Request(1, range(9), 8))
    with pytest.raises(BadInput, match="5 cache blocks; there are 4"):
        policy.add(Request(2, range(9), 9))
    with pytest.raises(BadInput, match="number"):
        policy.add(Request(1, range(9), 8))
    with pytest.raises(BadInput, match="at least one"):
        policy.add(Request(3, [], 8))
    with pytest.raises(BadInput, match="limits of a batch"):
        BatchLimits(tokens=0, sequences=5)


def test_a_repeated_step_ends_before_blocks_run_out_and_at_the_end_of_a_request() -> None:
    policy = make_policy(blocks=4, prefix_cache=False)
    policy.add(Request(1, range(3), 6))
    policy.add(Request(2, range(4), 8))
    advance(policy)
    step = policy.next_step(0.0)
    assert policy.extend(step, 100) == 4
    assert parts_of(step) == [(1, 6, 1), (2, 7, 1)]
    policy.complete(step, None)
    assert policy.drain_ended() == []
    assert advance(policy) == [(1, 7, 1)]
    assert policy.drain_ended() == [RequestEnded(1, "length", 6)]
