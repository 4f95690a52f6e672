"""Gradients of several micro-batches: which are added up by the products that make them, and in which format."""

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

TIMES, PRODUCTS = 3, 4
"""Micro-batches, and products with a weight in a block: query-key-value, output, gate-up, down."""


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
    """How often gradients were added up in one step, by way; and the formats that whole sums of blocks' products were seen in."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.parallel import fsdp
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    ways: Counter[str] = Counter()
    kinds: set[torch.dtype] = set()

    def told(name: str, function: Any) -> Any:
        def counting(total: Any, *parts: Any) -> Any:
            ways[name] += total.ndim == 2  # neither norms nor biases
            kinds.update({total.dtype} if isinstance(total, torch.Tensor) else ())
            return function(total, *parts)

        return counting

    engine = build_engine(DEEP, plan, build_mesh(plan, world), loss_chunk=5, seed=0)
    tokens = torch.arange(SEQ).remainder(DEEP.vocab_size)[None]
    batches = [MicroBatch(tokens, tokens, None, None, tokens.numel())] * plan.batch.accumulate
    with (
        mock.patch.object(fsdp, "add_product", told("product", fsdp.add_product)),
        mock.patch.object(fsdp, "add", told("pass", fsdp.add)),
    ):
        engine.executor.play(engine.training, batches, NullRecorder(), torch.tensor(float(tokens.numel())))
    return ways, kinds


SUMMED = PRODUCTS * DEEP.layers * (TIMES - 1)
ENDS = 2 * (TIMES - 1)


@pytest.mark.parametrize(
    ("plan", "products", "passes"),
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
def test_products_add_up_what_they_make(pool: Pool, plan: Plan, products: int, passes: int) -> None:
    for ways, kinds in pool.run(added, plan.ranks, plan):
        assert ways == Counter({"product": products, "pass": passes}) - Counter()
        assert kinds <= {torch.float32}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_products_of_a_pipeline_add_up(pool: Pool, schedule: str) -> None:
    both = [ways for ways, _ in pool.run(added, 2, plan("pipeline", 2, schedule=schedule, gradients="whole"))]
    assert sum(both, Counter()) == Counter({"product": SUMMED, "pass": ENDS})
