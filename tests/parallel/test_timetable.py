"""When offloaded activations are freed on the device and copied back.

They are freed when another layer needs the memory and copied back when memory is free; the device's memory never exceeds
the memory model.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from meshwright.parallel.timetable import Timetable, Visit, build_timetable


def visits(*numbers: int) -> list[tuple[Visit, ...]]:
    return [((0, number, 0),) for number in numbers]


def of_a_pipeline(micro_batches: int, ahead: int, layers: int) -> list[tuple[Visit, ...]]:
    """1F1B on a rank with `ahead` micro-batches in flight."""
    forwards = [[((0, m, layer),) for layer in range(layers)] for m in range(micro_batches)]
    backwards = [computes[::-1] for computes in forwards]
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return [visits for computes in order + backwards[micro_batches - ahead :] for visits in computes]


ONE_RANK = visits(0, 1, 2, 3, 4, 5, 6, 7, 99, 7, 6, 5, 4, 3, 2, 1, 0)
"""Eight layers and the head, one micro-batch."""
LAYERED = [((0, m, layer),) for layer in range(4) for m in range(3)]
LAYERED += [((0, m, layer),) for layer in range(3, -1, -1) for m in range(3)]


def times(
    computes: Sequence[tuple[Visit, ...]], candidates: Collection[Visit], sizes: Mapping[Visit, float] | None = None
) -> Timetable:
    occurrences = Counter(visit for visits in computes for visit in visits)
    size = {visit: float(count > 1) for visit, count in occurrences.items()} | dict(sizes or {})
    return build_timetable(tuple(computes), tuple(size.items()), frozenset(candidates))


def layers(*numbers: int) -> set[Visit]:
    return {(0, number, 0) for number in numbers}


def numbers(visits_by_index: Mapping[int, Sequence[Visit]]) -> dict[int, list[int]]:
    return {index: [visit[1] for visit in group] for index, group in visits_by_index.items()}


def test_if_all_layers_offload_two_are_not_and_each_copy_overlaps_with_one_compute() -> None:
    table = times(ONE_RANK, layers(*range(8)))
    assert table.offloaded == layers(0, 1, 2, 3, 4, 5)
    assert numbers(table.frees) == {layer + 2: [layer] for layer in range(6)}
    assert numbers(table.fetches) == {15 - layer: [layer] for layer in range(6)}


def test_copies_of_a_few_layers_may_take_the_whole_forward_and_the_whole_backward() -> None:
    table = times(ONE_RANK, layers(0, 1, 2, 3))
    assert table.offloaded == layers(0, 1), "the account covers the layers that are not offloaded, and two more"
    # Six are on the device from the sixth forward on. The seventh needs memory, and the first backward frees some.
    assert numbers(table.frees) == {6: [0], 7: [1]} and numbers(table.fetches) == {10: [1], 11: [0]}


def test_offloaded_layers_are_freed_early_if_the_other_layers_are_small() -> None:
    small = dict.fromkeys(layers(4, 5, 6, 7), 0.25)
    table = times(ONE_RANK, layers(0, 1, 2, 3), small)
    assert numbers(table.frees) == {3: [0], 4: [1]} and numbers(table.fetches) == {13: [1], 14: [0]}
    large = dict.fromkeys(layers(4, 5, 6, 7), 4.0)
    assert sorted(numbers(times(ONE_RANK, layers(0, 1, 2, 3), large).frees)[7]) == [0, 1]


def test_layers_that_free_memory_for_no_other_layer_are_not_offloaded() -> None:
    assert times(ONE_RANK, layers(0)).offloaded == times(ONE_RANK, layers(0, 1)).offloaded == frozenset()
    assert times(visits(0, 1, 0, 1), layers(0, 1)).offloaded == frozenset()


@given(
    order=st.sampled_from([ONE_RANK, LAYERED, of_a_pipeline(6, 3, 3), of_a_pipeline(4, 4, 3), of_a_pipeline(5, 1, 4)]),
    seed=st.integers(0, 10**6),
)
def test_memory_follows_the_account_and_every_copy_has_time(order: list[tuple[Visit, ...]], seed: int) -> None:
    draw = random.Random(seed)
    repeated_visits = sorted(
        visit for visit, count in Counter(visit for visits in order for visit in visits).items() if count > 1
    )
    candidates = (
        {visit for visit in repeated_visits if visit[2] < draw.randint(0, 4)}
        if draw.random() < 0.5
        else set(draw.sample(repeated_visits, draw.randint(0, len(repeated_visits))))
    )
    sizes = {visit: draw.choice([0.5, 1.0, 2.0]) for visit in repeated_visits}
    table = times(order, candidates, sizes)
    frees = {visit: position for position, visits in table.frees.items() for visit in visits}
    fetches = {visit: position for position, visits in table.fetches.items() for visit in visits}
    assert frees.keys() == fetches.keys() == table.offloaded <= candidates
    positions = {visit: [p for p, visits in enumerate(order) if visit in visits] for visit in repeated_visits}
    for visit in table.offloaded:
        forward, backward = positions[visit]
        assert forward + 2 <= frees[visit] < fetches[visit] <= backward - 1

    def load(
        frees: Mapping[Visit, int], fetches: Mapping[Visit, int], counted_visits: Collection[Visit]
    ) -> list[float]:
        return [
            sum(
                sizes[visit]
                for visit in counted_visits
                if positions[visit][0] <= position <= positions[visit][1]
                and not frees.get(visit, position + 1) <= position < fetches.get(visit, position + 1)
            )
            for position in range(len(order))
        ]

    fewest_bytes = load(
        {visit: positions[visit][0] + 2 for visit in candidates},
        {visit: positions[visit][1] - 1 for visit in candidates},
        repeated_visits,
    )
    other_bytes = load({}, {}, set(repeated_visits) - candidates)
    largest = sorted((sizes[visit] for visit in candidates), reverse=True)
    alive = [sum(positions[visit][0] <= at <= positions[visit][1] for visit in candidates) for at in range(len(order))]
    at_once = [others + sum(largest[: min(2, count)]) for others, count in zip(other_bytes, alive, strict=True)]
    capacity = max(*at_once, *fewest_bytes)
    allocated = load(frees, fetches, repeated_visits)
    assert max(allocated) <= capacity * (1 + 1e-6)
    for position, visits in table.frees.items():
        freed = sum(sizes[visit] for visit in visits)
        assert allocated[position] + freed > capacity, "memory is freed only when it is needed"
    for position, visits in table.fetches.items():
        fetched = sum(sizes[visit] for visit in visits)
        assert allocated[position - 1] + fetched > capacity, "a copy back starts as early as memory allows"
