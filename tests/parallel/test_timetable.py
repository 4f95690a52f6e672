"""When offloaded activations leave and return.

They leave when their memory is needed and return when there is free memory; the device never holds more than the account
says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from meshwright.parallel.timetable import Timetable, Visit, timetable


def visits(*numbers: int) -> list[tuple[Visit, ...]]:
    return [((0, number, 0),) for number in numbers]


def of_a_pipeline(micro_batches: int, ahead: int, layers: int) -> list[tuple[Visit, ...]]:
    """1F1B on a rank with `ahead` micro-batches under way."""
    forwards = [[((0, m, layer),) for layer in range(layers)] for m in range(micro_batches)]
    backwards = [row[::-1] for row in forwards]
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return [visits for row in order + backwards[micro_batches - ahead :] for visits in row]


ONE_RANK = visits(0, 1, 2, 3, 4, 5, 6, 7, 99, 7, 6, 5, 4, 3, 2, 1, 0)
"""Eight layers and the head, one micro-batch."""
LAYERED = [((0, m, layer),) for layer in range(4) for m in range(3)]
LAYERED += [((0, m, layer),) for layer in range(3, -1, -1) for m in range(3)]


def times(
    computes: Sequence[tuple[Visit, ...]], moved: Collection[Visit], keeps: Mapping[Visit, float] | None = None
) -> Timetable:
    twice = Counter(visit for row in computes for visit in row)
    known = {visit: float(count > 1) for visit, count in twice.items()} | dict(keeps or {})
    return timetable(tuple(computes), tuple(known.items()), frozenset(moved))


def layers(*numbers: int) -> set[Visit]:
    return {(0, number, 0) for number in numbers}


def numbers(visits_by_index: Mapping[int, Sequence[Visit]]) -> dict[int, list[int]]:
    return {index: [visit[1] for visit in group] for index, group in visits_by_index.items()}


def test_of_layers_that_all_leave_two_stay_and_each_has_one_compute_to_hide_behind() -> None:
    table = times(ONE_RANK, layers(*range(8)))
    assert table.moved == layers(0, 1, 2, 3, 4, 5)
    assert numbers(table.left) == {layer + 2: [layer] for layer in range(6)}
    assert numbers(table.back) == {15 - layer: [layer] for layer in range(6)}


def test_copies_of_a_few_layers_have_all_of_the_forward_and_of_the_backward() -> None:
    table = times(ONE_RANK, layers(0, 1, 2, 3))
    assert table.moved == layers(0, 1), "room is for what is kept, and for two"
    # Six are there from the sixth forward on; memory is wanted with the seventh, and there is some when the first backward has ended.
    assert numbers(table.left) == {6: [0], 7: [1]} and numbers(table.back) == {10: [1], 11: [0]}


def test_layers_that_keep_little_make_little_room() -> None:
    small = dict.fromkeys(layers(4, 5, 6, 7), 0.25)
    table = times(ONE_RANK, layers(0, 1, 2, 3), small)
    assert numbers(table.left) == {3: [0], 4: [1]} and numbers(table.back) == {13: [1], 14: [0]}
    large = dict.fromkeys(layers(4, 5, 6, 7), 4.0)
    assert sorted(numbers(times(ONE_RANK, layers(0, 1, 2, 3), large).left)[7]) == [0, 1]


def test_what_makes_room_for_nothing_stays() -> None:
    assert times(ONE_RANK, layers(0)).moved == times(ONE_RANK, layers(0, 1)).moved == frozenset()
    assert times(visits(0, 1, 0, 1), layers(0, 1)).moved == frozenset()


@given(
    order=st.sampled_from([ONE_RANK, LAYERED, of_a_pipeline(6, 3, 3), of_a_pipeline(4, 4, 3), of_a_pipeline(5, 1, 4)]),
    seed=st.integers(0, 10**6),
)
def test_memory_is_the_accounts_and_every_copy_has_its_time(order: list[tuple[Visit, ...]], seed: int) -> None:
    draw = random.Random(seed)
    twice = sorted(visit for visit, count in Counter(v for row in order for v in row).items() if count > 1)
    moved = (
        {visit for visit in twice if visit[2] < draw.randint(0, 4)}
        if draw.random() < 0.5
        else set(draw.sample(twice, draw.randint(0, len(twice))))
    )
    keeps = {visit: draw.choice([0.5, 1.0, 2.0]) for visit in twice}
    table = times(order, moved, keeps)
    left = {visit: place for place, found in table.left.items() for visit in found}
    back = {visit: place for place, found in table.back.items() for visit in found}
    assert left.keys() == back.keys() == table.moved <= moved
    places = {visit: [p for p, row in enumerate(order) if visit in row] for visit in twice}
    for visit in table.moved:
        forward, backward = places[visit]
        assert forward + 2 <= left[visit] < back[visit] <= backward - 1

    def load(leaves: Mapping[Visit, int], returns: Mapping[Visit, int], counted: Collection[Visit]) -> list[float]:
        return [
            sum(
                keeps[visit]
                for visit in counted
                if places[visit][0] <= place <= places[visit][1]
                and not leaves.get(visit, place + 1) <= place < returns.get(visit, place + 1)
            )
            for place in range(len(order))
        ]

    least = load(
        {visit: places[visit][0] + 2 for visit in moved}, {visit: places[visit][1] - 1 for visit in moved}, twice
    )
    kept = max(load({}, {}, set(twice) - moved))
    room = max(kept + sum(sorted(keeps[visit] for visit in moved)[-2:]), *least)
    there = load(left, back, twice)
    assert max(there) <= room * (1 + 1e-6)
    for place, found in table.left.items():
        assert there[place] + sum(keeps[visit] for visit in found) > room, "nothing leaves without need"
    for place, found in table.back.items():
        assert there[place - 1] + sum(keeps[visit] for visit in found) > room, "nor comes back later than it could"
