"""Sums of gradients over micro-batches: how many are added inside the matmuls, and in which dtype."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.parallel.world import World
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Precision, SchedulePlan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import SEQ
from tests.distributed.test_schedules import DEEP

TIMES, MATMULS = 3, 4
"""Number of micro-batches, and of weight matmuls in a block: query-key-value, output, gate-up, down."""


def plan(axis: Any, size: int, times: int = TIMES, schedule: str = "1f1b", **strategy: Any) -> Plan:
    return Plan(
        mesh=(MeshAxis(axis=axis, size=size),),
        batch=BatchPlan(global_batch=times * (size if axis == "shard" else 1), micro_batch=1, accumulate=times),
        schedule=SchedulePlan(name=schedule),
        layers=(LayerStrategy(**strategy),),
        precision=Precision(compute="bf16"),
        compile=False,
    )


def added(world: World, plan: Plan) -> tuple[Counter[str], set[torch.dtype]]:
    """Run one step; returns the number of additions inside a matmul and in a separate pass, and the dtypes of the sums."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.parallel import sharded_unit
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    calls_by_kernel: Counter[str] = Counter()
    dtypes: set[torch.dtype] = set()

    def counting_calls(name: str, function: Any) -> Any:
        def counting(total: Any, *gradients: Any) -> Any:
            calls_by_kernel[name] += total.ndim == 2  # neither norms nor biases
            dtypes.update({total.dtype} if isinstance(total, torch.Tensor) else ())
            return function(total, *gradients)

        return counting

    engine = build_engine(DEEP, plan, build_mesh(plan, world), loss_chunk=5, seed=0)
    tokens = torch.arange(SEQ).remainder(DEEP.vocab_size)[None]
    batches = [MicroBatch(tokens, tokens, None, None, tokens.numel())] * plan.batch.accumulate
    with (
        mock.patch.object(sharded_unit, "add_matmul", counting_calls("product", sharded_unit.add_matmul)),
        mock.patch.object(sharded_unit, "add", counting_calls("pass", sharded_unit.add)),
    ):
        engine.executor.play(engine.training, batches, NullRecorder(), torch.tensor(float(tokens.numel())))
    return calls_by_kernel, dtypes


SUMMED = MATMULS * DEEP.layers * (TIMES - 1)
ENDS = 2 * (TIMES - 1)


@pytest.mark.parametrize(
    ("plan", "matmuls", "separate_passes"),
    [
        (plan("shard", 2, gradients="whole"), SUMMED, ENDS),
        (plan("shard", 2, gradients="whole", recompute="full"), SUMMED, ENDS),
        (plan("shard", 2, schedule="breadth_first"), SUMMED, ENDS),
        (plan("shard", 1), SUMMED, ENDS),
        (plan("shard", 2), 0, 0),
        (plan("shard", 1, times=1), 0, 0),
    ],
    ids=["whole", "whole, recomputed", "layered", "one rank", "reduced each time", "one micro-batch"],
)
def test_matrix_matmuls_accumulate_their_gradients(pool: Pool, plan: Plan, matmuls: int, separate_passes: int) -> None:
    for calls_by_kernel, dtypes in pool.run(added, plan.ranks, plan):
        assert calls_by_kernel == Counter({"product": matmuls, "pass": separate_passes}) - Counter()
        assert dtypes <= {torch.float32}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_matmuls_of_a_pipeline_add_up(pool: Pool, schedule: str) -> None:
    calls_by_rank = [
        calls_by_kernel
        for calls_by_kernel, _ in pool.run(added, 2, plan("pipeline", 2, schedule=schedule, gradients="whole"))
    ]
    assert sum(calls_by_rank, Counter()) == Counter({"product": SUMMED, "pass": ENDS})
