"""Training with optimizer state in host memory equals training without, bit for bit, with all features and over restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.parallel.world import World
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import LayerStrategy, Plan
from tests.distributed.cases_training import Seen
from tests.distributed.pool import Pool
from tests.distributed.test_equality import LLAMA, compare, one_device, plan, sharded
from tests.distributed.test_experts import EVEN
from tests.distributed.test_fp8 import with_fp8
from tests.distributed.test_schedules import DEEP, DEEP_TIED, UNEVEN, Case
from tests.distributed.test_training import merge_tensors, same_bits, tiny, trained
from tests.slow import quick_first
from tests.training.tiny import ranks

__all__ = ["tiny"]

CASES = [
    (DEEP, Case("1f1b", shard=2, micro=2, offload="optimizer")),
    (DEEP_TIED, Case("1f1b", pipeline=2, shard=2, recompute="full", offload="both")),
    (DEEP_TIED, Case("breadth_first", shard=2, reshard=False, gradients="whole", offload="both")),
    (DEEP, Case("zbv", pipeline=2, replicate=2, recompute="selective", offload="optimizer")),
    (replace(LLAMA, layers=4), Case("1f1b", tensor=2, micro=2, offload="both")),
    (EVEN, Case("1f1b", shard=2, expert=2, micro=4, offload="optimizer")),
    (DEEP, Case("zb_h1", pipeline=2, stages=UNEVEN, offload="optimizer")),
    (DEEP_TIED, Case("interleaved", pipeline=2, shard=2, offload="both")),
    (DEEP_TIED, Case("gpipe", pipeline=2, offload="optimizer")),
    (DEEP, Case("1f1b", ring=2, micro=2, offload="optimizer")),
    (DEEP, Case("1f1b", ulysses=2, micro=2, offload="optimizer")),
]
"""In float64, where masters stay: weights are gathered as they are stored."""
MIXED = (
    LayerStrategy(range="0-3", offload="optimizer"),
    LayerStrategy(range="4-5"),
    LayerStrategy(range="6-7", offload="both", recompute="full"),
)


def bf16(chosen: Plan) -> Plan:
    return replace(chosen, precision=replace(chosen.precision, compute="bf16", reduce="fp32"))


BITS = {
    "uneven shards": (LLAMA, bf16(Case("1f1b", shard=4, offload="optimizer").plan)),
    "tied pipeline": (DEEP_TIED, bf16(Case("1f1b", pipeline=2, shard=2, offload="both").plan)),
    "one rank, layered": (DEEP_TIED, bf16(Case("breadth_first", micro=2, offload="optimizer").plan)),
    "some layers": (DEEP, bf16(replace(Case("1f1b", shard=2, micro=2).plan, layers=MIXED))),
    "replicas and tensor ranks": (LLAMA, bf16(Case("1f1b", replicate=2, tensor=2, offload="optimizer").plan)),
    "experts": (EVEN, bf16(Case("1f1b", shard=2, expert=2, offload="optimizer").plan)),
    "fp8": (DEEP, with_fp8(Case("1f1b", shard=2, micro=2, offload="optimizer").plan, compute="bf16")),
    "half on the device": (
        DEEP,
        replace(bf16(Case("1f1b", shard=2, micro=2, offload="optimizer").plan), offload_fraction=0.5),
    ),
    "staged": (
        DEEP_TIED,
        replace(bf16(Case("1f1b", shard=2, micro=2, offload="optimizer").plan), offload_staging=1.0),
    ),
    "fp32": (LLAMA, plan(1, 2, 2, compute="fp32", layers=(LayerStrategy(offload="optimizer"),))),
}


def named(value: ModelSpec | Case) -> str:
    return str(value) if isinstance(value, Case) else value.family


@pytest.mark.parametrize(("spec", "case"), quick_first(1, CASES, unpack=True), ids=named)
def test_float64_equals_one_device(pool: Pool, spec: ModelSpec, case: Case) -> None:
    compare(pool.run(sharded, case.plan.ranks, spec, case.plan), one_device(spec), 1e-9)


def steps(world: World, spec: ModelSpec, tested_plan: Plan, count: int = 3) -> tuple[dict[str, torch.Tensor], int]:
    """Run `count` steps; returns this rank's figures, weights and moments, and the bytes of its weights on the device."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.optim.shards import local
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.session import open_optimizer
    from meshwright.training.train_step import train_step
    from tests.distributed.test_equality import BATCH, CLIP, RATE, TRAIN, batch

    mesh = build_mesh(tested_plan, world)
    engine = build_engine(spec, tested_plan, mesh, loss_chunk=5, seed=0)
    optimizer = open_optimizer(engine, spec, TRAIN, mesh)
    optimizer.release_master_weights()
    samples_per_rank = BATCH // mesh.data_ranks
    final_state: dict[str, torch.Tensor] = {}
    for step in range(count):
        first = mesh.data_rank * samples_per_rank
        micro_batches = [
            tensor[first : first + samples_per_rank].split(tested_plan.batch.micro_batch)
            for tensor in batch(step, spec)
        ]
        batches = [
            MicroBatch(*columns, valid_tokens=int((columns[1] >= 0).sum()))
            for columns in zip(*micro_batches, strict=True)
        ]
        options = {"learning_rate": RATE, "clip_norm": CLIP, "recorder": NullRecorder()}
        final_state[f"figures {step}"] = train_step(engine, optimizer, mesh, batches, **options).values
    final_state |= {columns.name: columns.read().clone() for columns in optimizer.state()}
    device_bytes = sum(local(weight).untyped_storage().nbytes() for weight in engine.model.parameters())
    return final_state, device_bytes


