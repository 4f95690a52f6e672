"""The simulator against durations worked out by hand, and against a slow reference that iterates all constraints."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules.action import COMPUTE
from meshwright.schedules.expand import expand
from meshwright.schedules.looping import forward_only
from meshwright.schedules.registry import SCHEDULES, build, refusal
from meshwright.schedules.schedule import Schedule, looped
from meshwright.simulator.durations import end_with_slowdown
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timing import Link, Timing, uniform_timing
from meshwright.spec.errors import BadInput
from tests.schedules.sizes import PIPELINES
from tests.schedules.test_validity import GOOD, schedule_of


def spans_of(timeline, op, rank=0):
    return [(start, end) for r, _, a, start, end in timeline.records if a.op == op and r == rank]


def test_a_message_takes_latency_plus_bytes_over_bandwidth_and_is_exposed_without_compute():
    timing = replace(uniform_timing(2, backward_weight=0), boundary_bytes=[6.0], link=Link(0.5, 4.0))
    timeline = simulate(build("gpipe", 2, 1), timing)
    assert spans_of(timeline, "forward", 1) == [(3.0, 4.0)]
    assert timeline.step_seconds == 1 + 2 + 1 + 1 + 2 + 1
    assert [exposed["pipeline"] for exposed in timeline.exposed_seconds] == [2.0, 2.0]
    assert timeline.bubble == pytest.approx(1 - 2 / 8)


def test_a_link_may_differ_by_pair_and_direction():
    timing = replace(uniform_timing(2, backward_weight=0), boundary_bytes=[1.0], links={(1, 0): Link(3.0)})
    timeline = simulate(build("gpipe", 2, 1), timing)
    assert [exposed["pipeline"] for exposed in timeline.exposed_seconds] == [3.0, 0.0]


def test_messages_of_one_channel_follow_one_another():
    timing = replace(uniform_timing(2, backward_weight=0), boundary_bytes=[4.0], link=Link(0.0, 1.0))
    timeline = simulate(build("gpipe", 2, 3), timing)
    assert spans_of(timeline, "send") == [(1, 5), (5, 9), (9, 13)]
    assert spans_of(timeline, "forward", 1) == [(5, 6), (9, 10), (13, 14)]


def test_gathers_run_one_unit_ahead_and_excess_time_is_exposed():
    """Units of 1 s forward and 2 s backward, gathered in 1.5 s."""
    schedule = expand(build("gpipe", 1, 1), 3, gather="stretch", reduce="never")
    timing = Timing(forward=[[1.0] * 3], backward_input=[[1.0] * 3], backward_weight=[[1.0] * 3], unshard=[[1.5] * 3])
    timeline = simulate(schedule, timing)
    # The first two are issued together, each later one when the previous unit starts; the last unit stays gathered.
    assert spans_of(timeline, "unshard") == [(0, 1.5), (1.5, 3.0), (3.0, 4.5), (4.5, 6.0), (7.5, 9.0)]
    assert spans_of(timeline, "forward") == [(1.5, 2.5), (3.0, 4.0), (4.5, 5.5)]
    assert spans_of(timeline, "backward") == [(5.5, 7.5), (7.5, 9.5), (9.5, 11.5)]
    assert timeline.exposed == {"pipeline": 0.0, "shard": pytest.approx(1.5 + 0.5 + 0.5), "replicate": 0.0}


def test_layered_order_hides_gathers_under_all_micro_batches():
    timing = Timing(forward=[[1.0] * 3], backward_input=[[1.0] * 3], backward_weight=[[1.0] * 3], unshard=[[3.0] * 3])
    layered = simulate(expand(build("breadth_first", 1, 4), 3, order="layered", reduce="never"), timing)
    depth_first = simulate(expand(build("1f1b", 1, 4), 3, reduce="never"), timing)
    assert layered.exposed["shard"] == 3.0, "only the first gather"
    assert depth_first.exposed["shard"] > 3 * layered.exposed["shard"]


def test_reductions_hide_under_later_backwards_and_the_last_is_exposed_by_axis():
    schedule = expand(build("gpipe", 1, 1), 2, gather="never")
    unit_seconds = [[1.0, 1.0]]
    timing = Timing(
        forward=unit_seconds,
        backward_input=unit_seconds,
        backward_weight=unit_seconds,
        reduce=[[0.75, 0.75]],
        replicate=[[0.5, 0.5]],
        norm_seconds=0.125,
        optim_seconds=[0.25],
    )
    timeline = simulate(schedule, timing)
    assert timeline.exposed == {"pipeline": 0.0, "shard": 0.75, "replicate": 0.5}
    assert timeline.step_seconds == 2 + 4 + 1.25 + 0.125 + 0.25
    assert timeline.breakdown == {**timeline.exposed, "compute": 6.0, "closing": 0.375, "idle": 0.0}


def test_one_communicator_makes_gathers_wait_for_reductions():
    schedule = expand(build("1f1b", 1, 2), 4, gather="stretch", reduce="stretch")
    table = [[1.0] * 4]
    timing = Timing(forward=table, backward_input=table, backward_weight=table, unshard=table, reduce=[[2.5] * 4])
    shared = simulate(schedule, timing)
    separate = simulate(schedule, replace(timing, shared_communicator=False))
    assert shared.step_seconds > separate.step_seconds


def test_collectives_slow_compute_down_while_they_run():
    schedule = expand(build("gpipe", 1, 1), 2, gather="never")
    unit_seconds = [[1.0, 1.0]]
    timing = Timing(
        forward=unit_seconds,
        backward_input=unit_seconds,
        backward_weight=unit_seconds,
        reduce=[[1.5, 0.0]],
        reduce_slowdown=1.5,
    )
    assert spans_of(simulate(schedule, replace(timing, reduce=[[0.0, 1.5]])), "backward") == [(2, 4), (4, 6.5)]
    assert spans_of(simulate(schedule, timing), "backward") == [(2, 4), (4, 6)], (
        "no compute runs during the last reduction"
    )


def test_replica_sums_slow_compute_by_a_separate_factor():
    schedule = expand(build("gpipe", 1, 1), 2, gather="never")
    unit_seconds = [[1.0, 1.0]]
    timing = Timing(
        forward=unit_seconds,
        backward_input=unit_seconds,
        backward_weight=unit_seconds,
        replicate=[[0.0, 1.5]],
        replicate_slowdown=3.0,
    )
    assert spans_of(simulate(schedule, timing), "backward") == [(2, 4), (4, 7)]
    assert simulate(schedule, replace(timing, replicate_slowdown=1.0)).step_seconds == 6


def test_with_a_single_reduce_buffer_compute_waits_for_the_previous_reduction():
    """Units of 1 s forward and 2 s backward, reduced in 5 s."""
    schedule = expand(build("gpipe", 1, 1), 3, gather="never")
    unit_seconds = [[1.0] * 3]
    timing = Timing(forward=unit_seconds, backward_input=unit_seconds, backward_weight=unit_seconds, reduce=[[5.0] * 3])
    assert spans_of(simulate(schedule, timing), "backward") == [(3, 5), (5, 7), (7, 9)]
    single_buffer = simulate(schedule, replace(timing, single_reduce_buffer=True))
    assert spans_of(single_buffer, "backward") == [(3, 5), (5, 7), (10, 12)]
    assert spans_of(single_buffer, "reduce_grad") == [(5, 10), (10, 15), (15, 20)]
    assert single_buffer.exposed["shard"] == 3.0 + 3.0 + 5.0


COPIED = Timing(
    forward=[[1.0] * 2],
    backward_input=[[1.0] * 2],
    backward_weight=[[1.0] * 2],
    copy_out=[[0.25, 0.5]],
    copy_in=[[2.0, 4.0]],
    accumulate=[[8.0, 16.0]],
)


@pytest.mark.parametrize("gather, gathers", [("never", 0), ("step", 1), ("stretch", 6)])
def test_compute_includes_one_copy_out_per_gather(gather, gathers):
    schedule = expand(build("1f1b", 1, 3), 2, gather=gather, reduce="never")
    without_copies = simulate(schedule, replace(COPIED, copy_out=(), accumulate=())).step_seconds
    with_copies = simulate(schedule, replace(COPIED, accumulate=())).step_seconds
    count = Counter(action.unit for action in schedule.actions[0] if action.op == "unshard")
    assert sum(count.values()) >= gathers
    assert with_copies - without_copies == 0.25 * count[0] + 0.5 * count[1]


def test_gradients_are_accumulated_only_if_several_micro_batches_are_reduced_together():
    def seconds(batches, reduce):
        return simulate(expand(build("1f1b", 1, batches), 2, gather="never", reduce=reduce), COPIED).step_seconds

    assert seconds(1, "once") == 6 + 6, "one micro-batch: copied in without a sum"
    assert seconds(3, "stretch") == 3 * (6 + 6), "each reduced separately"
    assert seconds(3, "once") == 3 * 6 + 6 + 3 * 24


def test_forward_of_the_loss_unit_accumulates_its_gradients():
    schedule = expand(build("gpipe", 1, 2), 2, gather="never", reduce="once")
    timeline = simulate(schedule, replace(COPIED, copy_in=()))
    assert [end - start for start, end in spans_of(timeline, "forward")] == [1, 17, 1, 17]
    assert sorted(end - start for start, end in spans_of(timeline, "backward")) == [2, 2, 10, 10]


def test_a_slow_rank_lengthens_the_pipeline():
    schedule = build("1f1b", 2, 8)
    usual = simulate(schedule, uniform_timing(2))
    times = [[1.0], [2.0]]
    slow = simulate(schedule, Timing(forward=times, backward_input=times, backward_weight=times))
    assert slow.compute_seconds == (24.0, 48.0)
    assert slow.step_seconds == pytest.approx(1 + 48 + 2)
    assert slow.bubble > usual.bubble


def test_ranks_wait_for_each_other_before_the_optimizer():
    timing = replace(uniform_timing(2), norm_seconds=0.5, optim_seconds=[1.0, 2.0])
    timeline = simulate(build("gpipe", 2, 2), timing)
    assert spans_of(timeline, "norm_barrier", 0) == spans_of(timeline, "norm_barrier", 1) == [(9.0, 9.5)]
    assert spans_of(timeline, "optim", 1) == [(9.5, 11.5)]
    assert timeline.step_seconds == 11.5


def test_bubble_of_a_forward_only_pass():
    timeline = simulate(forward_only(looped(4), 8), uniform_timing(4))
    assert timeline.step_seconds == 11
    assert timeline.bubble == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", PIPELINES)
def test_parts_of_a_step_add_up_and_compute_never_overlaps(name):
    schedule = expand(build(name, 3, 7), 2)
    collective_seconds = [[0.5, 0.5]] * schedule.stages
    slow = [[0.65, 0.65] if rank == 1 else [0.5, 0.5] for rank in schedule.rank_of]
    timing = replace(
        uniform_timing(schedule.stages, 2),
        forward=slow,
        backward_input=slow,
        backward_weight=slow,
        unshard=collective_seconds,
        reduce=collective_seconds,
        replicate=collective_seconds,
        boundary_bytes=[0.3] * (schedule.stages - 1),
        link=Link(0.0, 1.0),
        gather_slowdown=1.2,
        reduce_slowdown=1.2,
        optim_seconds=[1.0] * 3,
    )
    timeline = simulate(schedule, timing)
    assert sum(timeline.breakdown.values()) == pytest.approx(timeline.step_seconds)
    assert all(seconds >= -1e-9 for seconds in timeline.breakdown.values())
    assert timeline.peak_in_flight == simulate(build(name, 3, 7), uniform_timing(schedule.stages)).peak_in_flight
    for rank in range(3):
        spans = [(start, end) for r, lane, _, start, end in timeline.records if (r, lane) == (rank, "compute")]
        assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(spans))


def test_deadlocks_and_mismatched_messages_are_refused():
    with pytest.raises(BadInput, match="deadlocks: rank 0 at B0.0, rank 1 at F1.0"):
        simulate(schedule_of("RG0.0<1 B0.0 F0.0 SA0.0>1", GOOD[1]), uniform_timing(2))
    with pytest.raises(BadInput, match="rank 0 sends SA0.0>1 where rank 1 expects RA1.1<0"):
        simulate(schedule_of(GOOD[0], "RA1.1<0 F1.0 B1.0 SG1.0>0"), uniform_timing(2))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"forward": ()}, r"timing.forward: expected a list for each of 2 stages, got 0"),
        ({"unshard": [[1.0]]}, r"timing.unshard: expected a list for each of 2 stages, got 1"),
        ({"reduce": [[1.0], [1.0, 1.0]]}, r"timing.reduce\[1\]: expected 1 units, got 2"),
        ({"boundary_bytes": [1.0, 1.0]}, "timing.boundary_bytes: expected 1 numbers, got 2"),
        ({"optim_seconds": [1.0]}, "timing.optim_seconds: expected 2 numbers, got 1"),
    ],
)
def test_a_timing_that_does_not_fit_is_refused(wrong, reason):
    with pytest.raises(BadInput, match=reason):
        simulate(expand(build("gpipe", 2, 2), 1), replace(uniform_timing(2), **wrong))


def test_work_slows_down_only_inside_busy_intervals():
    assert end_with_slowdown(0.0, 2.0, []) == 2.0
    assert end_with_slowdown(0.0, 2.0, [(1.0, 5.0, 2.0)]) == 3.0
    assert end_with_slowdown(0.0, 2.0, [(1.0, 2.0, 2.0), (1.5, 2.0, 2.0)]) == 2.5, "two intervals at once count once"
    assert end_with_slowdown(0.0, 2.0, [(0.0, 2.0, 2.0), (1.0, 4.0, 4.0)]) == 4.75, "the slower of two counts"
    assert end_with_slowdown(3.0, 2.0, [(0.0, 1.0, 4.0), (3.5, 4.5, 4.0)]) == 5.75


seconds = st.integers(0, 40).map(lambda quarters: quarters / 4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.data())
def test_times_equal_those_of_an_iterative_reference(name, ranks, batches, cut, data):
    if refusal(name, ranks, batches, SCHEDULES[name].stages_per_rank.start):
        return
    schedule = build(name, ranks, batches)
    schedule = expand(schedule, 2) if cut else schedule
    table = st.lists(st.lists(seconds, min_size=2, max_size=2), min_size=schedule.stages, max_size=schedule.stages)
    bounds = st.lists(seconds, min_size=schedule.stages - 1, max_size=schedule.stages - 1)
    timing = Timing(
        forward=data.draw(table),
        backward_input=data.draw(table),
        backward_weight=data.draw(table),
        unshard=data.draw(table),
        reduce=data.draw(table),
        boundary_bytes=data.draw(bounds),
        link=Link(0.25, 1.0),
        shared_communicator=False,
    )
    timeline = simulate(schedule, timing)
    expected = _times_by_iteration(schedule, timing)
    for rank in range(ranks):
        spans = [(start, end) for r, lane, a, start, end in timeline.records if r == rank and a.op in COMPUTE]
        assert spans == [pytest.approx(span) for span in expected[rank]]


def _times_by_iteration(schedule: Schedule, timing: Timing) -> list[list[tuple[float, float]]]:
    """(start, end) of each rank's compute actions: applies every constraint until no time changes."""
    actions_by_rank, rank_of, last_unit = (
        schedule.actions,
        schedule.rank_of,
        [n - 1 for n in schedule.units or [1] * schedule.stages],
    )
    ends = [[0.0] * len(rank_actions) for rank_actions in actions_by_rank]
    starts = [[0.0] * len(rank_actions) for rank_actions in actions_by_rank]
    messages = {}
    changed = True
    while changed:
        changed = False
        channels = {}
        for rank, rank_actions in enumerate(actions_by_rank):
            compute_end, lane_end, gathered = 0.0, {"unshard": 0.0, "reduce_grad": 0.0}, {}
            for index, action in enumerate(rank_actions):
                start = end = compute_end
                if action.op in COMPUTE:
                    for part in action.parts:
                        needs = 0.0 if part.op == "backward_weight" else gathered.get((part.stage, part.unit or 0), 0.0)
                        start = max(start, needs, _arrival(part, messages, last_unit))
                    end = compute_end = start + _seconds(action, timing)
                elif action.op in lane_end:
                    table = timing.unshard if action.op == "unshard" else timing.reduce
                    end = max(compute_end, lane_end[action.op]) + table[action.stage][action.unit]
                    lane_end[action.op] = end
                    if action.op == "unshard":
                        gathered[action.stage, action.unit] = end
                elif action.op == "send":
                    channels.setdefault((rank, rank_of[action.peer]), ([], []))[0].append((action, compute_end))
                elif action.op == "recv":
                    channels.setdefault((rank_of[action.peer], rank), ([], []))[1].append((action, compute_end))
                changed |= (starts[rank][index], ends[rank][index]) != (start, end)
                starts[rank][index], ends[rank][index] = start, end
        for sends, receives in channels.values():
            free = 0.0
            for (send, sent), (receive, posted) in zip(sends, receives, strict=True):
                free = max(sent, posted, free) + timing.link.seconds(timing.boundary_bytes[min(send.stage, send.peer)])
                key = receive.payload, receive.stage, receive.micro_batch
                changed |= messages.get(key) != free
                messages[key] = free
    return [
        [(starts[rank][index], ends[rank][index]) for index, action in enumerate(rank_actions) if action.op in COMPUTE]
        for rank, rank_actions in enumerate(actions_by_rank)
    ]


def _arrival(part, messages, last_unit):
    if part.op == "forward":
        return messages.get(("activation", part.stage, part.micro_batch), 0.0) if not part.unit else 0.0
    if part.op != "backward_weight" and part.unit in (None, last_unit[part.stage]):
        return messages.get(("gradient", part.stage, part.micro_batch), 0.0)
    return 0.0


def _seconds(action, timing):
    if action.pair:
        return sum(_seconds(part, timing) for part in action.pair)
    names = ("backward_input", "backward_weight") if action.op == "backward" else (action.op,)
    unit_seconds = [getattr(timing, name)[action.stage] for name in names]
    return sum(
        sum(stage_seconds) if action.unit is None else stage_seconds[action.unit] for stage_seconds in unit_seconds
    )
