"""The sentences that explain why a plan was chosen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.planner.candidate import Candidate
from meshwright.planner.explain import ROOMIER, SAFER, SIMPLER, STEADIER, limits, reason_against, reason_for
from meshwright.planner.reasons import on_layers, reasons
from meshwright.planner.search import search
from meshwright.planner.what_if import what_if
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Offload, Plan, Predicted, SchedulePlan
from meshwright.spec.run import RunSpec


def ask(*words: str) -> RunSpec:
    base = "model=llama3-1b cluster.gpu=H200 cluster.gpus_per_node=4 train.seq_len=2048 train.global_batch=16"
    return load_run(None, [*base.split(), *words])


def candidate_of(
    seconds: float,
    *,
    micro_batch: int = 1,
    layers: tuple[LayerStrategy, ...] = (LayerStrategy(reshard=False),),
    **mesh: int,
) -> Candidate:
    axes = tuple(MeshAxis(axis=axis, size=size) for axis, size in {"shard": 4, **mesh}.items())  # type: ignore[arg-type]
    batch = BatchPlan(global_batch=16, micro_batch=micro_batch, accumulate=4 // micro_batch)
    return Candidate(
        Plan(mesh=axes, batch=batch, layers=layers, predicted=Predicted(memory_peak_bytes=10**9, step_seconds=seconds))
    )


def test_the_best_plan_with_another_value_is_named_with_its_seconds() -> None:
    best = candidate_of(1.0, pipeline=2)
    sentences = reasons(
        best, [candidate_of(1.44, pipeline=4), candidate_of(1.5, pipeline=4), candidate_of(1.79)], ask()
    )
    assert sentences[0] == "pipeline 2: the best plan found with 4 takes 0.44 s longer, without 0.79 s longer"
    assert (
        reasons(candidate_of(1.0), [candidate_of(1.05, pipeline=2)], ask())[0]
        == "no pipeline: the best plan found with 2 takes 50.0 ms longer"
    )


def test_every_mode_of_recompute_is_named_with_its_layers() -> None:
    layers = (
        LayerStrategy(range="0-3", recompute="all_but_attention", reshard=False),
        LayerStrategy(range="4-9", recompute="selective", reshard=False),
        LayerStrategy(range="10-15", reshard=False),
    )
    sentences = reasons(candidate_of(1.0, layers=layers), [], ask())
    assert any(
        sentence.startswith("recompute selective on layers 4-9 and all_but_attention on layers 0-3: ")
        for sentence in sentences
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.expert=4", "plan.replicate=2"], "plan.expert the 2 ranks that the shard and context axes have"),
        (["plan.expert=2", "plan.tensor=2", "plan.replicate=2"], "plan.expert the 1 ranks"),
        (
            ["plan.expert=2", "plan.tensor=2", "model.experts=6"],
            "plan.expert: expected a divisor of model.experts = 6 ÷ plan.tensor 2, got 2",
        ),
    ],
)
def test_experts_that_cannot_be_spread_are_what_is_told(words: list[str], message: str) -> None:
    moe = ["model.experts=8", "model.experts_per_token=2", "model.expert_hidden=64"]
    with pytest.raises(BadInput, match=message):
        search(ask(*moe, *words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "zbv plan.stages=[[0-7],[8-15]]",
            "exactly 2 stages per rank, got 1; nearest: 2; plan.stages lists the stages of each rank",
        ),
    ],
)
def test_a_schedule_that_cannot_be_made_says_which_number_is_wrong(words: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        search(ask(*f"plan.schedule={words}".split()))


def test_what_a_prediction_cannot_tell_apart_is_said_to_be_so() -> None:
    best = candidate_of(1.0)
    others = [candidate_of(0.993, micro_batch=2), candidate_of(1.001, micro_batch=4), candidate_of(1.2, micro_batch=8)]
    assert reasons(best, others, ask()) == (
        "micro-batch 1: the best plan found with 8 takes 0.20 s longer; with 2 cannot be told apart (within 1%): the simpler plan is "
        "taken; with 4 cannot be told apart (within 1%): both are as simple, and the shorter step is taken",
    )
    quick = replace(candidate_of(0.9, micro_batch=2), simulated=False)
    (only,) = reasons(best, [quick], ask())
    assert only.endswith("with 2 cannot be told apart by the quick estimate: the simpler plan is taken")


def test_a_reason_has_the_number_of_the_runner_up() -> None:
    """A simulated plan is among the runner-ups; an estimate that is a little less must not be told instead. A much lower one counts."""
    best, simulated = (
        replace(candidate_of(1.0), estimated=1.0),
        replace(candidate_of(1.04, micro_batch=2), estimated=1.05),
    )
    for estimated, told in ((1.033, "40.0 ms"), (1.02, "20.0 ms")):
        quick = replace(candidate_of(9.0, micro_batch=2, tensor=2), simulated=False, estimated=estimated)
        sentences = reasons(best, [simulated, quick], ask())
        assert f"micro-batch 1: the best plan found with 2 takes {told} longer" in sentences


@pytest.mark.parametrize("seconds", [0.5, 0.9, 0.98, 0.995, 1.0, 1.005, 1.02, 1.5])
@pytest.mark.parametrize("offload", ["none", "activations"])
@pytest.mark.parametrize("simulated", [True, False])
def test_no_reason_contradicts_the_choice(seconds: float, offload: Offload, simulated: bool) -> None:
    """Neither a reason nor the line of a runner-up claims that another plan is faster."""
    best = candidate_of(1.0)
    other = candidate_of(seconds, micro_batch=2, layers=(LayerStrategy(offload=offload, reshard=False),))
    other = replace(other, simulated=simulated)
    for sentence in (*reasons(best, [other], ask()), reason_against(ask(), best, other)):
        assert not re.search(r"less|faster|-\d", sentence), sentence
        assert ("longer" in sentence or "+" in sentence) is (seconds > 1.01), sentence


def test_what_is_compared_by_guessed_rates_has_no_seconds() -> None:
    run = load_run(None, ["model=llama3-1b", "cluster.gpu=X1", "cluster.memory_gib=40", "train.global_batch=16"])
    first, second, *_ = reasons(candidate_of(1.0), [candidate_of(1.4, micro_batch=2)], run)
    assert "guessed rates of X1" in first and second == "micro-batch 1: the best plan found with 2 takes 40% longer"


def test_gradients_are_told_in_words() -> None:
    whole = candidate_of(1.0, layers=(LayerStrategy(gradients="whole", reshard=False),))
    shard = candidate_of(1.2, layers=(LayerStrategy(gradients="shard", reshard=False),))
    assert reasons(whole, [shard], ask()) == (
        "gradients kept whole between micro-batches: the best plan found with them reduced after every micro-batch takes 0.20 s longer",
    )


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        (["all"], "all layers"),
        (["0-63", "64-125"], "all layers"),
        (["7"], "layer 7"),
        (["0-3", "8-9"], "layers 0-3 and 8-9"),
        (["0-61", "63", "65-97"], "96 of 126 layers"),
    ],
)
def test_long_lists_of_layers_are_counted(ranges: list[str], words: str) -> None:
    assert on_layers([LayerStrategy(range=text) for text in ranges], 126) == words


def test_memory_is_only_blamed_where_it_is_short() -> None:
    layers = (LayerStrategy(range="0-3", recompute="full", reshard=True), LayerStrategy(range="4-15", reshard=False))
    plan = candidate_of(1.0, layers=layers)
    tight = reasons(plan, [], ask(), lambda plan: False)
    assert tight == (
        "recompute full on layers 0-3: without it micro-batches of 1 sequence do not fit into memory",
        "weights freed after the forward and gathered again for the backward on layers 0-3: if they stayed gathered, micro-batches of 1 "
        "sequence would not fit into memory",
    )
    roomy = reasons(plan, [], ask(), lambda plan: True)
    assert all("is no faster" in text for text in roomy) and len(roomy) == 2


def test_small_micro_batches_and_further_gathers_that_memory_asks_for_are_limits() -> None:
    run = ask(
        "cluster.memory_gib=14",
        "train.seq_len=8192",
        "cluster.emulate_nodes=2",
        "plan.schedule=1f1b",
        "plan.pipeline=1",
        "plan.offload=optimizer",  # activations stay on the device, so that memory limits them
    )
    plan = search(run, trainable=True).best.plan
    memory_limits = [limit for limit in limits(run, plan) if limit.name == "memory"]
    assert memory_limits and all(
        limit.seconds > 0 and " more than the usable " in limit.text for limit in memory_limits
    )
    assert not [
        limit
        for limit in limits(replace(run, cluster=replace(run.cluster, memory_gib=140)), plan)
        if limit.name == "memory"
    ]


def test_a_batch_that_is_used_up_is_said_to_be() -> None:
    run = ask("train.global_batch=4", "plan.shard=4")
    plan = search(run, trainable=True).best.plan
    (more,) = (change for change in what_if(run, plan) if "more node" in change.name)
    assert more.note == "the batch has no sequences for further ranks" and more.gain == pytest.approx(0)


def test_a_more_complex_plan_names_what_decided_for_it() -> None:
    best = candidate_of(1.0, pipeline=2).plan
    simple = candidate_of(1.0).plan
    across = replace(simple, mesh=(MeshAxis(axis="shard", size=4, crosses="node"),))
    full = replace(
        simple,
        schedule=SchedulePlan(name="interleaved", stages=(("0-3", "8-11"), ("4-7", "12-15"))),
        predicted=Predicted(memory_peak_bytes=2 * 10**9, step_seconds=1.0),
    )
    assert reason_for(simple, best) == SIMPLER
    assert reason_for(best, across) == STEADIER
    assert reason_for(best, full) == ROOMIER
    assert reason_for(best, replace(full, mesh=across.mesh)) == SAFER


def test_missing_host_memory_is_told_in_lines_of_one_fact_each() -> None:
    words = (
        "model=llama3-70b cluster.gpu=H100 cluster.gpus_per_node=2 cluster.host_memory_gib=256 train.global_batch=64"
    )
    with pytest.raises(OutOfResources) as caught:
        search(load_run(None, words.split()))
    first, *lines = str(caught.value).splitlines()
    needed, missing, usable = map(float, re.findall(r"([\d.]+) GB", first))
    assert needed - missing == pytest.approx(usable, abs=0.11) and usable == pytest.approx(
        0.8 * 256 * 2**30 / 1e9, abs=0.1
    )
    assert lines[0] == "  usable is 80% of cluster.host_memory_gib" and max(map(len, (first, *lines))) < 160
