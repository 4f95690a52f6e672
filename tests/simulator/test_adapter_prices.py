"""Runs with adapters are priced as they ran on an H200, with and without adapters on most layers (2026-11-29-lora-2xH200.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.config.load import load_run
from meshwright.costs.plan_costs import plan_time
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search
from meshwright.simulator.step_simulation import timing_of

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-29-lora-2xH200.json"
QUESTION = (
    "model=llama3-8b model.adapter.rank=16 model.adapter.alpha=32 cluster.gpu=H200 cluster.gpus_per_node=1 train.seq_len=4096 "
    "train.global_batch=2 plan.micro_batch=2 plan.recompute=none plan.offload=none plan.reshard=false"
)
SIDES = {"ours": (), "base": ("model.adapter.targets=[k_proj]",)}


@pytest.mark.parametrize("side", SIDES)
def test_steps_with_adapters_take_what_they_took(side: str) -> None:
    run = load_run(None, [*QUESTION.split(), *SIDES[side]])
    plan = search(run).best.plan
    predicted = reprice(run, plan).predicted
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    took = next(row["step_seconds"] for row in rows if row["side"] == side)
    assert predicted is not None and predicted.step_seconds == pytest.approx(took, rel=0.01)
    by_formula = plan_time(run.model, run.train, plan, run.cluster)
    assert by_formula is not None and by_formula.seconds == pytest.approx(predicted.step_seconds, rel=0.01)


def test_one_rank_does_not_cast_frozen_weights() -> None:
    run, full = (
        load_run(None, QUESTION.split()),
        load_run(None, [word for word in QUESTION.split() if "adapter" not in word]),
    )
    plan = search(run).best.plan
    copies, casts = (sum(map(sum, timing_of(of.model, of.train, plan, of.cluster).copy_out)) for of in (run, full))
    assert 0 < copies < casts / 50
