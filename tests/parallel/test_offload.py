"""What a visit keeps goes to the host and comes back, bit for bit and no more than is its own."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.parallel.offload import (
    HostMemory,
    Moves,
    Parked,
    Timetable,
    Visit,
    addresses,
    handed_in,
    timetable,
)

CPU = torch.device("cpu")


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


ONE = visits(0, 1, 2, 3, 4, 5, 6, 7, 99, 7, 6, 5, 4, 3, 2, 1, 0)
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


def numbers(places: Mapping[int, Sequence[Visit]]) -> dict[int, list[int]]:
    return {place: [visit[1] for visit in found] for place, found in places.items()}


def test_of_layers_that_all_leave_two_stay_and_each_has_one_compute_to_hide_behind() -> None:
    table = times(ONE, layers(*range(8)))
    assert table.moved == layers(0, 1, 2, 3, 4, 5)
    assert numbers(table.left) == {layer + 2: [layer] for layer in range(6)}
    assert numbers(table.back) == {15 - layer: [layer] for layer in range(6)}


def test_copies_of_a_few_layers_have_all_of_the_forward_and_of_the_backward() -> None:
    table = times(ONE, layers(0, 1, 2, 3))
    assert table.moved == layers(0, 1), "room is for what is kept, and for two"
    # Six are there from the sixth forward on; memory is wanted with the seventh, and there is some when the first backward has ended.
    assert numbers(table.left) == {6: [0], 7: [1]} and numbers(table.back) == {10: [1], 11: [0]}


def test_layers_that_keep_little_make_little_room() -> None:
    small = dict.fromkeys(layers(4, 5, 6, 7), 0.25)
    table = times(ONE, layers(0, 1, 2, 3), small)
    assert numbers(table.left) == {3: [0], 4: [1]} and numbers(table.back) == {13: [1], 14: [0]}
    large = dict.fromkeys(layers(4, 5, 6, 7), 4.0)
    assert sorted(numbers(times(ONE, layers(0, 1, 2, 3), large).left)[7]) == [0, 1]


def test_what_makes_room_for_nothing_stays() -> None:
    assert times(ONE, layers(0)).moved == times(ONE, layers(0, 1)).moved == frozenset()
    assert times(visits(0, 1, 0, 1), layers(0, 1)).moved == frozenset()


@given(
    order=st.sampled_from([ONE, LAYERED, of_a_pipeline(6, 3, 3), of_a_pipeline(4, 4, 3), of_a_pipeline(5, 1, 4)]),
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


def parked_of(*tensors: torch.Tensor, others: frozenset[int] = frozenset(), least: int = 1) -> tuple[Parked, list[Any]]:
    parked = Parked(HostMemory(CPU, least), others)
    return parked, [parked._pack(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_views_of_one_storage_come_back_as_views_of_one(dtype: torch.dtype) -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 6).to(dtype)
    turned, part = whole.t(), whole[1:3, 2:]
    before = [tensor.clone() for tensor in (turned, part)]
    parked, saved = parked_of(turned, part)
    assert parked.device_bytes == whole.untyped_storage().nbytes(), "one copy of one storage"
    parked.send()
    whole.zero_()  # the device's memory is somebody else's from here on
    parked.settle()
    assert parked.device_bytes == 0
    parked.fetch()
    back = [parked._unpack(one) for one in saved]
    assert all(torch.equal(found.float(), truth.float()) for found, truth in zip(back, before, strict=True))
    assert [found.stride() for found in back] == [turned.stride(), part.stride()]
    assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()
    assert parked.device_bytes == 0, "what a backward has asked for is its own"


def test_a_node_may_ask_twice() -> None:
    x = torch.randn(5)
    parked, (saved,) = parked_of(x)
    parked.send()
    parked.settle()
    parked.fetch()
    assert all(torch.equal(parked._unpack(saved), x) for _ in range(2))


def test_weights_small_things_and_numbers_stay() -> None:
    weight, small, numbers, own = torch.randn(64), torch.randn(2), torch.arange(64), torch.randn(64)
    parked, saved = parked_of(weight.view(8, 8), small, numbers, own, others=addresses([weight]), least=64)
    assert [one is tensor for one, tensor in zip(saved[1:3], (small, numbers), strict=True)] == [True, True]
    assert isinstance(saved[0], torch.Tensor) and not isinstance(saved[3], torch.Tensor)
    assert parked.device_bytes == own.untyped_storage().nbytes()


def test_an_input_is_not_held_by_the_graph_it_is_handed_to() -> None:
    memory = np.ones((3, 4), np.float32)
    alive = weakref.ref(memory)
    leaf, inside = handed_in(torch.from_numpy(memory))
    y = inside * 2
    del memory, inside
    assert alive() is None
    y.backward(torch.ones(3, 4))
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.full((3, 4), 2.0))
    assert leaf.untyped_storage().nbytes() == 4


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).tanh().exp()


def gradients(steps: int, memory: HostMemory | None) -> list[torch.Tensor]:
    """Of four blocks run forward and back in turn, their visits moved by hand."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 6, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(4)]
    order = visits(0, 1, 2, 3, 3, 2, 1, 0)
    for step in range(steps):
        keeps = {visit: 1.0 for row in order for visit in row}
        moves = Moves(memory, order, keeps, keeps if memory else (), lambda name, lane: None)
        x, kept = torch.full((5, 6), 0.1 * (step + 1), dtype=torch.float64), []
        for number, weight in enumerate(weights):
            moves.begin()
            visit = (0, number, 0)
            leaf, x = handed_in(x)
            parked = moves.park(visit, addresses([weight]))
            if parked is None:
                y = block(x, weight)
            else:
                with parked.catching():
                    y = block(x, weight)
            kept.append((visit, leaf, torch.autograd.graph.get_gradient_edge(y)))
            moves.forward_ended(visit)
            x = y.detach()
        gradient = torch.ones_like(x)
        for visit, leaf, edge in reversed(kept):
            moves.begin()
            with moves.backward(visit):
                torch.autograd.backward(edge, gradient)
            assert leaf.grad is not None
            gradient = leaf.grad
    return [weight.grad for weight in weights if weight.grad is not None]


def test_gradients_are_the_same_bit_for_bit_and_buffers_are_used_again() -> None:
    memory = HostMemory(CPU)
    once = gradients(1, memory), memory.host_bytes
    assert once[1] > 0
    again = gradients(3, memory)
    assert memory.host_bytes == once[1], "later steps need no more"
    for found, truth in zip((*once[0], *again), (*gradients(1, None), *gradients(3, None)), strict=True):
        assert torch.equal(found, truth)
