from __future__ import annotations

import pytest

from meshwright.config.load import load_run
from meshwright.planner.candidate import Candidate, SearchResult
from meshwright.planner.objectives import (
    Point,
    at_size,
    cheapest,
    cluster_sizes,
    fastest,
    scaling,
    shortest_training,
)
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan, Predicted
from meshwright.spec.run import RunSpec

WORDS = "model=llama3-1b cluster.gpu=H100 cluster.gpus_per_node=2 train.seq_len=4096 train.global_batch=16"


def ask(*words: str) -> RunSpec:
    return load_run(None, [*WORDS.split(), *words])


def point(gpus: int, seconds: float) -> Point:
    plan = Plan(
        mesh=(MeshAxis(axis="shard", size=gpus),),
        batch=BatchPlan(global_batch=16, micro_batch=1, accumulate=1),
        predicted=Predicted(memory_peak_bytes=1, step_seconds=seconds),
    )
    return Point(gpus, ask(), SearchResult(Candidate(plan, fits=True), (), 1, 0.0))


def test_sizes_double_and_fill_nodes() -> None:
    run = ask("cluster.gpus_per_node=8")
    assert cluster_sizes(run, 2, 70) == (2, 4, 8, 16, 32, 64)
    small, large = at_size(run, 4).cluster, at_size(run, 32).cluster
    assert (small.nodes, small.gpus_per_node, large.nodes, large.gpus_per_node) == (1, 4, 4, 8)


@pytest.mark.parametrize("first, last, message", [(8, 4, "A ≤ B"), (12, 12, "nearest whole number of nodes is 8 GPUs")])
def test_sizes_that_are_none_are_refused(first: int, last: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cluster_sizes(ask("cluster.gpus_per_node=8"), first, last)


@pytest.mark.parametrize("words", [["cluster.gpu=cpu"], ["cluster.emulate_nodes=2"]])
def test_clusters_that_do_not_grow_are_refused(words: list[str]) -> None:
    with pytest.raises(BadInput, match="--gpus needs a cluster of like GPUs"):
        cluster_sizes(ask(*words), 2, 4)


def test_the_fastest_is_not_the_cheapest() -> None:
    points = [point(1, 10.0), point(2, 5.0), point(4, 3.0), point(8, 2.0), Point(16, ask(), None, "too small a batch")]
    assert fastest(points).gpus == 8
    assert cheapest(points).gpus == 2  # as cheap as one GPU, and sooner
    hours = points[1].gpu_hours(16 * 4096 * 3600)
    assert hours == pytest.approx(2 * 5.0 / points[1].training_share) and points[1].training_share < 1
    with pytest.raises(OutOfResources, match="too small a batch"):
        fastest(points[-1:])


def test_scaling_answers_each_size_or_says_why_not() -> None:
    small, large = scaling(ask("cluster.memory_gib=20", "plan.offload=none"), (1, 2), trainable=True)
    assert small.answer is None and small.refused.startswith("does not fit")
    assert large.answer is not None and large.answer.best.plan.ranks == 2
    assert large.seconds and large.tokens_per_second == pytest.approx(16 * 4096 / large.seconds)


def test_steps_and_tokens_obey_the_trade_off() -> None:
    """McCandlish et al. 2018, equation 2.11: (S / S_min - 1) (E / E_min - 1) = 1 at every batch."""
    run, critical, tokens = ask("cluster.gpus_per_node=1"), 2.0e5, 1e9
    own = 16 * 4096
    least_steps = tokens / (own + critical)
    least_tokens = least_steps * critical
    trainings = shortest_training(run, critical, tokens, trainable=True)
    assert [training.seconds for training in trainings] == sorted(training.seconds for training in trainings)
    assert len({training.batch for training in trainings}) > 3
    for training in trainings:
        tokens_seen = training.steps * training.batch * 4096
        assert (training.steps / least_steps - 1) * (tokens_seen / least_tokens - 1) == pytest.approx(1)
        step_seconds = (training.point.seconds or 0) / training.point.training_share
        assert training.seconds == pytest.approx(training.steps * step_seconds)
        assert training.gpu_hours == pytest.approx(training.seconds / 3600)
    (own_training,) = (training for training in trainings if training.batch == 16)
    assert own_training.steps * own == pytest.approx(tokens)
