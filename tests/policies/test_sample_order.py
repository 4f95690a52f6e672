from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.policies.sample_order import BLOCK, InTurn, Mixture, permute, quantise, rank_samples
from meshwright.spec.errors import BadInput
from tests.slow import examples

SEEDS = st.integers(0, 2**63)


@given(st.integers(1, 3000), st.text(max_size=8))
@settings(max_examples=examples(40, 80), deadline=None)
def test_permute_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(st.integers(1, 500), SEEDS, st.integers(0, 4))
@settings(max_examples=examples(30, 60), deadline=None)
def test_each_epoch_visits_every_window_exactly_once(windows: int, seed: int, epoch: int) -> None:
    mixture = Mixture({"a": 1.0}, {"a": windows}, seed)
    visited = mixture.draws(np.arange(epoch * windows, (epoch + 1) * windows)).window
    assert sorted(visited.tolist()) == list(range(windows))


@given(SEEDS, st.lists(st.floats(0.05, 20), min_size=2, max_size=4), st.integers(0, 3))
@settings(max_examples=examples(4, 8), deadline=None)
def test_in_a_mixture_too_every_source_goes_through_its_epochs(seed: int, weights: list[float], block: int) -> None:
    names = [f"s{i}" for i in range(len(weights))]
    windows = {name: 1000 + 37 * i for i, name in enumerate(names)}
    mixture = Mixture(dict(zip(names, weights, strict=True)), windows, seed)
    draws = mixture.draws(np.arange(0, (block + 1) * BLOCK))
    for number, name in enumerate(mixture.names):
        mine = draws.window[draws.source == number]
        assert len(mine) == mixture.counts[number] * (block + 1)
        whole = len(mine) // windows[name]
        for epoch in range(min(whole, 3)):
            part = mine[epoch * windows[name] : (epoch + 1) * windows[name]]
            assert len(np.unique(part)) == windows[name]


@given(SEEDS, st.lists(st.integers(0, 5 * BLOCK), min_size=1, max_size=30))
@settings(max_examples=examples(8, 20), deadline=None)
def test_a_sample_does_not_depend_on_what_is_asked_with_it(seed: int, indices: list[int]) -> None:
    together = Mixture({"a": 2, "b": 1}, {"a": 77, "b": 1234}, seed).draws(np.array(indices))
    alone = [Mixture({"b": 1, "a": 2}, {"b": 1234, "a": 77}, seed).draws(np.array([i])) for i in indices]
    assert together.source.tolist() == [int(draws.source[0]) for draws in alone]
    assert together.window.tolist() == [int(draws.window[0]) for draws in alone]


def test_weights_hold_in_every_block_and_locally() -> None:
    mixture = Mixture({"code": 0.7, "web": 0.3}, {"code": 10**9, "web": 10**9}, seed=1)
    sources = mixture.draws(np.arange(BLOCK, 2 * BLOCK)).source
    assert Counter(sources.tolist()) == {0: 45875, 1: 19661}
    # A shuffled block: 1,000 draws of 0.3 have a standard deviation of 14.5.
    thousands = sources[: 65 * 1000].reshape(65, 1000).sum(axis=1)
    assert abs(thousands - 300).max() < 75 and thousands.std() > 5


def test_order_differs_by_seed_epoch_and_source() -> None:
    def order(seed: int, name: str, epoch: int) -> tuple[int, ...]:
        return tuple(Mixture({name: 1}, {name: 200}, seed).draws(np.arange(200) + 200 * epoch).window.tolist())

    assert len({order(s, n, e) for s in range(3) for n in ("a", "b") for e in range(3)}) == 18


def test_neighbours_are_torn_apart() -> None:
    image = permute(np.arange(10_000), 10_000, "key")
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.05
    assert np.count_nonzero(np.diff(image) == 1) < 10


def test_order_is_the_same_in_every_release() -> None:
    """These values are what earlier runs were trained with: a change of them breaks every resume."""
    mixture = Mixture({"code": 0.7, "web": 0.3}, {"code": 1000, "web": 50}, seed=42)
    draws = mixture.draws(np.array([0, 1, 2, 3, 65535, 65536, 10**9]))
    assert draws.source.tolist() == GOLDEN[0]
    assert draws.window.tolist() == GOLDEN[1]


GOLDEN: tuple[list[int], list[int]] = ([0, 0, 0, 0, 0, 1, 1], [911, 871, 551, 576, 559, 11, 33])


def test_sources_in_turn_are_read_from_first_to_last_window() -> None:
    order = InTurn({"b": 3, "a": 2})
    draws = order.draws(np.arange(5))
    assert order.names == ["a", "b"] and draws.source.tolist() == [0, 0, 1, 1, 1]
    assert draws.window.tolist() == [0, 1, 0, 1, 2] and not draws.epoch.any()
    assert [order.drawn(samples).tolist() for samples in (1, 4)] == [[1, 0], [2, 2]]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
@settings(max_examples=examples(25, 50), deadline=None)
def test_quantised_weights_fill_a_block_and_are_nearest(weights: list[float]) -> None:
    exact = np.array(weights) / sum(weights) * BLOCK
    if exact.min() < 1:
        return
    counts = quantise(weights, [str(i) for i in range(len(weights))])
    assert counts.sum() == BLOCK
    assert abs(counts - exact).max() < 1


def test_a_weight_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(BadInput, match=r"data\.mix: tiny: weight 1e-06 gives less than one sample in 65,536"):
        Mixture({"big": 1.0, "tiny": 1e-6}, {"big": 5, "tiny": 5}, seed=0)


@given(st.integers(0, 10**9), st.integers(1, 8), st.integers(1, 50))
def test_the_ranks_of_a_step_share_its_batch_in_their_order(first: int, ranks: int, each: int) -> None:
    shares = [rank_samples(first, ranks * each, rank, ranks) for rank in range(ranks)]
    assert [sample for share in shares for sample in share] == list(range(first, first + ranks * each))
    assert {len(share) for share in shares} == {each}
