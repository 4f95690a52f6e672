"""Blocks between two caches: whatever is interrupted, no reference is left, and what arrives is found."""

from __future__ import annotations

import random

import pytest

from meshwright.policies.batch_request import BatchLimits, CacheGroup, Request
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks, extend_digests, root_digest
from meshwright.policies.moving_blocks import ReservedBlocks, UnsentBlocks
from tests.slow import examples

SIZE = 4


def digests_of(tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, root_digest("=", 0), tokens, len(tokens) // SIZE, SIZE)
    return digests


def compute(cache: CacheBlocks, digests: list[bytes]) -> list[list[int]]:
    """The tables of a request whose prompt was computed."""
    tables: list[list[int]] = [[] for _ in cache.pools]
    matched = cache.matching(digests)
    cache.share(tables, digests, matched)
    cache.grow(tables, len(digests) * SIZE)
    cache.register(tables, digests, matched, len(digests))
    return tables


def assert_unused(cache: CacheBlocks) -> None:
    for pool in cache.pools:
        assert pool.free == pool.blocks and not any(pool.references)


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_interrupted_transfers_leave_nothing(windows: tuple[int | None, ...]) -> None:
    source = random.Random(3)
    sender, receiver = (CacheBlocks([CacheGroup(24, window) for window in windows], SIZE) for _ in range(2))
    for _ in range(examples(25, 2000)):
        tokens = [source.randrange(2) for _ in range(source.randrange(1, 8 * SIZE))]
        digests = digests_of(tokens)
        reserved = ReservedBlocks(receiver, digests)
        assert reserved.fit(0)
        reserved.take()
        unsent, tables, sent = UnsentBlocks(sender, digests, reserved.first), compute(sender, digests), reserved.first
        unsent.extend()
        assert len(unsent) == len(reserved) == len(digests) - reserved.first
        sender.release(tables)
        others: list[list[list[int]]] = []
        while unsent and source.random() < 0.9:  # else it is interrupted
            count = source.randrange(1, len(unsent) + 1)
            assert unsent.next == sent and len(unsent.take(count)) == count
            others.append(compute(sender, digests_of([7] * SIZE)))  # takes blocks, but none that is unsent
            for index in range(sent, sent + count):
                assert all(digests[index] in pool.block_of for pool in sender.pools)
                if source.random() < 0.95:  # else it was damaged
                    assert reserved.blocks(index) is not None
                    reserved.enter(index)
                    assert reserved.blocks(index) is None
            unsent.copied(count)
            sent += count
        unsent.release()
        reserved.release()
        for other in others:
            sender.release(other)
        assert_unused(sender)
        assert_unused(receiver)
        receiver.release(compute(receiver, digests))
        assert_unused(receiver)


def test_what_arrives_is_found_and_what_is_cached_is_not_asked_for() -> None:
    cache, digests = CacheBlocks([CacheGroup(12)], SIZE), digests_of(list(range(6 * SIZE)))
    reserved = ReservedBlocks(cache, digests)
    reserved.take()
    assert (reserved.first, len(reserved), cache.pools[0].free) == (0, 6, 5)
    for index in (0, 1, 3):
        reserved.enter(index)
    reserved.release()
    assert cache.matching(digests) == 2
    again = ReservedBlocks(cache, digests)
    assert (again.first, len(again)) == (2, 4) and again.fit(0) and not again.fit(0.6)
    again.take()
    assert cache.pools[0].free == 5
    again.release()
    assert_unused(cache)


def test_split_blocks_keep_their_references_until_they_are_released() -> None:
    sender, receiver = (CacheBlocks([CacheGroup(12), CacheGroup(12, 40)], SIZE) for _ in range(2))
    digests = digests_of(list(range(6 * SIZE)))
    reserved, unsent, tables = (
        ReservedBlocks(receiver, digests),
        UnsentBlocks(sender, digests, 1),
        compute(sender, digests),
    )
    reserved.take()
    unsent.extend()
    sender.release(tables)
    split = unsent.split(3)
    assert split.take(3) == [[table[index] for table in tables] for index in (1, 2, 3)]
    assert unsent.take(2) == [[table[index] for table in tables] for index in (4, 5)] and unsent.next == 4
    unsent.release()
    assert [pool.free for pool in sender.pools] == [pool.blocks - 3 for pool in sender.pools]
    split.release()
    assert_unused(sender)
    assert reserved.tables(1, 2) == [reserved.blocks(1), reserved.blocks(2)] and reserved.tables(5, 2) is None
    reserved.enter(0, 3)
    assert reserved.tables(2, 2) is None
    reserved.release()
    assert receiver.matching(digests) == 3
    assert_unused(receiver)


@pytest.mark.parametrize("tokens", range(6 * SIZE, 7 * SIZE))
def test_blocks_of_a_window_are_reserved_from_its_start(tokens: int) -> None:
    """Also where the last block is not full: without it the request goes on behind the full ones."""
    cache, prompt = CacheBlocks([CacheGroup(24, 2 * SIZE)], SIZE), list(range(tokens))
    full = digests_of(prompt)
    digests = full if tokens % SIZE == 0 else [*full, b"end of the prompt"]
    reserved = ReservedBlocks(cache, digests, tokens)
    reserved.take()
    for index in range(reserved.first, len(digests)):
        reserved.enter(index)
    assert reserved.first == (len(full) * SIZE - 2 * SIZE + 1) // SIZE
    assert cache.matching(full) == len(full)


@pytest.mark.parametrize("sent", [False, True])
def test_a_refused_request_is_admitted_after_the_release_of_moving_blocks(sent: bool) -> None:
    policy = BatchPolicy(BatchLimits(64, 4), CacheBlocks([CacheGroup(9)], SIZE))
    digests = digests_of(list(range(6 * SIZE)))
    moving: ReservedBlocks | UnsentBlocks = ReservedBlocks(policy.cache, digests)
    if sent:
        moving, tables = UnsentBlocks(policy.cache, digests, 0), compute(policy.cache, digests)
        moving.extend()
        policy.cache.release(tables)
    else:
        moving.take()
    policy.add(Request(0, [5] * (4 * SIZE), 2))
    assert policy.next_step(0.0) is None
    moving.release()
    assert policy.next_step(1.0) is not None