def state_differences(
    world: World, spec: ModelSpec, offloaded_plan: Plan, lost_operation: str = ""
) -> tuple[set[str], list[int]]:
    """Names of results that differ from steps without offload; state of the name `lose` is not copied back on purpose."""
    from meshwright.optim.host import HostAdamW

    device_plan = replace(
        offloaded_plan, layers=tuple(replace(layer, offload="none") for layer in offloaded_plan.layers)
    )
    truth, full_bytes = steps(world, spec, device_plan)
    send = HostAdamW._send

    def lost(self: HostAdamW, chunk: Any) -> None:
        size, staged = self._chunks[chunk.number].size, self._buffer(chunk.number, chunk.buffer)
        new, old = (self._packing.fields(record, size) for record in (staged, self._memory.record(chunk.number)))
        if lost_operation:
            new[lost_operation].copy_(old[lost_operation])
        send(self, chunk)

    with mock.patch.object(HostAdamW, "_send", lost):
        actual, device_bytes = steps(world, spec, offloaded_plan)
    assert actual.keys() == truth.keys()
    return {name for name, value in actual.items() if not torch.equal(value, truth[name])}, [device_bytes, full_bytes]


@pytest.mark.slow
@pytest.mark.parametrize("name", BITS)
def test_same_bits_as_without(pool: Pool, name: str) -> None:
    spec, tested_plan = BITS[name]
    for rank in pool.run(state_differences, tested_plan.ranks, spec, tested_plan):
        differences, (device_bytes, full_bytes) = rank
        assert differences == set()
        if name not in ("fp8", "fp32"):
            assert device_bytes < (0.6 if name == "some layers" else 0.01) * full_bytes, "masters are not on the device"


@pytest.mark.parametrize("lose", quick_first(1, ["exp_avg_sq", "weight", "exp_avg"]))
def test_state_that_is_lost_is_noticed(pool: Pool, lose: str) -> None:
    spec, tested_plan = BITS["one rank, layered"]
    ((differences, _),) = pool.run(state_differences, 1, spec, tested_plan, lose)
    assert "figures 0" not in differences and {"figures 2", "model.layers.3.mlp.up.weight"} <= differences


def order_of_updates(world: World, spec: ModelSpec, tested_plan: Plan) -> list[tuple[str, int, int]]:
    """Of two steps, the events in their order: (name, unit, staging buffers that are filled for the next update).

    Names: `updated` when compute waits for a unit's update, `forward` and `backward` when they have waited for their weights.
    """
    from meshwright.optim.host import HostAdamW
    from meshwright.parallel.executor import _Step

    events: list[tuple[str, int, int]] = []
    optimizers: list[HostAdamW] = []
    complete, wait = HostAdamW.complete_updates, _Step.wait_for_gather
    ends = {"embed": -1, "positions": -1, "norm": spec.layers, "head": spec.layers}

    def completed(self: HostAdamW, names: Any = None) -> bool:
        optimizers[:] = [self]
        before = self._pending.completed if self._pending else 0
        left = complete(self, names)
        after = self._pending.completed if self._pending else len(self._chunks)
        for chunk in self._chunks[before:after] if left else ():
            units = {ends.get(s.name.split(".")[0], s.name.split(".")[1]) for s in chunk.segments}
            events.extend(("updated", int(unit), 0) for unit in units)
        return left

    def gathered(self: _Step, action: Any) -> None:
        wait(self, action)
        events.append((action.op, action.unit - 1, optimizers[0].fetched_ahead if optimizers else 0))

    with (
        mock.patch.object(HostAdamW, "complete_updates", completed),
        mock.patch.object(_Step, "wait_for_gather", gathered),
    ):
        steps(world, spec, tested_plan, 2)
    second = next(index for index, event in enumerate(events) if event[0] == "updated")
    return events[second:]


