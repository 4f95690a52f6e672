"""The bytes that two ranks, each on its own emulated node, send one another in a step equal the prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from meshwright.data.loader import MicroBatch
from meshwright.events.span import NullRecorder
from meshwright.parallel.apply import build_engine
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.world import World
from meshwright.schedules.collective_counts import collective_counts
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import AxisName, BatchPlan, MeshAxis, Plan, Precision, ScheduleName, SchedulePlan
from meshwright.workload.cross_node_bytes import cross_node_bytes
from tests.distributed.pool import Pool
from tests.network import OwnSockets

SEQ, MICRO, ACCUMULATE = 128, 4, 4
MODEL = ModelSpec(
    family="llama",
    layers=4,
    hidden=128,
    heads=4,
    kv_heads=4,
    head_dim=32,
    ffn_hidden=256,
    vocab_size=512,
    max_seq_len=SEQ,
    tied=True,
)
PREDICTING = replace(MODEL, tied=False, prediction_depth=2)


def counted_and_predicted(
    world: World, tested_plan: Plan, model: ModelSpec = MODEL, seq: int = SEQ
) -> tuple[int | None, float]:
    """Bytes through this rank's sockets in a step, None if the kernel does not count them, and those that are predicted."""
    mesh = build_mesh(tested_plan, replace(world, node_ranks=1))
    engine = build_engine(model, tested_plan, mesh, loss_chunk=256, seed=1)
    tokens = torch.arange(MICRO * seq).view(MICRO, seq) % model.vocab_size
    batches = [MicroBatch(tokens, tokens, None, None, tokens.numel())] * ACCUMULATE
    valid = torch.tensor(1000.0, dtype=torch.float64)
    dist.barrier()
    counting = OwnSockets.start()
    engine.executor.play(engine.training, batches, NullRecorder(), valid)
    dist.barrier()
    predicted_bytes = cross_node_bytes(model, tested_plan, mesh.layout, seq, collective_counts(engine.training))
    # Gloo's reduce-scatter sends twice the bytes of NCCL's ring, for which the prediction is made.
    return (None if counting is None else counting.bytes()), predicted_bytes.total + predicted_bytes.reduce


@pytest.mark.parametrize(
    ("axis", "schedule", "compute", "model"),
    [
        ("replicate", "1f1b", "fp32", MODEL),
        ("pipeline", "1f1b", "fp32", MODEL),
        ("pipeline", "zbv", "fp32", MODEL),
        ("shard", "1f1b", "bf16", MODEL),
        pytest.param("pipeline", "1f1b", "fp32", PREDICTING, marks=pytest.mark.slow),
        pytest.param("shard", "1f1b", "fp32", PREDICTING, marks=pytest.mark.slow),
    ],
)
def test_bytes_on_the_wire_are_those_predicted(
    pool: Pool, axis: AxisName, schedule: ScheduleName, compute: Literal["bf16", "fp32"], model: ModelSpec
) -> None:
    data = 2 if axis in ("replicate", "shard") else 1
    tested_plan = Plan(
        mesh=(MeshAxis(axis=axis, size=2, crosses="node"),),
        batch=BatchPlan(global_batch=MICRO * ACCUMULATE * data, micro_batch=MICRO, accumulate=ACCUMULATE),
        schedule=SchedulePlan(name=schedule),
        precision=Precision(compute=compute),
        compile=False,
    )
    # Data-parallel ranks send gradients and weights, whose bytes do not depend on the tokens.
    seq = SEQ if axis == "pipeline" else 8
    for counted, predicted in pool.run(counted_and_predicted, 2, tested_plan, model, seq):
        if counted is None:
            pytest.skip("the kernel does not count the bytes of a socket")
        assert predicted <= counted <= 1.1 * predicted
