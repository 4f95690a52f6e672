"""The common order of slots: properties under random batches, and pipelines that end every schedule with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.slots import SampleSlot, slots_to_run
from meshwright.policies.sample_balance import Balance, RankPool, balance_samples
from meshwright.policies.sample_time import SampleTime
from meshwright.policies.slot_order import slot_order
from meshwright.schedules.action import COMPUTE, FORWARD, GRADIENT, Action
from meshwright.schedules.registry import build
from meshwright.schedules.schedule import Schedule
from meshwright.spec.hybrid import PIPELINE_SCHEDULES, Numbering
from tests.slow import examples


def drawn_balance(seed: int, pipelines: int, stages: int) -> Balance:
    """A batch of some long samples and few or many short ones."""
    random, capacity = np.random.default_rng(seed), 16
    long = random.integers(1, pipelines * capacity + 1, size=random.integers(1, 8))
    short = random.integers(1, capacity + 1, size=random.integers(0, 6 * pipelines))
    pool = RankPool(pipelines, capacity, SampleTime(1e-3, 1.0, 2.0), stages)
    return balance_samples(np.concatenate([long, short]), pool)


BALANCES = st.builds(drawn_balance, st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([1, 2, 4]))


@given(BALANCES)
@settings(max_examples=examples(15, 300), deadline=None)
def test_parts_of_a_sample_have_one_number_on_all_ranks(balance: Balance) -> None:
    order, number_of = slot_order(balance), {}
    for rank, numbers in enumerate(order.numbers):
        assert len(set(numbers)) == len(numbers) == max(balance.slots[rank], 1), "each slot has a number of its own"
        assert all(0 <= number < order.count for number in numbers)
        for slot in slots_to_run(balance, rank, "common"):
            assert slot.common is not None and slot.common.count == order.count
            if slot.divided is not None:
                assert number_of.setdefault(slot.divided.sample, slot.common.number) == slot.common.number
    assert any(order.count - 1 in numbers for numbers in order.numbers)
    for rank in range(balance.pool.ranks):
        slots = slots_to_run(balance, rank, "equal")
        assert [slot.common.number for slot in slots if slot.common] == list(range(order.count))
        parts = [slot.parts for slot in slots if slot.parts]
        assert parts == [slot.parts for slot in slots_to_run(balance, rank, "common") if slot.parts]


@given(BALANCES, st.sampled_from(PIPELINE_SCHEDULES))
@settings(max_examples=examples(15, 300), deadline=None)
def test_no_pipeline_waits_for_ever(balance: Balance, name: str) -> None:
    slots = [slots_to_run(balance, rank, "common") for rank in range(balance.pool.ranks)]
    assert come_to_the_end(slots, name, balance.pool.stages)


def test_pipelines_that_count_their_own_slots_can_wait_for_ever() -> None:
    """Pipelines 0 and 1 share samples 0 and 2, which are two slots apart on pipeline 0 and consecutive on pipeline 1."""
    balance = divided_over([(0, 1), (0, 2), (0, 1)], pipelines=3)
    assert slot_order(balance).numbers == ((0, 1, 2), (0, 2), (1,))
    ends: dict[Numbering, bool] = {
        numbering: come_to_the_end([slots_to_run(balance, rank, numbering) for rank in range(3)], "1f1b", 2)
        for numbering in ("own", "common", "equal")
    }
    assert ends == {"own": False, "common": True, "equal": True}


def divided_over(ranks: list[tuple[int, ...]], pipelines: int) -> Balance:
    """A balance of samples that these ranks divide, in this order."""
    parts = [(rank, sample, part) for sample, members in enumerate(ranks) for part, rank in enumerate(members)]
    parts.sort()
    rank, sample, part = np.array(parts).T
    slots = np.bincount(rank, minlength=pipelines)
    slot = np.concatenate([np.arange(number) for number in slots])
    number = np.array([len(ranks[of_part]) for of_part in sample.tolist()])
    work, ends = np.ones(len(parts)), np.ones(pipelines)
    pool = RankPool(pipelines, 4, SampleTime(0.0, 1.0), 2)
    return Balance(
        pool, sample, part, number, rank, slot, 4 * work, work < 0, work, slots, np.zeros(len(ranks)), ends, 1.0
    )


@pytest.mark.parametrize("in_turns", [False, True])
def test_the_rest_of_a_schedule_is_counted_from_0(in_turns: bool) -> None:
    whole = build("1f1b", 2, 5, 1)
    rest = (whole.in_turns() if in_turns else whole).only([1, 4])
    same = build("1f1b", 2, 2, 1)
    assert [rest.compute(rank)[0] for rank in range(2)] == [same.compute(rank)[0] for rank in range(2)]
    for ours, theirs in zip(rest.actions, same.actions, strict=True):
        assert sorted(map(str, ours)) == sorted(map(str, theirs))


def come_to_the_end(slots: list[list[SampleSlot]], name: str, pipeline: int) -> bool:
    """Whether pipelines end a step of their `slots`; the ranks of a divided sample run each pass of it together."""
    schedules = [_schedule(of_pipeline, name, pipeline) for of_pipeline in slots]
    actions = {
        (index, rank): list(schedules[index].actions[rank]) for index in range(len(slots)) for rank in range(pipeline)
    }
    arrived: set[tuple[int, int, int, str | None]] = set()

    def meeting(key: tuple[int, int]) -> tuple[str, int, int] | None:
        """The pass of a divided sample that is next on a rank: op, stage and sample."""
        action = actions[key][0]
        divided = slots[key[0]][action.micro_batch].divided if action.op in FORWARD | GRADIENT else None
        return None if divided is None else (action.op, action.stage, divided.sample)

    def ready(key: tuple[int, int]) -> bool:
        (index, rank), action = key, actions[key][0]
        schedule = schedules[index]
        source = action.stage + (-1 if action.op in FORWARD else 1)
        if action.op not in FORWARD | GRADIENT or not 0 <= source < schedule.stages or schedule.rank_of[source] == rank:
            return True
        payload = "activation" if action.op in FORWARD else "gradient"
        return (index, action.stage, action.micro_batch, payload) in arrived

    def runs(key: tuple[int, int]) -> bool:
        if not ready(key):
            return False
        if (wanted := meeting(key)) is None:
            return True
        divided = slots[key[0]][actions[key][0].micro_batch].divided
        assert divided is not None
        others = [(index, key[1]) for index in divided.ranks]
        return all(actions[other] and meeting(other) == wanted and ready(other) for other in others)

    while remaining := [key for key, of_rank in actions.items() if of_rank]:
        runnable = [key for key in remaining if runs(key)]
        if not runnable:
            return False
        for key in runnable:
            action: Action = actions[key].pop(0)
            if action.op == "send":
                arrived.add((key[0], action.peer, action.micro_batch, action.payload))
    return True


def _schedule(slots: list[SampleSlot], name: str, pipeline: int) -> Schedule:
    numbers = [number if slot.common is None else slot.common.number for number, slot in enumerate(slots)]
    count = max(numbers) + 1 if slots[0].common is None else slots[0].common.count
    schedule = build(name, pipeline, count).only(numbers)
    assert {action.micro_batch for action in schedule.compute(0)} == set(range(len(slots)))
    assert all(action.op in COMPUTE for action in schedule.compute(0))
    return schedule
