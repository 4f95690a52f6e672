"""What the planner makes of a pinned pipeline, layered accumulation, and axes it cannot train."""

from __future__ import annotations

import time

import pytest

from meshwright.planner.candidate import untrainable
from meshwright.planner.clock import estimated_seconds, simulated_seconds
from meshwright.planner.data_parallel import choose
from meshwright.schedules.of_plan import training_schedule
from meshwright.simulator.of_plan import simulate_plan
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import stage_table
from meshwright.spec.plan import PlanPins
from meshwright.spec.presets import MODEL_PRESETS
from meshwright.spec.run import ModelSection, RunSpec

NODE = ClusterSpec(gpu="H200", gpus_per_node=8)
TWO_TCP = ClusterSpec(gpu="H200", gpus_per_node=8, emulate_nodes=2)


def run(cluster: ClusterSpec = NODE, *, preset: str = "llama3-8b", batch: int = 64, seq: int = 4096, **pins) -> RunSpec:
    model = from_plain(ModelSection, {**MODEL_PRESETS[preset], "preset": preset})
    train = TrainSpec(steps=1, global_batch=batch, seq_len=seq)
    return RunSpec(name="x", model=model, train=train, cluster=cluster, plan=PlanPins(**pins))


@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_a_pipeline_alone_gets_a_schedule_that_can_run_and_is_the_fastest_simulated(pipeline: int) -> None:
    asked = run(pipeline=pipeline)
    plan, candidates = choose(asked)
    assert plan.axis_size("pipeline") == pipeline and plan.ranks == 8
    training_schedule(plan, asked.model.layers)
    table = stage_table(plan.schedule, pipeline, asked.model.layers)
    assert sorted(layer for row in table for stage in row for layer in stage) == list(range(32))
    played = [c.seconds for c in candidates if c.simulated]
    assert candidates[0].seconds == min(played) and len(played) == 4
    by_hand = simulate_plan(asked.model, asked.train, plan, asked.cluster).step_seconds
    assert candidates[0].seconds == pytest.approx(by_hand, rel=0.01)
    plain = choose(run(pipeline=pipeline, schedule="gpipe"))[1][0]
    assert plain.seconds is not None and candidates[0].seconds < plain.seconds
    assert any(reason.startswith(f"schedule {plan.schedule.name}: ") for reason in plan.why)


def test_ranking_a_pipeline_takes_about_a_second() -> None:
    """Generous, as machines differ: it guards against playing every candidate in full, which takes minutes."""
    begun = time.perf_counter()
    _, candidates = choose(run(TWO_TCP, preset="gpt3-13b", batch=1536, seq=256, pipeline=2))
    assert time.perf_counter() - begun < 15
    assert len(candidates) < 100


def test_many_micro_batches_are_played_as_a_straight_line() -> None:
    plan = choose(run(pipeline=2, schedule="1f1b", micro_batch=1, batch=256))[0]
    asked = run(batch=256)
    whole = simulate_plan(asked.model, asked.train, plan, asked.cluster).step_seconds
    assert plan.batch.accumulate == 64
    assert simulated_seconds(asked, plan) == pytest.approx(whole, rel=0.002)
    assert estimated_seconds(asked, plan) == pytest.approx(whole, rel=0.05)


def test_a_stage_lies_inside_a_node_where_it_can() -> None:
    plan = choose(run(TWO_TCP, pipeline=2))[0]
    crosses = {axis.axis: axis.crosses for axis in plan.mesh}
    assert crosses == {"pipeline": "node", "shard": "device"}


def test_a_modular_pipeline_has_a_stage_for_every_layer() -> None:
    asked = run(pipeline=4, schedule="breadth_first", recompute="full")
    plan = choose(asked)[0]
    table = stage_table(plan.schedule, 4, asked.model.layers)
    assert {len(stage) for row in table for stage in row} == {1}
    coarse = run(
        pipeline=4, schedule="breadth_first", recompute="full", stages=(("0-7",), ("8-15",), ("16-23",), ("24-31",))
    )
    fine, slow = choose(asked)[1][0].seconds, choose(coarse)[1][0].seconds
    assert fine is not None and slow is not None and fine < 0.6 * slow


def test_layered_accumulation_is_ranked_by_time_too() -> None:
    plan, candidates = choose(run(TWO_TCP, schedule="breadth_first", shard=8, micro_batch=1, recompute="full"))
    assert plan.layered and candidates[0].simulated


def test_pinned_stages_leave_the_schedules_that_run_them() -> None:
    """Layers down the ranks and up again are a V's; only V schedules run them."""
    _, candidates = choose(run(pipeline=2, stages=(("0-7", "24-31"), ("8-15", "16-23"))))
    assert {c.plan.schedule.name for c in candidates} == {"zbv", "dualpipe_v"}


def test_a_schedule_without_enough_micro_batches_says_how_many_it_needs() -> None:
    with pytest.raises(
        BadInput, match="dualpipe_v needs at least 16 micro-batches on 8 pipeline ranks.*train.global_batch"
    ):
        choose(run(batch=8, pipeline=8, schedule="dualpipe_v"))


def test_what_does_not_fit_names_the_smallest() -> None:
    with pytest.raises(OutOfResources, match="smallest needs .* GB a rank"):
        choose(run(preset="llama3-405b", pipeline=8))


def test_on_unknown_chips_a_pipeline_takes_1f1b_and_today_s_order() -> None:
    plan, candidates = choose(run(ClusterSpec(gpu="cpu", gpus_per_node=4), preset="llama3-1b", batch=16, pipeline=2))
    assert plan.schedule.name == "1f1b"
    assert all(candidate.seconds is None for candidate in candidates)
    assert (plan.layers[0].reshard, plan.layers[0].recompute, plan.layers[0].gradients) == (False, "none", "shard")


def test_axes_that_cannot_be_trained_are_planned_and_marked() -> None:
    plan, _ = choose(run(tensor=2, context_ring=2))
    assert untrainable(plan) in plan.why and "context_ring 2, tensor 2" in (untrainable(plan) or "")
    assert untrainable(choose(run(pipeline=2))[0]) is None
