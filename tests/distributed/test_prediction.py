"""Modules that predict further tokens equal one device under every plan: loss, gradients, updates, routers' biases.

`tests/models/test_prediction.py` compares the one device with transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, ScheduleName, SchedulePlan
from tests.distributed.drawn import SEQ, draw_case
from tests.distributed.pool import Pool
from tests.distributed.test_deepseek import EXPERTS_OVER_2, FLOAT64, TENSOR_2, V3, compare, one_device, sharded
from tests.distributed.test_equality import BATCH, GPT, LLAMA
from tests.slow import quick_first

MODELS = [
    replace(V3, prediction_depth=1),
    replace(LLAMA, layers=5, max_seq_len=SEQ, prediction_depth=2),
    # Without biases: the gradient of a key bias is 0 but for rounding.
    replace(GPT, layers=8, hidden=16, heads=4, kv_heads=4, max_seq_len=SEQ, bias=False, prediction_depth=1),
    replace(V3, layers=8, tied=True, prediction_depth=2),
]


def staged(schedule: ScheduleName, layer: LayerStrategy = LayerStrategy()) -> Plan:
    """Two pipeline stages and two shards, with several micro-batches."""
    return Plan(
        mesh=(MeshAxis(axis="pipeline", size=2), MeshAxis(axis="shard", size=2)),
        batch=BatchPlan(global_batch=BATCH, micro_batch=1, accumulate=4),
        schedule=SchedulePlan(name=schedule),
        layers=(layer,),
        precision=FLOAT64,
        compile=False,
    )


@pytest.mark.parametrize(
    ("spec", "plan"),
    quick_first(
        1,
        [
            (MODELS[0], staged("zbv", LayerStrategy(recompute="full"))),  # both ends on one rank, split backward
            (MODELS[3], staged("1f1b", LayerStrategy(recompute="selective", gradients="whole"))),
            (MODELS[1], staged("1f1b", LayerStrategy(reshard=True))),
        ],
        unpack=True,
    ),
)
def test_stages_equal_one_device(pool: Pool, spec: ModelSpec, plan: Plan) -> None:
    compare(pool.run(sharded, plan.ranks, spec, plan, True), one_device(spec, True), 1e-9)


@pytest.mark.parametrize("seed", quick_first(0, range(40, 64)))
def test_random_plans_equal_one_device(pool: Pool, seed: int) -> None:
    spec, plan, masked = draw_case(seed, FLOAT64, of=MODELS[seed % 4])
    compare(pool.run(sharded, plan.ranks, spec, plan, masked), one_device(spec, masked), 1e-9)


@pytest.mark.slow
def test_a_checkpoint_of_any_plan_continues_under_another(pool: Pool, tmp_path: Path) -> None:
    truth, plans = one_device(MODELS[0], True), (staged("1f1b"), EXPERTS_OVER_2, TENSOR_2)
    for step, plan in enumerate(plans[:2]):
        results = pool.run(sharded, plan.ranks, MODELS[0], plan, True, range(step, step + 1), str(tmp_path))
        compare(results, truth[step : step + 1], 1e-9)
