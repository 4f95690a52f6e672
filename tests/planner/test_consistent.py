"""A pin never makes the answer faster, as every pinned plan is in the unpinned search space too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from meshwright.config.load import load_run
from meshwright.planner.candidate import compared_seconds, pins_of
from meshwright.planner.finalists import FEWEST_SLOW, SAME_TIME_TOLERANCE, Ranking
from meshwright.planner.search import search
from meshwright.spec.errors import OutOfResources
from meshwright.spec.plan import Plan

CHOICES: dict[str, Callable[[Plan], object]] = {
    "schedule": lambda plan: plan.schedule.name,
    "pipeline": lambda plan: plan.axis_size("pipeline"),
    "offload": lambda plan: plan.layers[0].offload,
    "recompute": lambda plan: plan.layers[0].recompute,
}
QUESTIONS = {
    "tight memory over TCP": (
        "model=llama3-8b cluster.gpu=H200 cluster.gpus_per_node=8 cluster.emulate_nodes=2 cluster.memory_gib=45 train.seq_len=4096 "
        "train.global_batch=128",
        True,
    ),
    "a pinned pipeline of long sequences": (
        "model=llama3-8b cluster.gpu=H100 cluster.gpus_per_node=4 cluster.memory_gib=60 train.seq_len=32768 train.global_batch=16 "
        "plan.pipeline=2 plan.tensor=1 plan.context_ring=1 plan.context_ulysses=1 plan.schedule=zbv",
        False,
    ),
    "small devices on two nodes": (
        "model=llama3-3b cluster.gpu=A100 cluster.nodes=2 cluster.gpus_per_node=4 cluster.memory_gib=24 train.seq_len=4096 "
        "train.global_batch=64",
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_no_pin_makes_the_answer_faster(name: str) -> None:
    """Repeats the search with each choice pinned to its own value, and to the value of the best other plan."""
    words, trainable = QUESTIONS[name]
    run = load_run(None, words.split())
    answer = search(run, trainable=trainable)
    for key, value in CHOICES.items():
        if getattr(pins_of(run), key) is not None:
            continue
        own = value(answer.best.plan)
        other = next((value(candidate.plan) for candidate in answer.others if value(candidate.plan) != own), own)
        for pinned in {own, other}:
            try:
                beside = search(load_run(None, [*words.split(), f"plan.{key}={pinned}"]), trainable=trainable)
            except OutOfResources:
                continue
            free_seconds, pinned_seconds = (compared_seconds(run, found.best) for found in (answer, beside))
            assert free_seconds <= (1 + SAME_TIME_TOLERANCE) * pinned_seconds, f"plan.{key}={pinned}"


def test_a_kind_that_is_guessed_too_slow_is_tried_in_time() -> None:
    estimates = [1.0, 1.01, 1.02, 1.03, 1.1, 1.12]
    families = [("slow", "a")] * 4 + [("quick", "b")] * 2
    seconds = [1.2, 1.21, 1.22, 1.23, 0.95, 0.97]

    def tried(untried_ratio: float) -> Iterator[int]:
        return Ranking(estimates, families, untried_ratio).order(seconds.__getitem__)

    assert [*tried(0.9)] == [0, 4, 5, 1, 2, 3]
    assert [*tried(1.2)][:2] == [0, 1]  # without hope of it


def test_a_wider_kind_tells_of_the_others_unless_it_was_slow() -> None:
    estimates = [1.0, 1.05, 1.06, 1.2]
    families = [("deep", "v"), ("flat", "plain"), ("flat", "plain"), ("shallow", "v")]
    assert [*Ranking(estimates, families, 1.0).order([0.8, 1.05, 1.06, 0.97].__getitem__)] == [0, 3, 1, 2]
    assert [*Ranking(estimates, families, 1.0).order([1.5, 1.05, 1.06, 0.97].__getitem__)] == [0, 1, 2, 3]


def test_what_does_not_fit_is_left_out() -> None:
    infinite = float("inf")
    assert [*Ranking([1.0, 1.1], [("a", "a"), ("b", "b")], 0.9).order([infinite, 1.1].__getitem__)] == [1]


def test_a_wider_kind_that_was_slow_several_times_is_tried_last() -> None:
    estimates = [1.0 + 0.01 * index for index in range(10)] + [1.4]
    families = [(f"deep {index}", "v") for index in range(10)] + [("flat", "plain")]
    seconds = [3.0 * estimate for estimate in estimates[:10]] + [1.4]
    order = [*Ranking(estimates, families, 1.0).order(seconds.__getitem__, min_effort=1)]
    assert order == [*range(FEWEST_SLOW), 10], "and what is as slow as the others is not tried"


def test_the_plans_of_a_value_are_tried_after_the_best() -> None:
    ranking = Ranking([1.0, 1.5, 1.6], [("a", "a"), ("b", "b"), ("b", "b")], 1.0)
    seconds = [1.0, 1.5, 1.2].__getitem__
    assert [*ranking.order(seconds, min_effort=1)] == [0]
    assert [*ranking.order(seconds, min_effort=0, among=np.array([False, True, True]))] == [1]
    assert [*ranking.order(seconds, min_effort=2, among=np.array([False, True, True]))] == [2]


def test_another_split_is_tried_although_its_family_was_slower_than_estimated() -> None:
    families = [("1 shard", "a", "a"), ("2 shards", "a", "a"), ("2 shards", "a", "a")]
    for factor, tried in ((1.0, [0]), (0.96, [0, 1])):
        ranking = Ranking([1.0, 1.05, 1.3], families, 1.0, (1.0, factor, 1.0))
        assert [*ranking.order([1.2, 1.1, 1.4].__getitem__, min_effort=1)] == tried
