from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.planner.candidate import HEADROOM, Candidate, SearchResult, peak_bytes
from meshwright.planner.explain import border, limits, parts_of, reason_against, shortfall
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search
from meshwright.simulator.step_simulation import memory_of
from meshwright.spec.plan import BatchPlan, Breakdown, ExpertPlan, LayerStrategy, MeshAxis, Plan, Predicted
from meshwright.spec.run import RunSpec

TCP = "model=llama3-1b cluster.gpu=H100 cluster.gpus_per_node=4 cluster.emulate_nodes=2 train.seq_len=4096 train.global_batch=16"


def ask(*words: str) -> RunSpec:
    return load_run(None, [*TCP.split(), *words])


@pytest.fixture(scope="module")
def hsdp() -> tuple[RunSpec, SearchResult]:
    """Two replicas whose sums cross a slow network."""
    run = ask("plan.replicate=2", "plan.shard=2")
    return run, search(run, trainable=True)


def plan_of(seconds: float, **parts: float) -> Plan:
    """A single-rank plan whose step takes `seconds`: `parts`, and compute for the remainder."""
    exposed = {axis: value for axis, value in parts.items() if axis not in ("bubble", "host")}
    kept = {name: parts[name] for name in ("bubble", "host") if name in parts}
    breakdown = Breakdown(compute=seconds - sum(parts.values()), exposed=exposed, **kept)
    return Plan(
        mesh=(MeshAxis(axis="shard", size=1),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        predicted=Predicted(memory_peak_bytes=10**9, step_seconds=seconds, breakdown=breakdown),
    )


def test_experts_inside_a_node_are_said_to_be_there() -> None:
    """Expert ranks are neighbours inside a node although the shard axis spans nodes."""
    words = "model=mixtral-8x7b cluster.gpu=H200 cluster.gpus_per_node=8 cluster.nodes=2 train.global_batch=16 train.seq_len=4096"
    run = load_run(None, words.split())
    axes, batch = (
        (MeshAxis(axis="shard", size=16, crosses="node"),),
        BatchPlan(global_batch=16, micro_batch=1, accumulate=1),
    )
    for expert, where in ((8, "inside a node"), (16, "between nodes")):
        plan = Plan(mesh=axes, batch=batch, experts=ExpertPlan(expert=expert, expert_shard=16 // expert))
        assert border(run, plan, "expert").startswith(where)
        assert border(run, plan, "shard").startswith("between nodes")


def test_the_parts_are_the_step(hsdp: tuple[RunSpec, SearchResult]) -> None:
    _, answer = hsdp
    for candidate in (answer.best, *answer.others):
        predicted = candidate.plan.predicted
        assert predicted is not None and sum(parts_of(predicted).values()) == pytest.approx(
            predicted.step_seconds, rel=1e-6
        )


def test_a_slow_network_is_what_limits(hsdp: tuple[RunSpec, SearchResult]) -> None:
    run, answer = hsdp
    limits_found = limits(run, answer.best.plan)
    assert [limit.seconds for limit in limits_found] == sorted((limit.seconds for limit in limits_found), reverse=True)
    by_name = {limit.name: limit for limit in limits_found}
    assert "of the chip's peak" in by_name["compute"].text
    sums = by_name["replicate"]
    assert sums.text.startswith("replicate between nodes (") and "gradient sums over replicas" in sums.text
    predicted = answer.best.plan.predicted
    assert predicted is not None and predicted.breakdown is not None and predicted.step_seconds is not None
    assert sums.seconds == predicted.breakdown.exposed["replicate"]
    assert f"({sums.seconds / predicted.step_seconds:.0%})" in sums.text


def test_recomputation_that_memory_asks_for_is_a_limit() -> None:
    run = ask(
        "cluster.memory_gib=48", "train.global_batch=64", "plan.shard=4", "plan.micro_batch=8", "plan.recompute=full"
    )
    plan = search(run).best.plan
    free = reprice(run, replace(plan, layers=tuple(replace(layer, recompute="none") for layer in plan.layers)))
    assert peak_bytes(plan) <= HEADROOM * 48 * 2**30 < peak_bytes(free)
    (memory,) = (limit for limit in limits(run, plan) if limit.name == "memory")
    assert plan.predicted and plan.predicted.step_seconds and free.predicted and free.predicted.step_seconds
    assert memory.seconds == pytest.approx(plan.predicted.step_seconds - free.predicted.step_seconds)
    assert "recompute full" in memory.text and "activations" in memory.text and " more than the usable " in memory.text
    roomy = replace(run, cluster=replace(run.cluster, memory_gib=140))
    assert not [limit for limit in limits(roomy, plan) if limit.name == "memory"]


@pytest.mark.parametrize(
    "other, why",
    [
        (plan_of(1.5, tensor=0.4), "+0.50 s: exposed tensor +0.40 s"),
        (plan_of(1.3, bubble=0.35), "+0.30 s: bubble +0.35 s"),
        (plan_of(1.2), "+0.20 s: compute +0.30 s"),
        (plan_of(1.04, shard=0.14), "+40.0 ms: exposed shard +40.0 ms"),
        (plan_of(0.995, shard=0.1), "cannot be told apart (within 1%): the simpler plan is taken"),
    ],
)
def test_the_part_that_is_longest_behind_is_named(other: Plan, why: str) -> None:
    assert reason_against(ask(), Candidate(plan_of(1.0, shard=0.1)), Candidate(other)) == why


def test_an_estimate_is_compared_with_an_estimate() -> None:
    best = Candidate(plan_of(1.0), estimated=1.2)
    quick = Candidate(plan_of(0.9), simulated=False, estimated=1.25)
    assert reason_against(ask(), best, quick) == "+50.0 ms by the quick estimate, slower than similar plans"


def test_plans_as_fast_are_told_apart_by_what_they_do() -> None:
    best = plan_of(1.0)
    assert "gathers weights twice" in reason_against(
        ask(), Candidate(replace(best, layers=(LayerStrategy(reshard=False),))), Candidate(best)
    )
    full = replace(best, layers=(LayerStrategy(recompute="full"),))
    sentence = reason_against(ask(), Candidate(best), Candidate(full))
    assert sentence == "cannot be told apart (within 1%): computes activations twice (recompute full)"


def test_a_simpler_plan_says_what_the_other_has_more() -> None:
    best = plan_of(1.0)
    replicas = replace(
        plan_of(0.995),
        mesh=(MeshAxis(axis="replicate", size=2), MeshAxis(axis="tensor", size=2)),
        layers=(LayerStrategy(range="0-1", recompute="full"), LayerStrategy(range="2-3")),
    )
    told = reason_against(ask(), Candidate(best), Candidate(replicas))
    extra = "2 axes, recompute full, 2 ranges of layers that differ"
    assert told == f"cannot be told apart (within 1%): the simpler plan is taken; this one has {extra}"
    as_simple = reason_against(ask(), Candidate(best), Candidate(plan_of(1.005)))
    assert as_simple == "cannot be told apart (within 1%): both are as simple, and the shorter step is taken"


def test_without_seconds_the_plans_themselves_are_compared() -> None:
    best = replace(plan_of(1.0), predicted=Predicted(memory_peak_bytes=10**9))
    larger = replace(best, predicted=Predicted(memory_peak_bytes=3 * 10**9))
    assert reason_against(ask(), Candidate(best), Candidate(larger)) == "needs 2.0 GB more"


def test_what_does_not_fit_says_which_rank_and_kind_and_by_how_much() -> None:
    run = ask("cluster.memory_gib=20", "plan.pipeline=2")
    plan = replace(
        search(ask("plan.pipeline=2")).best.plan, batch=BatchPlan(global_batch=16, micro_batch=4, accumulate=1)
    )
    bytes_by_rank = [sum(by_category.values()) for by_category in memory_of(run.model, run.train, plan, cpu=False)]
    fullest, usable = bytes_by_rank.index(max(bytes_by_rank)), HEADROOM * 20 * 2**30
    sentence = shortfall(run, plan)
    assert reason_against(run, Candidate(plan), Candidate(plan, fits=False)) == f"does not fit: {sentence}"
    assert sentence.startswith(
        f"pipeline rank {fullest} needs {max(bytes_by_rank) / 1e9:.1f} GB, {(max(bytes_by_rank) - usable) / 1e9:.1f} GB more than"
    )
    assert "activations" in sentence
