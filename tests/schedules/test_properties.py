"""Properties of every schedule in the registry, over all small sizes."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules.action import COMPUTE, Action
from meshwright.schedules.activation_residency import peak_in_flight
from meshwright.schedules.expand import expand
from meshwright.schedules.looping import forward_only
from meshwright.schedules.registry import SCHEDULES, build, refusal
from meshwright.schedules.schedule import Schedule
from meshwright.schedules.validity import check
from tests.schedules.sizes import PIPELINES, sizes

SENDS_AHEAD = {
    "interleaved": lambda ranks, batches: 2,
    "zbv": lambda ranks, batches: 1,
    "breadth_first": lambda ranks, batches: max(0, batches - ranks),
}
"""Unmatched sends that a channel must buffer; other schedules run if each send waits for its receive."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_runs_one_forward_and_one_backward_per_micro_batch(name):
    for ranks, batches, stages in sizes(name):
        schedule = build(name, ranks, batches, stages)
        forwards, inputs, weights = Counter(), Counter(), Counter()
        for part in (part for rank_actions in schedule.actions for action in rank_actions for part in action.parts):
            stage_and_batch = part.stage, part.micro_batch
            forwards[stage_and_batch] += part.op == "forward"
            inputs[stage_and_batch] += part.op in ("backward", "backward_input")
            weights[stage_and_batch] += part.op in ("backward", "backward_weight")
        all_pairs = {(stage, batch) for stage in range(ranks * stages) for batch in range(batches)}
        for counted in (forwards, inputs, weights):
            assert {stage_and_batch for stage_and_batch, times in counted.items() if times == 1} == all_pairs, (
                ranks,
                batches,
                stages,
            )
            assert max(counted.values()) == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_deadlock_and_a_sound_order(name):
    for ranks, batches, stages in sizes(name):
        schedule = build(name, ranks, batches, stages)
        check(schedule, SENDS_AHEAD.get(name, lambda ranks, batches: 0)(ranks, batches))


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_ends_of_a_channel_issue_the_same_messages_in_the_same_order(name):
    for ranks, batches, stages in sizes(name, range(1, 6), range(1, 11)):
        schedule = build(name, ranks, batches, stages)
        sent, received = defaultdict(list), defaultdict(list)
        for rank, rank_actions in enumerate(schedule.actions):
            for action in rank_actions:
                peer_rank = schedule.rank_of[action.peer] if action.peer >= 0 else rank
                if action.op == "send":
                    sent[rank, peer_rank].append((action.stage, action.peer, action.micro_batch))
                elif action.op == "recv":
                    received[peer_rank, rank].append((action.peer, action.stage, action.micro_batch))
        assert sent == received
        assert schedule.channels == tuple(sorted(sent))
        assert all(source != target for source, target in sent)


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_turns_runs_even_if_compute_waits_for_all_earlier_messages(name):
    """Compute can wait for pending messages on a device, because loading a kernel may synchronise it (docs/log.md)."""
    for ranks, batches, stages in sizes(name, range(1, 5), range(1, 7)):
        schedule = build(name, ranks, batches, stages)
        validation = forward_only(schedule.placement, batches)
        for order in (schedule, expand(schedule, 3), expand(schedule, 2, order="layered"), validation):
            check(order.in_turns(), sends_ahead=0)
            assert runs_though_compute_waits(order.in_turns()), (ranks, batches, stages)
            for rank in range(ranks):
                assert order.in_turns().compute(rank) == order.compute(rank)


def test_receives_posted_ahead_deadlock_if_compute_waits_for_messages():
    assert not runs_though_compute_waits(build("1f1b", 2, 2, 1))


def runs_though_compute_waits(schedule: Schedule) -> bool:
    """Whether all ranks finish if compute waits until both ends of all earlier messages of its rank were issued."""
    sent, received = Counter(), Counter()
    next_index, unmatched = [0] * schedule.ranks, [set() for _ in range(schedule.ranks)]

    def issue(rank: int, action: Action) -> bool:
        if action.op in COMPUTE:
            return all(min(sent[pair], received[pair]) >= number for pair, number in unmatched[rank])
        if action.op in ("send", "recv"):
            peer_rank, issued = schedule.rank_of[action.peer], sent if action.op == "send" else received
            pair = (rank, peer_rank) if action.op == "send" else (peer_rank, rank)
            issued[pair] += 1
            unmatched[rank].add((pair, issued[pair]))
        return True

    progressed = True
    while progressed:
        progressed = False
        for rank, rank_actions in enumerate(schedule.actions):
            while next_index[rank] < len(rank_actions) and issue(rank, rank_actions[next_index[rank]]):
                next_index[rank] += 1
                progressed = True
    return next_index == [len(rank_actions) for rank_actions in schedule.actions]


@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_stays_within_the_published_bound(name):
    for ranks, batches, stages in sizes(name):
        peaks = peak_in_flight(build(name, ranks, batches, stages))
        bounds = [SCHEDULES[name].in_flight(ranks, rank, batches, stages) for rank in range(ranks)]
        assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True)), (ranks, batches, stages)
        if batches >= 2 * ranks:
            assert max(peaks) == max(bounds), "a schedule reaches the bound"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_optimizer_runs_once_and_last(name):
    for ranks, batches, stages in sizes(name, range(1, 5), range(1, 9)):
        for rank_actions in build(name, ranks, batches, stages).actions:
            ops = [action.op for action in rank_actions]
            assert ops.count("norm_barrier") == ops.count("optim") == 1
            assert ops[-2:] == ["norm_barrier", "optim"]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_receive_is_posted_before_the_compute_ahead_of_its_consumer(name):
    for ranks, batches, stages in sizes(name, range(2, 5), range(4, 9)):
        for rank_actions in build(name, ranks, batches, stages).actions:
            running, arrived_late = None, []
            for action in rank_actions:
                if action.op == "recv":
                    arrived_late.append((action.stage, action.micro_batch))
                elif action.op in COMPUTE:
                    needed = {(p.stage, p.micro_batch) for p in action.parts}
                    assert running is None or not needed & set(arrived_late)
                    running, arrived_late = action, []


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=8, deadline=None)
@given(ranks=st.integers(1, 24), batches=st.integers(1, 80), stages=st.integers(1, 5))
def test_large_sizes_are_valid_and_within_bounds(name, ranks, batches, stages):
    if refusal(name, ranks, batches, stages) is None:
        schedule = build(name, ranks, batches, stages)
        check(schedule)
        bounds = [SCHEDULES[name].in_flight(ranks, rank, batches, stages) for rank in range(ranks)]
        assert all(map(float.__le__, peak_in_flight(schedule), map(float, bounds)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pass_without_backward_runs_on_every_placement(name):
    for ranks, batches, stages in sizes(name, range(1, 6), range(1, 11)):
        placement = build(name, ranks, batches, stages).placement
        schedule = forward_only(placement, batches)
        check(schedule, max(0, batches))
        assert not schedule.trains
        assert peak_in_flight(schedule) == (0,) * ranks
