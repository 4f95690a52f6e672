"""Compute orders against orders written by hand and against torch's generators, an independent implementation."""

import pytest

from meshwright.schedules.activation_residency import peak_in_flight
from meshwright.schedules.looping import breadth_first, groups_of, interleaved
from meshwright.schedules.one_stage import gpipe, one_f_one_b, zb_h1
from meshwright.schedules.registry import build
from meshwright.schedules.schedule import looped, vee
from meshwright.schedules.vee import zbv


def printed_orders(order):
    return [" ".join(map(str, rank_actions)) for rank_actions in order[1]]


def test_gpipe():
    assert printed_orders(gpipe(2, 2)) == ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]


def test_one_f_one_b():
    assert printed_orders(one_f_one_b(2, 3)) == ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]


def test_zb_h1_defers_weight_halves_on_later_ranks():
    assert printed_orders(zb_h1(2, 3)) == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]


def test_breadth_first():
    assert printed_orders(breadth_first(1, 2, 2)) == ["F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"]


def test_placements():
    assert looped(2, 3) == ((0, 2, 4), (1, 3, 5))
    assert vee(3) == ((0, 5), (1, 4), (2, 3))


def test_groups_are_even_and_no_smaller_than_the_pipeline():
    assert [len(group) for group in groups_of(4, 11)] == [6, 5]
    assert [len(group) for group in groups_of(4, 3)] == [3]
    assert [micro_batch for group in groups_of(3, 10) for micro_batch in group] == list(range(10))


def test_memory_counts_halves_of_a_backward():
    schedule = build("zb_h1", 2, 3)
    assert peak_in_flight(schedule) == (2, 2)
    assert peak_in_flight(schedule, [1, 1], [0, 0]) == (2, 1)
    assert peak_in_flight(schedule, [10, 1], [5, 0.5]) == (20, 1.5)


@pytest.mark.parametrize(
    ("torch_class", "build_order", "stages"),
    [
        ("ScheduleInterleaved1F1B", interleaved, 2),
        ("ScheduleInterleaved1F1B", interleaved, 3),
        ("ScheduleZBVZeroBubble", lambda ranks, batches, _: zbv(ranks, batches), 2),
    ],
)
def test_compute_orders_equal_those_of_torch(torch_class, build_order, stages):
    from torch.distributed.pipelining import schedules

    for ranks in range(1, 6):
        for batches in (2 * ranks, 3 * ranks, 4 * ranks):
            for rank, rank_actions in enumerate(build_order(ranks, batches, stages)[1]):
                expected = _torch_order(getattr(schedules, torch_class), rank, ranks, batches, stages)
                assert [_as_torch(action) for action in rank_actions] == expected


def _torch_order(schedule_class, rank, ranks, batches, stages):
    """Order from the private generator of a torch schedule, without the modules that its constructor requires."""
    generator = schedule_class.__new__(schedule_class)
    generator.rank, generator.pp_group_size, generator._n_microbatches = rank, ranks, batches
    generator.num_stages = generator._num_stages = ranks * stages
    generator.n_local_stages, generator._stages = stages, [None] * stages
    generator.number_of_rounds = batches // ranks
    generator.microbatches_per_round = ranks
    return [str(action) for action in generator._calculate_single_rank_operations(rank) if action is not None]


def _as_torch(action):
    return f"{action.stage}{str(action)[0]}{action.micro_batch}"
