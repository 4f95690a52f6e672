"""Adapters beside frozen weights on every axis equal one device: loss, gradient norm, gradients and weights of the adapters.

The oracle is that of test_equality: a plain decoder with the same adapters and torch's own AdamW. A starts random and B from zero, so the
second step is the first with gradients of A.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.families.adapters import adapter_of
from meshwright.spec.model import ModelSpec
from tests.distributed.pool import Pool
from tests.distributed.test_equality import GPT, LLAMA, compare, one_device, sharded
from tests.distributed.test_schedules import STEPS, Case, named

DENSE = adapter_of(replace(LLAMA, layers=4), rank=3, alpha=6.0)
SOME = adapter_of(LLAMA, rank=4, alpha=16.0, targets=("q_proj", "v_proj", "down_proj"), kind="rslora")
"""Not every part of a fused layer has an adapter."""
FUSED = adapter_of(replace(GPT, heads=4, kv_heads=4), rank=2, alpha=2.0)
"""One adapter for queries, keys and values, biases, and a tied head."""
ROWS = adapter_of(LLAMA, rank=3, kind="dora")
CASES = [
    (SOME, Case("1f1b", micro=4)),
    (DENSE, Case("1f1b", shard=2, micro=2, recompute="selective")),
    (SOME, Case("1f1b", tensor=2, shard=2, micro=2)),
    (DENSE, Case("zbv", pipeline=2, micro=4)),
    (ROWS, Case("1f1b", shard=2, micro=2)),
]
WIDER = [
    (FUSED, Case("1f1b", tensor=2, pipeline=2, micro=4)),
    (FUSED, Case("breadth_first", shard=2, replicate=2, recompute="full")),
    (DENSE, Case("1f1b", tensor=4, micro=4, recompute="full")),
    (DENSE, Case("1f1b", shard=4, micro=2, gradients="whole", reshard=False)),
    (DENSE, Case("zb_h1", pipeline=2, shard=2)),
    (DENSE, Case("1f1b", ring=2, micro=4)),
    (SOME, Case("1f1b", ulysses=2, shard=2, micro=2, recompute="all_but_attention")),
    (DENSE, Case("1f1b", micro=4, offload="optimizer")),
    (DENSE, Case("1f1b", shard=2, micro=4, offload="activations")),
    (DENSE, Case("1f1b", shard=2, micro=4, compile=True, recompute="selective")),
    (FUSED, Case("1f1b", tensor=2, micro=4, compile=True)),
    (ROWS, Case("1f1b", micro=4, compile=True)),
]


@pytest.mark.parametrize(
    ("spec", "case"), [*CASES, *(pytest.param(*row, marks=pytest.mark.slow) for row in WIDER)], ids=named
)
def test_float64_equals_one_device(pool: Pool, spec: ModelSpec, case: Case) -> None:
    results = pool.run(sharded, case.plan.ranks, spec, case.plan, 1.0, STEPS)
    compare(results, one_device(spec)[:STEPS], 1e-9)
