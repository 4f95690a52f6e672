"""Slots of all ranks together hold each sample exactly once, whole or divided."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from meshwright.data.packing import PackedWindow
from meshwright.data.slots import SampleSlot, rank_slots, slot_arrays
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.policies.sample_time import SampleTime

TIME = SampleTime(1e-9, 1e-6, 1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("longest", [1, 64, 250])
def test_slots_of_all_ranks_hold_every_sample_once(ranks: int, longest: int) -> None:
    capacity = 64
    random = np.random.default_rng(longest + 1000 * ranks)
    for _ in range(20):
        lengths = random.integers(1, min(longest, capacity * ranks) + 1, size=random.integers(1, 60))
        samples = [random.integers(1, 1000, size=length + 1) for length in lengths]
        balance = balance_samples(lengths, RankPool(ranks, capacity, TIME))
        received = [np.full((2, length), -7) for length in lengths]
        for rank in range(ranks):
            slots = rank_slots(balance, rank)
            assert len(slots) == balance.slots[rank]
            for slot in slots:
                packed = slot_arrays(slot, partial(_read, samples))
                assert all(array.shape == (capacity,) for array in (packed.tokens, packed.targets))
                _fill_in(slot, packed, received)
                padding = slice(slot.tokens, None)
                assert (packed.targets[padding] == -1).all() and not packed.tokens[padding].any()
                assert len(set(packed.documents[padding].tolist())) == capacity - slot.tokens
                assert not set(packed.documents[padding].tolist()) & set(range(len(slot.parts)))
        for sample, (tokens, targets) in zip(samples, received, strict=True):
            np.testing.assert_array_equal(tokens, sample[:-1])
            np.testing.assert_array_equal(targets, sample[1:])


def _read(samples: list[np.ndarray], sample: int, start: int, stop: int) -> np.ndarray:
    return samples[sample][start:stop]


def _fill_in(slot: SampleSlot, packed: PackedWindow, received: list[np.ndarray]) -> None:
    """Put the slot's tokens at their positions, each of which must be free."""
    for number, part in enumerate(slot.parts):
        own = np.arange(slot.cu_seqlens[number], slot.cu_seqlens[number + 1])
        assert (packed.documents[own] == number).all()
        assert (len(part.ranks) > 1) == (part is slot.divided)
        positions = packed.positions[own]
        assert (received[part.sample][0, positions] == -7).all()
        received[part.sample][:, positions] = packed.tokens[own], packed.targets[own]


def test_all_ranks_agree_on_the_ring_of_a_divided_sample() -> None:
    balance = balance_samples(np.array([250, 30, 101, 7]), RankPool(6, 64, TIME))
    rings: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank in range(6):
        for slot in rank_slots(balance, rank):
            for part in slot.parts:
                assert part.ranks[part.part] == rank
                rings.setdefault(part.sample, {})[part.part] = part.ranks
    assert {sample: len(ring) for sample, ring in rings.items()} == {0: 4, 1: 1, 2: 2, 3: 1}
    for ring in rings.values():
        assert len(set(ring.values())) == 1 and len(set(ring[0])) == len(ring)


def test_the_arrays_of_a_slot_read_only_its_own_ranges() -> None:
    balance = balance_samples(np.array([100]), RankPool(2, 64, TIME))
    asked = []

    def read(sample: int, start: int, stop: int) -> np.ndarray:
        asked.append((sample, start, stop))
        return np.arange(start, stop)

    (slot,) = rank_slots(balance, 1)
    packed = slot_arrays(slot, read)
    assert asked == [(0, 25, 51), (0, 50, 76)]
    assert packed.positions[:50].tolist() == list(range(25, 75)) and packed.targets[:50].tolist() == list(range(26, 76))


def test_an_empty_slot_has_nothing_to_train_on() -> None:
    packed = slot_arrays(SampleSlot(6), lambda *_: pytest.fail("nothing to read"))
    assert packed.targets.tolist() == [-1] * 6 and packed.documents.tolist() == list(range(6))
