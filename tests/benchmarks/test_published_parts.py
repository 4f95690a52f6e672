"""The table that leads from this program's prediction of DeepSeek-V3's layout to the published seconds."""

from __future__ import annotations

from typing import get_args

import pytest
from published_parts import BLOCK_SCALES, FEATURES, steps_to_published

from meshwright.config.load import load_run
from meshwright.planner.schedule_choice import with_stages
from meshwright.simulator.step_simulation import simulate_plan
from meshwright.spec.plan import BatchPlan, ExpertPlan, LayerStrategy, Linear, MeshAxis, Plan

PUBLISHED_SECONDS = 180_000 * 3600 / 2048 * 15360 * 4096 / 1e12
QUESTION = "model=deepseek-v3 cluster.gpu=H800 cluster.nodes=256 train.seq_len=4096 train.global_batch=15360"


@pytest.mark.slow
def test_the_features_together_explain_the_published_step_within_a_tenth() -> None:
    run = load_run(None, QUESTION.split())
    mesh = (MeshAxis(axis="pipeline", size=16, crosses="node"), MeshAxis(axis="shard", size=128, crosses="node"))
    plan = Plan(
        mesh=mesh,
        batch=BatchPlan(global_batch=15360, micro_batch=1, accumulate=120),
        compile=True,
        schedule=with_stages(run, "zbv", 16, 2, mesh),
        experts=ExpertPlan(expert=64, expert_shard=2),
        layers=(LayerStrategy(reshard=False, gradients="whole", recompute="full"),),
    )
    lines = [
        (description, breakdown.compute + sum(breakdown.exposed.values()) + breakdown.bubble + breakdown.host)
        for description, breakdown in steps_to_published(run, plan)
    ]
    seconds = [total for _, total in lines]
    assert len(lines) == 1 + len(FEATURES)
    assert seconds[0] == pytest.approx(
        simulate_plan(run.model, run.train, plan, run.cluster).step_seconds, rel=0.005
    ), "the first line is this program's own prediction"
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(PUBLISHED_SECONDS, rel=0.1)


def test_no_search_offers_the_assumed_features() -> None:
    assert BLOCK_SCALES not in get_args(Linear)
