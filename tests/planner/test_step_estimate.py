"""A step simulated by whole stages takes as long as by units where gathers and sums decide."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.config.load import load_run
from meshwright.planner.finalists import plan_at
from meshwright.planner.space import points
from meshwright.planner.step_estimate import simulated_by_stages, simulated_by_units
from meshwright.planner.strategies import Strategy, StrategyEnd

LAYERED = (
    "model=llama3-3b cluster.gpu=MI325X cluster.nodes=2 cluster.gpus_per_node=8 train.seq_len=4096 train.global_batch=16 "
    "cluster.network.port_gb_per_s=5 plan.order=[shard,pipeline] plan.shard=4 plan.pipeline=4 plan.tensor=1 plan.context_ring=1 "
    "plan.context_ulysses=1 plan.micro_batch=1 plan.schedule=breadth_first plan.reshard="
)
SPLIT = (
    "model=qwen3-30b-a3b cluster.gpu=H20 cluster.nodes=64 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=128 "
    "plan.order=[replicate,shard,tensor] plan.replicate=16 plan.shard=8 plan.tensor=4 plan.expert=8 plan.pipeline=1 "
    "plan.micro_batch=1 plan.schedule=zbv plan.reshard=false"
)


@pytest.mark.parametrize("words", [f"{LAYERED}false", f"{LAYERED}true", SPLIT])
def test_stages_take_as_long_as_units(words: str) -> None:
    """Once 6 and 10% more for a layered pipeline on slow ports, and 17% less for sums over replicas after split backwards."""
    run = load_run(None, words.split())
    end = StrategyEnd(words.endswith("true"), "none")
    plan = plan_at(run, points(run).take(np.array([0])), 0, Strategy(end, end), None)
    by_stages, by_units = (sum(simulate(run, plan).values()) for simulate in (simulated_by_stages, simulated_by_units))
    assert by_stages == pytest.approx(by_units, rel=0.02)
