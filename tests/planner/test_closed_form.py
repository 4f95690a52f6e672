"""Costs that points of a space share equal those of each point alone, under every layer setting."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from meshwright.config.load import load_run
from meshwright.costs.layer_costs import layer_costs
from meshwright.costs.plan_costs import plan_time
from meshwright.planner.closed_form import SpaceCosts, closed_form_cost, layouts, peak_rank_bytes
from meshwright.planner.finalists import plan_at
from meshwright.planner.reprice import reprice
from meshwright.planner.space import points
from meshwright.planner.strategies import PLAIN
from meshwright.planner.sweep import BOUND_SAFETY
from meshwright.simulator.step_simulation import require_cost_inputs
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, ScheduleName, SchedulePlan

SEQUENCES = "train.seq_len=4096 train.global_batch=64"
RUNS = (
    f"model=deepseek-v2-lite cluster.gpu=H800 cluster.nodes=2 {SEQUENCES}",
    f"model=llama3-8b cluster.gpu=H200 cluster.nodes=2 cluster.gpus_per_node=2 cluster.network.fabric=tcp {SEQUENCES}",
    f"model=qwen3-30b-a3b cluster.gpu=A100 cluster.nodes=2 plan.offload=none plan.reshard=true {SEQUENCES}",
)


@pytest.mark.parametrize("question", RUNS)
def test_costs_shared_by_points_are_those_of_each_point(question: str) -> None:
    run = load_run(None, question.split())
    space = points(run)
    pricing = require_cost_inputs(run.model, run.train, plan_at(run, space, 0, PLAIN, None), run.cluster)
    costs, dice = SpaceCosts(run, pricing, space), np.random.default_rng(0)
    chosen = dice.choice(len(space), 100, replace=False)
    shared, grid = costs.inside_layers(chosen), costs.grid
    base = layouts(run, space.take(chosen), grid.options[0])
    by_option = grid.flat(closed_form_cost(pricing, grid.layouts(base), shared).seconds, len(chosen))
    sizes = grid.flat(peak_rank_bytes(run, grid.layouts(base)), len(chosen))
    assert (costs.lower_bounds[chosen] * BOUND_SAFETY <= by_option.min(axis=0)).all()
    for position in dice.choice(len(grid.options), 4, replace=False):
        layout = layouts(run, space.take(chosen), grid.options[position])
        alone = layer_costs(pricing.shape, pricing.machine, layout, pricing.constants)
        for name, field in ((part, field) for part in ("times", "exposure") for field in fields(getattr(alone, part))):
            values = grid.flat(getattr(getattr(shared, name), field.name), len(chosen))[position]
            np.testing.assert_allclose(values, getattr(getattr(alone, name), field.name), rtol=1e-12)
        np.testing.assert_allclose(by_option[position], closed_form_cost(pricing, layout).seconds, rtol=1e-12)
        np.testing.assert_allclose(sizes[position], peak_rank_bytes(run, layout), rtol=1e-12)
    least = sizes[[option.reshard == max(grid.reshards) for option in grid.options]].min(axis=0)
    for count in (60, 100):  # in the second call some are known
        np.testing.assert_allclose(costs.min_bytes(chosen[:count]), least[:count], rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "micro_batches"), [("interleaved", 8), ("breadth_first", 8), ("breadth_first", 16)]
)
def test_virtual_stages_wait_for_micro_batches_that_pass_slow_ports(schedule: ScheduleName, micro_batches: int) -> None:
    """Without that the formulas say two thirds of the simulated time."""
    words = f"model=llama3-8b cluster.gpu=H100 cluster.nodes=8 cluster.gpus_per_node=4 train.global_batch={4 * micro_batches}"
    run = load_run(None, [*words.split(), "train.seq_len=4096", "cluster.network.port_gb_per_s=4"])
    plan = Plan(
        mesh=(MeshAxis(axis="pipeline", size=8, crosses="node"), MeshAxis(axis="shard", size=4)),
        batch=BatchPlan(global_batch=4 * micro_batches, micro_batch=1, accumulate=micro_batches),
        schedule=SchedulePlan(name=schedule, stages=tuple(tuple(map(str, range(rank, 32, 8))) for rank in range(8))),
        layers=(LayerStrategy(reshard=False, gradients="whole"),),
    )
    formula, simulated = (
        plan_time(run.model, run.train, plan, run.cluster),
        reprice(run, plan, by_units=False).predicted,
    )
    assert formula is not None and simulated is not None
    assert formula.seconds == pytest.approx(simulated.step_seconds, rel=0.2)
