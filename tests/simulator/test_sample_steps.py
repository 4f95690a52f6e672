"""Steps of unequal samples: closed forms of each layout, and the balancer's result played again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.policies.sample_time import SampleTime
from meshwright.simulator.sample_steps import (
    RingTime,
    SampleParts,
    arrival_parts,
    longest_first_parts,
    pack_sequences,
    play_parts,
    static_seconds,
)

TIME = SampleTime(0.01, 1.0, 2.0)
FREE = RingTime(0.0, 1.0, 1.0, 8, 0.0)


def test_static_groups_wait_for_the_ring_of_every_token() -> None:
    """Two groups of four ranks with 10 tokens each: one sequence of a sample of 40 tokens, one of eight samples of 5."""
    lengths = np.array([40] + [5] * 8)
    long_sample = 0.01 * 40**2 / 4 + 40 / 4 + 2
    assert static_seconds(lengths, 2, 4, 10, TIME, FREE) == (pytest.approx(long_sample), 80)
    ring = RingTime(bytes_per_token=1.0, link=0.5, port=0.1, ranks_per_node=8, tax=0.0)
    messages = 3 * 40 * 3 / 4 / 0.5
    assert static_seconds(lengths, 2, 4, 10, TIME, ring)[0] == pytest.approx(messages + 10 + 2)
    across = RingTime(bytes_per_token=1.0, link=0.5, port=0.1, ranks_per_node=2, tax=0.0)
    assert static_seconds(lengths, 2, 4, 10, TIME, across)[0] == pytest.approx(3 * 40 * 3 / 4 / 0.1 + 10 + 2)


def test_static_ranks_pack_samples_whole() -> None:
    """Two sequences of 40 for 80 tokens: a sample of 10 finds no room beside two of 25 and waits for a later step."""
    lengths = np.array([10, 25, 10, 25, 10])
    assert pack_sequences(lengths, 2, 40).tolist() == [0, 0, 1, 1, -1]
    seconds, packed = static_seconds(lengths, 1, 4, 10, TIME, FREE)
    assert packed == 70 and seconds == pytest.approx(0.01 * (2 * 25**2 + 2 * 10**2) / 4 + 70 / 4 + 2 * 2)


def test_forward_and_backward_hide_their_own_messages() -> None:
    """7 s of attention are 2 s forward and 5 s backward, 6 s of messages 2 s and 4 s: half of each is lost to the tax."""
    ring = RingTime(bytes_per_token=1.0, link=1.0, port=1.0, ranks_per_node=8, tax=0.5)
    seconds = ring.attention_seconds(np.array([7.0]), np.array([4.0]), 2)
    assert seconds.tolist() == [pytest.approx(2 + 5 + 0.5 * (2 + 4))]
    assert ring.attention_seconds(np.array([7.0]), np.array([4.0]), 1).tolist() == [pytest.approx(7)]


def test_ranks_of_a_divided_sample_wait_for_each_other() -> None:
    """Rank 0 has 10 tokens before the sample of 20 on two ranks, and rank 1 has 5 after it."""
    lengths, linear = np.array([10, 20, 5]), SampleTime(0.0, 1.0)
    parts = SampleParts(np.array([0, 1, 1, 2]), np.array([1, 2, 2, 1]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]))
    assert play_parts(parts, lengths, 3, linear, FREE).tolist() == [20, 25, 0]


def test_samples_in_the_order_of_arrival_have_equal_tokens_not_equal_work() -> None:
    lengths = np.array([16, 8, 8, 2, 2, 2, 2])
    parts = arrival_parts(lengths, np.array([2, 1, 1, 1, 1, 1, 1]), 4, 8)
    order = np.argsort(parts.sample, kind="stable")
    assert parts.rank[order][:4].tolist() == [0, 1, 2, 3], "the ranks with the fewest slots"
    assert len(set(zip(parts.rank[order][4:].tolist(), parts.slot[order][4:].tolist(), strict=True))) == 1, "best-fit"


def test_the_longest_samples_come_first_on_the_ranks_that_are_free_first() -> None:
    """18 s on ranks 0 and 1, then 14 s on rank 2 and on rank 0, which is free at 18 s; then slots of 18, 12 and 8 s."""
    lengths, needed, time = np.array([5, 14, 6, 18, 4, 4]), np.array([1, 2, 1, 2, 1, 1]), SampleTime(0.0, 2.0)
    parts = longest_first_parts(lengths, needed, 3, 9, np.where(needed > 1, lengths, 2.0 * lengths))
    assert len(parts.sample) == 8 and sorted(parts.rank[parts.sample == 1].tolist()) == [0, 2]
    assert play_parts(parts, lengths, 3, time, FREE).tolist() == [32 + 12, 18 + 18, 32 + 8]


@pytest.mark.parametrize(("ring", "exchange"), [(0.0, math.inf), (0.5, math.inf), (0.5, 0.0), (1e6, 0.7)])
def test_the_simulator_plays_a_balance_in_the_time_that_the_balancer_says(ring: float, exchange: float) -> None:
    """Without attention and with rings that take no time in the simulator: there, a part takes no longer."""
    lengths = np.random.default_rng(0).integers(1, 400, 200)
    time = SampleTime(0.0, 1.0, 3.0, exchange=exchange)
    balance = balance_samples(lengths, RankPool(8, 100, SampleTime(0.0, 1.0, 3.0, ring, exchange), heads=8 * 7 * 3 * 5))
    parts = SampleParts(balance.sample, balance.parts, balance.rank, balance.slot, balance.by_heads)
    played = play_parts(parts, lengths, 8, time, FREE)
    if ring == 0 or exchange < math.inf:
        assert balance.by_heads.any() == (exchange < math.inf)
        assert played == pytest.approx(balance.end_seconds)
    else:
        assert (balance.end_seconds >= played - 1e-9).all()