@pytest.mark.parametrize(("spec", "shards"), quick_first(1, [(DEEP_TIED, 1), (DEEP, 1), (DEEP, 2)], unpack=True))
def test_a_forward_waits_for_the_updates_of_gathered_units_only(pool: Pool, spec: ModelSpec, shards: int) -> None:
    """On one rank for those of its own unit. The backward finds the first chunks of the next update fetched."""
    case = Case("1f1b", shard=shards, micro=8 // shards, offload="optimizer")
    last = DEEP.layers - spec.tied  # a tied head is updated with the embedding
    for events in pool.run(order_of_updates, shards, spec, bf16(case.plan)):
        updated: set[int] = set()
        for name, unit, fetched in events:
            if name == "updated":
                updated.add(unit)
            elif name == "forward":
                ends = {spec.layers} if spec.tied else set()
                assert updated == set(range(-1, min(unit + (shards > 1), last) + 1)) | ends
            else:
                assert fetched > 0
                break


MANY, RESUMED_AT, SKIPPED_EVERY = 100, 60, 9


def clipped_steps(
    world: World, spec: ModelSpec, tested_plan: Plan, resumed_at: int
) -> tuple[dict[str, torch.Tensor], int, int]:
    """MANY steps with two micro-batches or more; returns figures, weights and moments, and how many were clipped and skipped.

    At step `resumed_at` another engine goes on with the state of the first.
    """
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.session import open_optimizer
    from meshwright.training.train_step import train_step
    from tests.distributed.test_equality import BATCH, TRAIN, batch

    mesh, clipped, skipped = build_mesh(tested_plan, world), 0, 0
    engine = build_engine(spec, tested_plan, mesh, loss_chunk=5, seed=0)
    optimizer = open_optimizer(engine, spec, TRAIN, mesh)
    optimizer.release_master_weights()
    samples_per_rank = BATCH // mesh.data_ranks
    final_state: dict[str, torch.Tensor] = {}
    for step in range(MANY):
        if step == resumed_at:
            saved = {parts.name: parts.read().clone() for parts in optimizer.state()}
            engine = build_engine(spec, tested_plan, mesh, loss_chunk=5, seed=1)
            optimizer = open_optimizer(engine, spec, TRAIN, mesh)
            for parts in optimizer.state():
                parts.write(saved[parts.name])
            optimizer.set_steps(step - skipped)
            optimizer.release_master_weights()
        first = mesh.data_rank * samples_per_rank
        micro_batches = [
            tensor[first : first + samples_per_rank].split(tested_plan.batch.micro_batch)
            for tensor in batch(step, spec)
        ]
        batches = [
            MicroBatch(*columns, valid_tokens=int((columns[1] >= 0).sum()))
            for columns in zip(*micro_batches, strict=True)
        ]
        skips, limit = step % SKIPPED_EVERY == 4, 0.3 if step % 3 else 100.0
        figures = train_step(
            engine,
            optimizer,
            mesh,
            batches,
            learning_rate=1e-3,
            clip_norm=limit,
            recorder=NullRecorder(),
            norm_limit=1e-6 if skips else float("inf"),
        ).values
        final_state[f"figures {step}"] = figures
        clipped, skipped = clipped + int(figures[1] > limit and not skips), skipped + int(figures[5] > 0)
    final_state |= {parts.name: parts.read().clone() for parts in optimizer.state()}
    return final_state, clipped, skipped


PAIRS = {name: entry for name, entry in BITS.items() if name != "fp32"} | {
    str(case): (spec, bf16(case.plan)) for spec, case in CASES
}
"""Every layout with which an optimizer in host memory is paired, in bf16: with 10 bytes of state per parameter."""


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", ["device", "host"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_hundred_steps_have_the_same_bits(pool: Pool, name: str, accumulation: Any) -> None:
    """The truth is a run without offload or stop; with frequent clipping, skipped steps, and sums over micro-batches."""
    spec, tested_plan = PAIRS[name]
    without = tuple(replace(layer, offload="none") for layer in tested_plan.layers)
    truth = pool.run(clipped_steps, tested_plan.ranks, spec, replace(tested_plan, layers=without), -1)
    chosen = replace(tested_plan, accumulation=accumulation)
    actual = pool.run(clipped_steps, chosen.ranks, spec, chosen, RESUMED_AT)
    for (state, clipped, skipped), (expected, *_) in zip(actual, truth, strict=True):
        assert state.keys() == expected.keys()
        assert {name for name, value in state.items() if not torch.equal(value, expected[name])} == set()
        assert clipped > MANY / 4 and skipped == len(range(4, MANY, SKIPPED_EVERY))


OFFLOADED, ON_DEVICE = "plan.offload=optimizer", "plan.offload=none"
IN_BF16 = [*ranks(2), "plan.compute=bf16"]


@pytest.fixture(scope="module")
def plain(pool: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """The run with the optimizer on the device, never stopped."""
    return trained(pool, tiny, tmp_path_factory.mktemp("whole"), *IN_BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [(OFFLOADED, ON_DEVICE), (ON_DEVICE, OFFLOADED), (OFFLOADED, OFFLOADED)],
)
def test_a_run_goes_on_with_or_without(
    pool: Pool, tiny: Path, tmp_path: Path, plain: list[Seen], order: tuple[str, str]
) -> None:
    uninterrupted = plain
    first = trained(pool, tiny, tmp_path / "parts", *IN_BF16, order[0], stop_at=3)
    second = trained(pool, tiny, tmp_path / "parts", *IN_BF16, order[1])
    assert [result.began for result in second] == [3, 3]
    for rank in range(2):
        assert first[rank].losses + second[rank].losses == uninterrupted[rank].losses
    expected = merge_tensors(uninterrupted)
    assert same_bits(merge_tensors(second), expected) and not same_bits(merge_tensors(first), expected)
