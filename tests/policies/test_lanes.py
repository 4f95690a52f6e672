"""The order of documents in lanes: every part once in each epoch, and as good as a shuffle."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from meshwright.policies.lanes import WINDOW_PARTS, LaneOrder, LanePart, parts_of


def drawn_parts(order: LaneOrder, count: int) -> list[tuple[int, int]]:
    """The first `count` parts of the endless sequence, from the windows of all lanes."""
    rounds = -(-count // order.lanes)
    by_lane = []
    for lane in range(order.lanes):
        parts: list[LanePart] = []
        window = 0
        while len(parts) < rounds:
            parts += order.window(lane, window)
            window += 1
        by_lane.append(parts)
    return [(part.group, part.part) for at in range(rounds) for part in (lane[at] for lane in by_lane)][:count]


def test_each_epoch_has_every_part_once() -> None:
    parts = np.array([1, 3, 2, 5, 1], dtype=np.int32)
    drawn = drawn_parts(LaneOrder(parts, 4, 7, "source"), 3 * 12)
    every = Counter((group, part) for group, count in enumerate(parts) for part in range(count))
    epochs = [drawn[first : first + 12] for first in (0, 12, 24)]
    assert all(Counter(epoch) == every for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_order_follows_from_seed_and_source_alone() -> None:
    parts = np.ones(40, dtype=np.int32)
    first, again = (drawn_parts(LaneOrder(parts, 8, 7, "source"), 40) for _ in range(2))
    assert first == again
    assert first != drawn_parts(LaneOrder(parts, 8, 8, "source"), 40)
    assert first != drawn_parts(LaneOrder(parts, 8, 7, "other"), 40)


def test_parts_divide_the_documents_of_their_group() -> None:
    for count in (0, 1, 5, 100):
        ranges = [LanePart(0, number, 7).documents(count) for number in range(7)]
        assert [document for each in ranges for document in each] == list(range(count))


def test_small_sources_have_a_part_for_each_place_of_all_windows() -> None:
    sizes = np.array([1000, 3000], dtype=np.int64)
    assert parts_of(sizes, 64, 1 << 22).sum() >= 64 * WINDOW_PARTS
    assert parts_of(np.full(5000, 1 << 20), 64, 1 << 22).tolist() == [1] * 5000
    assert parts_of(np.array([0, 10 << 20]), 1, 1 << 20).tolist() == [1, 10]


@pytest.mark.parametrize("lanes", [64, 256])
def test_batches_of_a_sorted_corpus_are_as_equal_as_those_of_a_shuffle(lanes: int) -> None:
    """Variance of the mean of a batch over that of a full permutation: at most 1.2.

    A file has an effect of deviation 1, a row group of its 40 one of 0.5, a document one of 1, as in research on buffers of documents.
    """
    groups, rows, batch, batches = 1000, 200, 64, 1000
    generator = np.random.Generator(np.random.PCG64(5))
    of_group = np.repeat(np.sort(generator.normal(size=groups // 40)), 40) + 0.5 * generator.normal(size=groups)
    values = of_group[:, None] + generator.normal(size=(groups, rows))
    order = LaneOrder(np.ones(groups, dtype=np.int32), lanes, 1, "sorted")

    def lane_values(lane: int, count: int) -> np.ndarray:
        found, window = [], 0
        while sum(map(len, found)) < count:
            documents = np.concatenate([values[part.group] for part in order.window(lane, window)])
            found.append(documents[order.shuffled(lane, window, len(documents))])
            window += 1
        return np.concatenate(found)[:count]

    rounds = batch * batches // lanes
    drawn = np.stack([lane_values(lane, rounds) for lane in range(lanes)], axis=1).reshape(-1, batch)
    shuffled = generator.permutation(values.ravel())[: batch * batches].reshape(-1, batch)
    assert drawn.mean(axis=1).var() <= 1.2 * shuffled.mean(axis=1).var()
