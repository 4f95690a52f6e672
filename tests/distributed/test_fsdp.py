"""A sharded unit gathers, frees and reduces on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.fsdp import CommunicationStreams, ParameterGroup
from meshwright.parallel.replicas import ReplicaSums
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.spec.plan import Precision
from tests.distributed.pool import Pool
from tests.distributed.test_equality import plan

OUT_FEATURES, IN_FEATURES = 5, 3  # five rows on two ranks: uneven shards


def unit_of(world, uses: int = 1, precision: Precision | None = None) -> tuple[nn.Linear, ShardedUnit]:
    from meshwright.parallel.mesh import build_mesh

    layer = nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False)
    with torch.no_grad():
        layer.weight.copy_(
            torch.arange(OUT_FEATURES * IN_FEATURES, dtype=torch.float32).view(OUT_FEATURES, IN_FEATURES)
        )
    mesh = build_mesh(plan(1, world.ranks, 1), world)
    group = ParameterGroup([layer], mesh.shards, precision or Precision(compute="fp32"))
    CommunicationStreams([group], world.device)
    unit = ShardedUnit([group], uses=uses)
    return layer, unit


def is_freed(unit: ShardedUnit) -> bool:
    return all(weight.untyped_storage().size() == 0 for weight in unit.gathered_weights)


def gather_and_free(world) -> dict[str, Any]:
    layer, unit = unit_of(world)
    unit.gather()
    unit.gather()
    unit.wait_for_gather()
    full = layer.weight.detach().clone()
    unit.free_gathered()
    freed_too_early = is_freed(unit)
    unit.free_gathered()
    return {
        "whole": full,
        "freed too early": freed_too_early,
        "freed": is_freed(unit),
        "shard": len(layer.weight.to_local()),
    }


def test_gather_wait_free(pool: Pool) -> None:
    for rank, observed in enumerate(pool.run(gather_and_free, 2)):
        assert torch.equal(observed["whole"], torch.arange(15.0).view(5, 3))
        assert not observed["freed too early"], "the memory is freed only after as many frees as gathers"
        assert observed["freed"]
        assert observed["shard"] == (3, 2)[rank]


def reduce_twice(world, uses: int, precision: Precision) -> dict[str, Any]:
    layer, unit = unit_of(world, uses, precision)
    unit.gather()
    unit.wait_for_gather()
    dtype = layer.weight.dtype
    for factor in (1.0, 2.0):  # two micro-batches, summed before the reduce-scatter
        layer(torch.full((1, IN_FEATURES), factor * (world.rank + 1), dtype=dtype)).sum().backward()
        unit.accumulate()
    unit.free_gathered()
    started = [unit.reduce(user=user, last=False) for user in range(uses)]
    unit.finish_reductions()
    first_gradient = layer.weight.grad.to_local().clone()
    unit.gather()
    unit.wait_for_gather()
    layer(torch.ones(1, IN_FEATURES, dtype=dtype)).sum().backward()
    unit.free_gathered()
    for user in range(uses):
        unit.reduce(user=user, last=user + 1 == uses)
    unit.finish_reductions()
    return {
        "started": started,
        "once": first_gradient,
        "twice": layer.weight.grad.to_local(),
        "grad type": first_gradient.dtype,
    }


@pytest.mark.parametrize("precision", [Precision(compute="fp32"), Precision(compute="bf16"), Precision(reduce="bf16")])
@pytest.mark.parametrize("uses", [1, 2])
def test_gradients_are_summed_and_added_to_the_shard(pool: Pool, uses: int, precision: Precision) -> None:
    for rank, observed in enumerate(pool.run(reduce_twice, 2, uses, precision)):
        assert observed["started"] == [False] * (uses - 1) + [True]
        row_count = (3, 2)[rank]
        # (1 + 2) of rank 0, twice that of rank 1: a sum, not a mean.
        assert torch.equal(observed["once"], torch.full((row_count, IN_FEATURES), 9.0))
        assert torch.equal(observed["twice"], torch.full((row_count, IN_FEATURES), 11.0))
        assert observed["grad type"] == torch.float32


def sum_replicas(world, dtype: torch.dtype | None) -> list[torch.Tensor]:
    flat = torch.arange(4.0) + 1 / 512 + world.rank
    shards = [flat[:1], flat[1:]]  # two gradients in one buffer share an all-reduce
    sums = ReplicaSums(dist.group.WORLD, dtype, world.device)
    sums.start(shards, [])
    sums.finish()
    return shards


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_replicas_sum_in_the_requested_dtype(pool: Pool, dtype: torch.dtype | None) -> None:
    exact = 2 * (torch.arange(4.0) + 1 / 512) + 1
    for shards in pool.run(sum_replicas, 2, dtype):
        result = torch.cat(shards)
        assert torch.equal(result, exact) == (dtype is None)
        assert torch.allclose(result, exact, rtol=1e-2)


def tied_sums(world, ranks: int, micro: int) -> tuple[torch.Tensor, int]:
    """The gradient of a tied embedding after a bf16 step, and the number of micro-batches with shared inputs left."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.parallel import executor
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from tests.distributed.test_equality import BATCH, GPT, batch

    tested_plan = plan(1, ranks, micro, compute="bf16")
    engine = build_engine(GPT, tested_plan, build_mesh(tested_plan, world), loss_chunk=5, seed=0)
    samples_per_rank = BATCH // ranks
    micro_batches = [
        tensor[world.rank * samples_per_rank : (world.rank + 1) * samples_per_rank].split(micro)
        for tensor in batch(0, GPT)
    ]
    batches = [
        MicroBatch(*columns, valid_tokens=int((columns[1] >= 0).sum())) for columns in zip(*micro_batches, strict=True)
    ]
    step = executor._Step(engine.executor, engine.training, batches, NullRecorder(), torch.tensor(9.0), {})
    step.rank_actions = tuple(action for action in step.rank_actions if action.op not in ("norm_barrier", "optim"))
    step.run()
    for units in engine.executor.rank_model.stages.values():
        for unit in units:
            unit.sharded.finish_reductions()
    return engine.model.embed.weight.grad.full_tensor().float(), len(step.shared)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("micro", [2, 8])
def test_gradients_of_tied_weights_are_summed_in_the_reduce_dtype(pool: Pool, ranks: int, micro: int) -> None:
    gradient, shared = pool.run(tied_sums, ranks, ranks, micro // ranks)[0]
    finer = gradient != gradient.bfloat16().float()
    assert finer.float().mean() > 0.2, "a sum in bf16 has no entry that bf16 cannot hold"
    assert shared == 0, "a micro-batch's shared inputs are freed after its last forward"
