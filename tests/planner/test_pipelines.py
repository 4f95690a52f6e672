"""Plans with a pinned pipeline, with layered accumulation, and with settings that cannot be trained.

Layered accumulation (schedule `breadth_first`) runs all micro-batches through a layer before the next layer. The planner predicts a step
with the simulator in two ways: `simulated_by_units` simulates every gather and reduction, `simulated_by_stages` whole pipeline stages in
a tenth of the work. Both simulate few micro-batches and extrapolate linearly to the number of the plan.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.slow import quick_first

from meshwright.config.presets import MODEL_PRESETS
from meshwright.planner.candidate import untrainable
from meshwright.planner.search import search
from meshwright.planner.step_estimate import simulated_by_stages, simulated_by_units
from meshwright.schedules.plan_schedule import training_schedule
from meshwright.simulator.step_simulation import simulate_plan
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import stage_table
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import ModelSection, RunSpec

NODE = ClusterSpec(gpu="H200", gpus_per_node=8)
TWO_TCP = ClusterSpec(gpu="H200", gpus_per_node=8, emulate_nodes=2)


def run(cluster: ClusterSpec = NODE, *, preset: str = "llama3-8b", batch: int = 64, seq: int = 4096, **pins) -> RunSpec:
    model = from_plain(ModelSection, {**MODEL_PRESETS[preset], "preset": preset})
    train = TrainSpec(steps=1, global_batch=batch, seq_len=seq)
    return RunSpec(name="x", model=model, train=train, cluster=cluster, plan=PlanKeys(**pins))


@pytest.mark.parametrize("pipeline", quick_first(1, [4, 2, 8]))
def test_a_pipeline_alone_gets_a_schedule_that_can_run_and_is_the_fastest_simulated(pipeline: int) -> None:
    question = run(pipeline=pipeline)
    answer = search(question, trainable=True)
    plan = answer.best.plan
    assert plan.axis_size("pipeline") == pipeline and plan.ranks == 8
    training_schedule(plan, question.model.layers)
    table = stage_table(plan.schedule, pipeline, question.model.layers)
    assert sorted(layer for rank_stages in table for stage in rank_stages for layer in stage) == list(range(32))
    by_hand = simulate_plan(question.model, question.train, plan, question.cluster).step_seconds
    assert answer.best.seconds == pytest.approx(by_hand, rel=0.01)
    assert answer.best.seconds < 1.015 * min(candidate.seconds for candidate in answer.others if candidate.simulated)
    assert answer.best.seconds < search(run(pipeline=pipeline, schedule="gpipe"), trainable=True).best.seconds
    assert any(reason.startswith(f"schedule {plan.schedule.name}: ") for reason in plan.why)


def test_times_of_many_micro_batches_are_extrapolated_linearly() -> None:
    """The extrapolated step agrees with a simulation of all 64 micro-batches."""
    plan = search(run(pipeline=2, schedule="1f1b", micro_batch=1, batch=256), trainable=True).best.plan
    question = run(batch=256)
    whole = simulate_plan(question.model, question.train, plan, question.cluster).step_seconds
    assert plan.batch.accumulate == 64
    assert sum(simulated_by_units(question, plan).values()) == pytest.approx(whole, rel=0.002)
    assert sum(simulated_by_stages(question, plan).values()) == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(
    "question",
    quick_first(
        1,
        [
            run(
                ClusterSpec(gpu="A100", gpus_per_node=2), preset="qwen3-8b", seq=32768, batch=512, pipeline=2, tensor=1
            ),
            run(ClusterSpec(gpu="A100", nodes=16), preset="qwen3-0.6b", seq=32768, batch=512, pipeline=2, shard=8),
            run(
                ClusterSpec(gpu="H200", gpus_per_node=6), preset="llama3-3b", seq=32768, batch=512, pipeline=3, tensor=1
            ),
        ],
    ),
    ids=["qwen3-8b", "qwen3-0.6b", "llama3-3b"],
)
def test_a_rank_that_has_more_to_do_sets_the_pace_of_many_micro_batches(question: RunSpec) -> None:
    """The predicted step is not shorter than the compute of the busiest rank.

    Extrapolation alone predicted a shorter step, because the latency of all stages dominates the few micro-batches that are simulated.
    The sums of the extrapolation are exact to four digits.
    """
    pinned = replace(question, plan=replace(question.plan, schedule="interleaved", micro_batch=1))
    plan = search(pinned).best.plan
    simulated = simulate_plan(question.model, question.train, plan, question.cluster)
    assert max(simulated.compute_seconds) > 1.02 * min(simulated.compute_seconds)
    for parts, least in ((simulated_by_units(pinned, plan), 0.9995), (simulated_by_stages(pinned, plan), 0.995)):
        assert sum(parts.values()) > least * max(simulated.compute_seconds) and parts["idle"] > 0
    assert sum(simulated_by_units(pinned, plan).values()) == pytest.approx(simulated.step_seconds, rel=0.006)


def test_layered_accumulation_of_many_micro_batches_hides_no_more_communication_than_exists() -> None:
    """Extrapolation from few micro-batches, whose collectives are exposed, predicted a step shorter than the compute of many."""
    pinned = run(TWO_TCP, batch=512, pipeline=1, schedule="breadth_first", micro_batch=1, shard=8, recompute="full")
    plan = search(pinned).best.plan
    whole = simulate_plan(pinned.model, pinned.train, plan, pinned.cluster)
    for parts in (simulated_by_units(pinned, plan), simulated_by_stages(pinned, plan)):
        assert min(parts.values()) >= 0 and sum(parts.values()) == pytest.approx(whole.step_seconds, rel=0.02)


def test_a_stage_lies_inside_a_node_where_it_can() -> None:
    plan = search(run(TWO_TCP, pipeline=2), trainable=True).best.plan
    crosses = {axis.axis: axis.crosses for axis in plan.mesh}
    assert crosses.pop("pipeline") == "node" and set(crosses.values()) == {"device"}


@pytest.mark.slow
def test_a_breadth_first_pipeline_has_a_stage_for_every_layer() -> None:
    """With larger stages the next rank waits until all micro-batches have passed through a stage."""
    question = run(pipeline=4, schedule="breadth_first", recompute="full")
    plan = search(question, trainable=True).best.plan
    table = stage_table(plan.schedule, 4, question.model.layers)
    assert {len(stage) for rank_stages in table for stage in rank_stages} == {1}
    coarse = run(
        pipeline=4, schedule="breadth_first", recompute="full", stages=(("0-7",), ("8-15",), ("16-23",), ("24-31",))
    )
    assert search(question, trainable=True).best.seconds < 0.6 * search(coarse, trainable=True).best.seconds


def test_pinned_stages_leave_the_schedules_that_run_them() -> None:
    """Stages that go down the ranks and up again form a V, which only V schedules run."""
    answer = search(run(pipeline=2, stages=(("0-7", "24-31"), ("8-15", "16-23"))), trainable=True)
    assert {c.plan.schedule.name for c in (answer.best, *answer.others)} == {"zbv"}


@pytest.mark.slow
def test_what_cannot_be_trained_is_planned_and_marked() -> None:
    plan = search(run(pipeline=2, schedule="zbv", offload="both")).best.plan
    assert untrainable(plan) in plan.why and "offload both under zbv" in (untrainable(plan) or "")
    assert untrainable(search(run(pipeline=2, context_ring=2), trainable=True).best.plan) is None
