"""Training with activations in host memory equals one device, with all features, and their device memory is freed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.parallel.world import World
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import LayerStrategy, Plan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import GPT, LLAMA, compare, one_device, sharded
from tests.distributed.test_experts import MIXTRAL
from tests.distributed.test_fp8 import first_step, with_fp8
from tests.distributed.test_schedules import DEEP, DEEP_TIED, STEPS, UNEVEN, Case, named
from tests.slow import quick_first

CASES = [
    (DEEP, Case("1f1b", micro=2, offload="activations")),
    (DEEP_TIED, Case("1f1b", shard=2, recompute="full", reshard=False, gradients="whole", offload="activations")),
    (DEEP, Case("breadth_first", replicate=2, micro=2, offload="activations")),
    (DEEP_TIED, Case("gpipe", pipeline=2, micro=2, stages=UNEVEN, offload="activations")),
    (DEEP, Case("1f1b", pipeline=2, shard=2, offload="activations")),
    (DEEP, Case("interleaved", pipeline=2, recompute="full", micro=2, offload="activations")),
    (DEEP_TIED, Case("breadth_first", pipeline=2, micro=2, offload="activations")),
    (replace(LLAMA, layers=4), Case("1f1b", tensor=2, micro=2, offload="activations")),
    (MIXTRAL, Case("1f1b", shard=2, micro=2, offload="activations")),
]
COMPILED = [
    (DEEP_TIED, Case("1f1b", micro=4, compile=True, recompute="selective", offload="activations")),
    (DEEP, Case("1f1b", shard=2, micro=2, compile=True, recompute="all_but_attention", offload="activations")),
]
MIXED = (
    LayerStrategy(range="0-3", offload="activations", recompute="full"),
    LayerStrategy(range="4", reshard=False),
    LayerStrategy(range="5-7", offload="activations"),
)


@pytest.mark.parametrize(("spec", "case"), quick_first(2, CASES, unpack=True), ids=named)
def test_float64_equals_one_device(pool: Pool, spec: ModelSpec, case: Case) -> None:
    check(pool, spec, case.plan)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "case"), COMPILED, ids=named)
def test_compiled(pool: Pool, spec: ModelSpec, case: Case) -> None:
    check(pool, spec, case.plan)


def test_some_layers_only(pool: Pool) -> None:
    check(pool, DEEP, replace(Case("1f1b", shard=2, micro=2).plan, layers=MIXED))


LOW = [Case("1f1b", shard=2, micro=2), Case("breadth_first", shard=2, micro=2)]


@pytest.mark.parametrize("case", quick_first(1, LOW), ids=str)
def test_fp8_comes_back_bit_for_bit(pool: Pool, case: Case) -> None:
    on_device, offloaded = (
        first_step(pool, DEEP, with_fp8(replace(case, offload=offload).plan)) for offload in ("none", "activations")
    )
    for actual, expected in zip(offloaded, on_device, strict=True):
        assert actual[0]["loss"] == expected[0]["loss"]
        assert all(torch.equal(actual[0]["gradients"][name], truth) for name, truth in expected[0]["gradients"].items())


def check(pool: Pool, spec: ModelSpec, plan: Plan) -> None:
    compare(pool.run(sharded, plan.ranks, spec, plan, 1.0, STEPS), one_device(spec)[:STEPS], 1e-9)


def test_a_wrong_factor_is_noticed(pool: Pool) -> None:
    results = pool.run(sharded, 1, DEEP, Case("1f1b", micro=4, offload="activations").plan, 2.0, 1)
    with pytest.raises(AssertionError):
        compare(results, one_device(DEEP)[:1], 1e-9, weights=False)


def run_with_damage(world: World, plan: Plan) -> list[dict[str, Any]]:
    """A step in which one byte of what waits on the host changes there."""
    from meshwright.parallel.offload import SavedActivations

    settle, damaged_tensors = SavedActivations.free_device_memory, []

    def settle_and_damage(saved: SavedActivations) -> None:
        settle(saved)
        for storage in list(saved._storages.values())[: not damaged_tensors]:
            assert storage.host is not None and storage.device is None
            storage.host[6] ^= 1  # of a float64's upper bits
            damaged_tensors.append(storage)

    SavedActivations.free_device_memory = settle_and_damage  # type: ignore[method-assign]
    try:
        return sharded(world, DEEP, plan, 1.0, 1)
    finally:
        SavedActivations.free_device_memory = settle  # type: ignore[method-assign]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backward_reads_what_came_back(pool: Pool, recompute: str) -> None:
    results = pool.run(run_with_damage, 1, Case("1f1b", micro=4, recompute=recompute, offload="activations").plan)
    with pytest.raises(AssertionError, match="gradients"):
        compare([[{**results[0][0], "norm": one_device(DEEP)[0]["norm"]}]], one_device(DEEP)[:1], 1e-9, weights=False)


def copied_bytes(world: World, spec: ModelSpec, plan: Plan, steps: int) -> dict[str, float]:
    """Run some steps; returns the bytes of a visit, the peak device bytes of offloaded activations, and the host bytes."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.parallel.offload import SavedActivations

    sizes, start_offload = [], SavedActivations.start_offload

    def recording(saved: SavedActivations, span: Any = None) -> None:
        sizes.append(saved.device_bytes)
        start_offload(saved, span)

    SavedActivations.start_offload = recording  # type: ignore[method-assign]
    engine = build_engine(spec, plan, build_mesh(plan, world), loss_chunk=5, seed=0, reference=True)
    tokens = torch.zeros(plan.batch.micro_batch, 12, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens, None, None, tokens.numel())] * plan.batch.accumulate
    try:
        for _ in range(steps):
            engine.executor.play(engine.training, batches, NullRecorder(), torch.tensor(float(tokens.numel())))
    finally:
        SavedActivations.start_offload = start_offload  # type: ignore[method-assign]
    host = engine.executor.host
    assert host is not None
    peaks = {"visit": float(max(sizes, default=0)), "device": host.peak_device_bytes, "host": host.host_bytes}
    return peaks | {"offloads": len(sizes) / steps}


@pytest.mark.parametrize(
    ("case", "visits", "host_visits", "offloads"),
    [
        (Case("1f1b", micro=4), 2, 6, 12),  # the last two of eight layers are not offloaded
        pytest.param(Case("1f1b", micro=4, recompute="full"), 2, 6, 12, marks=pytest.mark.slow),
        pytest.param(Case("breadth_first", micro=2), 2, 32, 32, marks=pytest.mark.slow),
        (Case("gpipe", pipeline=2, micro=2), 3, 16, 16),
    ],
    ids=str,
)
def test_two_visits_are_on_the_device_and_host_buffers_are_reused(
    pool: Pool, case: Case, visits: int, host_visits: int, offloads: float
) -> None:
    plan = replace(case, offload="activations").plan
    first, later = (pool.run(copied_bytes, plan.ranks, DEEP, plan, steps) for steps in (1, 3))
    for rank, later_figures in zip(first, later, strict=True):
        assert 0 < rank["device"] <= visits * rank["visit"]
        assert rank["host"] == later_figures["host"] <= host_visits * rank["visit"]
        assert rank["offloads"] == later_figures["offloads"]


def test_full_recompute_offloads_only_the_blocks_input(pool: Pool) -> None:
    plan = Case("1f1b", micro=4, recompute="full", offload="activations").plan
    assert pool.run(copied_bytes, 1, GPT4, plan, 1)[0]["visit"] == 4 * 12 * GPT4.hidden * 8


GPT4 = replace(GPT, layers=4)
