"""Sums of gradient shards over micro-batches: the same bits in host memory, one rounding for each addition in bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.parallel.world import World
from meshwright.spec.model import ModelSpec, parameter_count
from meshwright.spec.plan import Accumulation, Plan
from meshwright.workload import tensor_bytes
from meshwright.workload.plan_bytes import fullest_rank_memory, optimizer_on_host
from tests.distributed.pool import Pool
from tests.distributed.test_equality import LLAMA, TRAIN, batch
from tests.distributed.test_experts import EVEN
from tests.distributed.test_host_optimizer import bf16, steps
from tests.distributed.test_schedules import DEEP, DEEP_TIED, Case
from tests.slow import quick_first

ROUNDING = 2.0**-9
"""Relative error of rounding to bf16."""
CASES = {
    "weight gradients deferred": (DEEP, Case("zb_h1", pipeline=2, offload="optimizer")),
    "tied pipeline": (DEEP_TIED, Case("1f1b", pipeline=2, shard=2, offload="both", recompute="full")),
    "fsdp": (LLAMA, Case("1f1b", shard=4, offload="optimizer")),
    "zero 2": (DEEP, Case("1f1b", shard=2, reshard=False, offload="optimizer")),
    "one rank": (DEEP_TIED, Case("1f1b", micro=2, offload="optimizer")),
    "one rank, all forwards first": (DEEP, Case("gpipe", micro=2)),
    "both ends on one rank": (DEEP, Case("zbv", pipeline=2, replicate=2, offload="optimizer")),
    "virtual stages": (DEEP_TIED, Case("interleaved", pipeline=2, shard=2, offload="optimizer")),
    "replicas and tensor ranks": (LLAMA, Case("1f1b", replicate=2, tensor=2, offload="optimizer")),
    "context ranks": (DEEP, Case("1f1b", ring=2, micro=2, offload="optimizer")),
    "experts": (EVEN, Case("1f1b", shard=2, expert=2, offload="optimizer")),
}


def with_accumulation(case: Case, accumulation: Accumulation) -> Plan:
    return replace(bf16(case.plan), accumulation=accumulation)


def host_sums(world: World, spec: ModelSpec, case: Case) -> tuple[set[str], dict[str, int]]:
    """Names of results that differ from sums on the device; and how often sums were sent, freed and copied back."""
    from meshwright.parallel.gradient_offload import GradientOffload

    truth, _ = steps(world, spec, with_accumulation(case, "device"))
    calls = dict.fromkeys(("send", "_free", "_start_copies_back"), 0)

    def counted(name: str) -> Any:
        original = getattr(GradientOffload, name)

        def call(self: GradientOffload, *arguments: Any) -> Any:
            calls[name] += 1
            return original(self, *arguments)

        return mock.patch.object(GradientOffload, name, call)

    with counted("send"), counted("_free"), counted("_start_copies_back"):
        actual, _ = steps(world, spec, with_accumulation(case, "host"))
    assert actual.keys() == truth.keys()
    return {name for name, value in actual.items() if not torch.equal(value, truth[name])}, calls


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sums_in_host_memory_have_the_same_bits(pool: Pool, name: str) -> None:
    spec, case = CASES[name]
    for differences, calls in pool.run(host_sums, case.plan.ranks, spec, case):
        assert differences == set()
        assert calls["send"] >= calls["_free"] == calls["_start_copies_back"] > 0


ACCOUNTS = [("fp32", 1.0, "device"), ("bf16", 0.5, "bf16"), ("int8", 1.0, "device")]
"""Moments, share in host memory, sums."""
WIDE = replace(LLAMA, layers=4, hidden=64, head_dim=16, ffn_hidden=128, vocab_size=256)
STAGED = 1024


def bytes_by_place(world: World, spec: ModelSpec, plan: Plan) -> tuple[dict[str, int], int]:
    """Bytes of tensors on the device by the memory model's categories after a step's backwards, and of host memory."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.optim import host
    from meshwright.optim.shards import local
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.session import open_optimizer
    from meshwright.training.train_step import train_step
    from tests.distributed.test_equality import TRAIN

    def storage_bytes(tensors: Any) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    mesh, device_bytes = build_mesh(plan, world), {}
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0)
    with mock.patch.object(host, "CPU_CHUNK_ELEMENTS", STAGED):
        optimizer = open_optimizer(engine, spec, TRAIN, mesh)
    optimizer.release_master_weights()
    offloaded = optimizer._host
    assert offloaded is not None
    weights = list(engine.model.parameters())

    def measure() -> None:
        device_bytes["gradients"] = storage_bytes(local(weight.grad) for weight in weights)

    micro = [column.split(plan.batch.micro_batch) for column in batch(0, spec)]
    batches = [MicroBatch(*columns, valid_tokens=1) for columns in zip(*micro, strict=True)]
    options = {"learning_rate": 1e-3, "clip_norm": 1.0, "recorder": NullRecorder(), "before_update": measure}
    train_step(engine, optimizer, mesh, batches, **options)
    device_bytes["weights"] = storage_bytes([*map(local, weights), *offloaded._resident.values()])
    device_bytes["optimizer"] = storage_bytes([offloaded._memory.device_records, *offloaded._staging])
    return device_bytes, optimizer.host_bytes


