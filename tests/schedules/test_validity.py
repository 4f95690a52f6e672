"""`validity.check` refuses invalid schedules, each with its reason."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.schedules.action import parse_all
from meshwright.schedules.expand import expand
from meshwright.schedules.registry import build
from meshwright.schedules.schedule import Schedule, looped, vee
from meshwright.schedules.validity import check
from meshwright.spec.errors import BadInput
from tests.schedules.sizes import PIPELINES


def schedule_of(*printed_ranks, placement=None, micro_batches=1, units=None):
    """A schedule from the printed actions of each rank, followed by gradient norm and optimizer."""
    actions = tuple(parse_all(f"{printed} N O") for printed in printed_ranks)
    return Schedule("written", micro_batches, placement or looped(len(printed_ranks)), actions, units)


# Printed actions (`schedules.action`): stage.micro-batch, or stage.micro-batch/unit, after F forward, B backward, I input half,
# W weight half; SA0.0>1 sends an activation of stage 0 to stage 1, RG0.0<1 receives a gradient from stage 1. stage/unit after U gather,
# D free, G reduce. N gradient norm, O optimizer.
GOOD = ("F0.0 SA0.0>1 RG0.0<1 B0.0", "RA1.0<0 F1.0 B1.0 SG1.0>0")


def test_a_schedule_written_by_hand_passes():
    check(schedule_of(*GOOD), sends_ahead=0)


@pytest.mark.parametrize(
    ("printed_ranks", "reason"),
    [
        (("F0.0 SA0.0>1 RG0.0<1", GOOD[1]), "the backward of stage 0, unit 0, micro-batch 0 runs 0 times"),
        (("F0.0 F0.0 SA0.0>1 RG0.0<1 B0.0", GOOD[1]), "the forward of stage 0, unit 0, micro-batch 0 runs 2 times"),
        (("F0.0 F0.1 SA0.0>1 RG0.0<1 B0.0", GOOD[1]), "the forward of stage 0, unit 0, micro-batch 1 is not part of"),
        (("F0.0 SA0.0>1 RG0.0<1 B0.0 B1.0", GOOD[1]), "rank 0 runs B1.0 but holds only stages"),
        (("RG0.0<1 B0.0 F0.0 SA0.0>1", GOOD[1]), "deadlock: rank 0 at B0.0, rank 1 at F1.0"),
        (("F0.0 SA0.0>1 B0.0 RG0.0<1", GOOD[1]), "deadlock: rank 0 at B0.0"),
        (("F0.0 RG0.0<1 B0.0", GOOD[1]), "deadlock: rank 0 at B0.0, rank 1 at F1.0"),
        ((GOOD[0], GOOD[1] + " SG1.0>0"), "SG1.0>0 between ranks 1 and 0 has no counterpart"),
        (("SA0.0>1 F0.0 RG0.0<1 B0.0", GOOD[1]), "rank 0 issues SA0.0>1 before its payload is computed"),
        (
            (GOOD[0], "RA1.0<0 B1.0 SG1.0>0 F1.0"),
            "rank 1 runs B1.0 before the forward of stage 1, unit 0, micro-batch 0",
        ),
        (
            (GOOD[0], "RA1.0<0 F1.0 W1.0 I1.0 SG1.0>0"),
            "rank 1 runs W1.0 before the input gradient of stage 1, unit 0, micro-batch 0",
        ),
        ((GOOD[0] + " N", GOOD[1]), "rank 0 must end with one norm_barrier and one optim"),
        ((GOOD[0], "O " + GOOD[1]), "rank 1 must end with one norm_barrier and one optim"),
    ],
)
def test_invalid_schedules_are_refused_with_the_reason(printed_ranks, reason):
    with pytest.raises(BadInput, match=reason):
        check(schedule_of(*printed_ranks))


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("F0.0/0 D0/0 B0.0/0 G0/0", "issues D0/0 while the unit is not gathered"),
        ("F0.0/0 U0/0 B0.0/0 D0/0", "runs F0.0/0 while its parameters are not gathered"),
        ("U0/0 U0/0 F0.0/0 B0.0/0 D0/0", "issues U0/0 while the unit is gathered"),
        ("U0/0 F0.0/0 B0.0/0", "reaches the optimizer with the parameters of stage 0, unit 0 gathered"),
        ("F0.0/0 G0/0 B0.0/0", "reaches the optimizer with gradients of stage 0, unit 0 not reduced"),
    ],
)
def test_units_must_be_gathered_freed_and_reduced(printed, reason):
    with pytest.raises(BadInput, match=reason):
        check(schedule_of(printed, units=(1,)))


def test_two_ranks_that_both_send_first_deadlock_without_buffers():
    """Rank 0 holds stages 0 and 3, rank 1 holds 1 and 2: each sends to the other before it posts its own receive."""
    printed_ranks = (
        "F0.0 SA0.0>1 F0.1 SA0.1>1 RA3.0<2 F3.0 RA3.1<2 F3.1 B3.0 SG3.0>2 B3.1 SG3.1>2 RG0.0<1 B0.0 RG0.1<1 B0.1",
        "RA1.0<0 F1.0 F2.0 SA2.0>3 RA1.1<0 F1.1 F2.1 SA2.1>3 RG2.0<3 B2.0 B1.0 SG1.0>0 RG2.1<3 B2.1 B1.1 SG1.1>0",
    )
    schedule = schedule_of(*printed_ranks, placement=vee(2), micro_batches=2)
    check(schedule, sends_ahead=1)
    with pytest.raises(BadInput, match="deadlock: rank 0 at SA0.1>1, rank 1 at SA2.0>3"):
        check(schedule, sends_ahead=0)


def test_too_few_warm_up_forwards_deadlock():
    with pytest.raises(BadInput, match="deadlock"):
        check(
            schedule_of(
                "F0.0 SA0.0>1 RG0.0<1 B0.0 F0.1 SA0.1>1 RG0.1<1 B0.1",
                "RA1.0<0 F1.0 RA1.1<0 F1.1 B1.0 SG1.0>0 B1.1 SG1.1>0",
                micro_batches=2,
            )
        )


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(PIPELINES)), st.integers(2, 4), st.data())
def test_two_messages_of_one_channel_swapped_are_caught(name, ranks, data):
    schedule = build(name, ranks, 2 * ranks)
    rank = data.draw(st.integers(0, ranks - 1))
    rank_actions = list(schedule.actions[rank])
    first = data.draw(st.sampled_from([i for i, action in enumerate(rank_actions) if action.op in ("send", "recv")]))

    def channel(action):
        return action.op, schedule.rank_of[action.peer]

    later_messages = [
        i for i, action in enumerate(rank_actions) if i > first and channel(action) == channel(rank_actions[first])
    ]
    assume(later_messages)
    second = later_messages[0]
    rank_actions[first], rank_actions[second] = rank_actions[second], rank_actions[first]
    swapped = replace(schedule, actions=(*schedule.actions[:rank], tuple(rank_actions), *schedule.actions[rank + 1 :]))
    with pytest.raises(BadInput, match=r"expects|before its payload|deadlock"):
        check(swapped)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(PIPELINES)), st.integers(1, 3), st.data())
def test_a_lost_action_is_caught(name, ranks, data):
    schedule = expand(build(name, ranks, 2 * ranks), 2)
    rank = data.draw(st.integers(0, ranks - 1))
    rank_actions = schedule.actions[rank]
    lost_index = data.draw(st.integers(0, len(rank_actions) - 1))
    actions = (
        *schedule.actions[:rank],
        rank_actions[:lost_index] + rank_actions[lost_index + 1 :],
        *schedule.actions[rank + 1 :],
    )
    with pytest.raises(BadInput):
        check(replace(schedule, actions=actions))


def test_a_placement_must_hold_every_stage_once():
    with pytest.raises(BadInput, match="must hold every stage from 0 on, once"):
        check(schedule_of(*GOOD, placement=((0,), (0,))))
    with pytest.raises(BadInput, match="1 lists of actions for 2 ranks"):
        check(replace(schedule_of(GOOD[0]), placement=looped(2)))