@pytest.mark.parametrize(("moments", "fraction", "accumulation"), quick_first(1, ACCOUNTS, unpack=True))
def test_tensors_have_the_bytes_of_the_memory_account(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, moments: Any, fraction: float, accumulation: Accumulation
) -> None:
    plan = with_accumulation(Case("1f1b", micro=2, offload="optimizer"), accumulation)
    plan = replace(plan, offload_fraction=fraction, precision=replace(plan.precision, moments=moments))
    ((device_bytes, on_host),) = pool.run(bytes_by_place, 1, WIDE, plan)
    count = parameter_count(WIDE)
    monkeypatch.setattr(tensor_bytes, "staged_elements", lambda record: STAGED)
    predicted = fullest_rank_memory(WIDE, TRAIN, plan, cpu=True)
    assert device_bytes["weights"] == predicted["weights"] == 2 * count
    assert device_bytes["gradients"] == predicted["gradients"] == (2 if accumulation == "bf16" else 4) * count
    # Segments begin at whole blocks of 256 elements.
    assert device_bytes["optimizer"] == pytest.approx(predicted["optimizer"], rel=0.04)
    record = {"fp32": 10, "bf16": 6, "int8": 4 + 2 / 256}[moments]
    assert on_host == pytest.approx(optimizer_on_host(WIDE, plan, 1), rel=0.04)
    assert on_host == pytest.approx(record * fraction * count, rel=0.04)


def sum_errors(world: World, spec: ModelSpec, case: Case) -> tuple[float, float]:
    """Largest differences of bf16 sums from sums rounded after each addition, and from exact ones.

    They are relative to the norms of all partial sums.
    """
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.optim.shards import local
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    sequences = batch(0, spec)
    device, narrow = (
        build_engine(spec, chosen, build_mesh(chosen, world), loss_chunk=5, seed=0)
        for chosen in (with_accumulation(case, "device"), with_accumulation(case, "bf16"))
    )
    micro = case.micro
    batches = [
        MicroBatch(*(column[start : start + micro] for column in sequences), valid_tokens=1)
        for start in range(0, micro * case.plan.batch.accumulate, micro)
    ]
    valid = torch.tensor(50.0)

    def gradients(engine: Any, played: list[MicroBatch]) -> dict[str, torch.Tensor]:
        engine.executor.play(engine.training_schedule(len(played)), played, NullRecorder(), valid)
        taken = {name: local(weight.grad).clone() for name, weight in engine.model.named_parameters()}
        for weight in engine.model.parameters():
            weight.grad = None
        return taken

    sums = gradients(narrow, batches)
    assert {value.dtype for value in sums.values()} == {torch.bfloat16}
    parts = [gradients(device, [micro_batch]) for micro_batch in batches]
    errors = [0.0, 0.0]
    for name, total in sums.items():
        rounded, exact = parts[0][name].bfloat16(), parts[0][name].double()
        norms = exact.norm()
        for part in parts[1:]:
            rounded = (rounded.float() + part[name].float()).bfloat16()
            exact = exact + part[name].double()
            norms += exact.norm()
        for index, truth in enumerate((rounded.double(), exact)):
            errors[index] = max(errors[index], float((total.double() - truth).norm() / norms.clamp_min(1e-30)))
    return errors[0], errors[1]


@pytest.mark.parametrize("case", quick_first(1, [Case("1f1b", shard=2), Case("1f1b", micro=2)]), ids=str)
def test_bf16_sums_round_once_for_each_addition(pool: Pool, case: Case) -> None:
    for from_rounded, from_exact in pool.run(sum_errors, case.plan.ranks, DEEP, case):
        # On one rank matmuls are added inside the matmul, which rounds once less than a matmul that is added.
        assert from_rounded == 0 if case.shard > 1 else from_rounded < ROUNDING
        assert 0 < from_exact < ROUNDING
