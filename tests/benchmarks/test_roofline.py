"""A step compared with its roofline: the needed time follows from rates, and the trace explains gaps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernel_times import breakdown
from kernel_trace import kernels_of
from roofline import idle_link_seconds, roofline, seconds_needed, table_lines

from meshwright.config.presets import MODEL_PRESETS
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan, Precision
from meshwright.spec.profile import AttentionTime, CollectiveTime, MachineProfile, MatmulTime, Operation
from meshwright.workload.device_work import Work, step_work
from tests.benchmarks.test_kernel_times import two_steps

MODEL = from_plain(ModelSpec, {**MODEL_PRESETS["llama-nano"], "vocab_size": 512, "layers": 2})
TRAIN = TrainSpec(steps=1, global_batch=4, seq_len=64, loss_chunk=32)
PLAN = Plan(mesh=(MeshAxis(axis="shard", size=2),), batch=BatchPlan(global_batch=4, micro_batch=1, accumulate=2))
RINGS: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
MEMORY, FLOPS, UPDATE = 4e12, 6e14, 1e11


def profile_for(work: Work) -> MachineProfile:
    """A device with one rate for all matmuls, one for attention and one for memory."""
    matmuls = []
    for linear in work.linears:
        for m, k, n in {(linear.m, linear.k, linear.n), (linear.m, linear.n, linear.k), (linear.n, linear.m, linear.k)}:
            seconds = 2 * m * k * n / FLOPS
            matmuls.append(MatmulTime(format=linear.format, m=m, k=k, n=n, seconds=seconds, burst_seconds=seconds))
    (attention,) = work.attention
    attention = AttentionTime(
        format="bf16",
        seq=attention.seq,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        tokens=attention.tokens,
        forward_seconds=1e-6,
        backward_seconds=2e-6,
    )
    rings = [
        CollectiveTime(op=op, ranks=2, nodes=1, bytes=size, seconds=1e-5 + size / 1e11)
        for op in RINGS
        for size in (1 << 10, 1 << 30)
    ]
    return MachineProfile(
        date="2026-01-02T03:04:05Z",
        gpu="H200",
        device="NVIDIA H200",
        devices=2,
        nodes=1,
        cores=8,
        memory_bytes=1 << 37,
        products=tuple(matmuls),
        attention=(attention,),
        collectives=tuple(rings),
        copy_bytes_per_s=MEMORY,
        pass_bytes_per_s=MEMORY,
        adamw_parameters_per_s=UPDATE,
    )


def test_needed_seconds_are_the_work_over_the_rates() -> None:
    work = step_work(MODEL, TRAIN, PLAN)
    seconds = seconds_needed(work, profile_for(work))
    assert seconds["gemm"] == pytest.approx(work.matmul_flops / FLOPS)
    assert seconds["attention"] == pytest.approx(2 * 2 * 3e-6)
    assert seconds["elementwise"] == pytest.approx(work.elementwise_bytes / MEMORY)
    assert seconds["optimizer"] == pytest.approx(work.parameters / UPDATE + 4 * work.parameters / MEMORY)
    assert seconds["quantise"] == 0


def test_the_same_in_fp8_takes_each_matmul_at_its_own_rate() -> None:
    plan = replace(PLAN, precision=Precision(linear="fp8_tensorwise"))
    work = step_work(MODEL, TRAIN, plan)
    seconds = seconds_needed(work, profile_for(work))
    assert seconds["gemm"] == pytest.approx(work.matmul_flops / FLOPS)
    assert seconds["quantise"] > 0


def test_a_rate_that_was_not_measured_is_asked_for() -> None:
    work = step_work(MODEL, TRAIN, PLAN)
    profile = profile_for(work)
    for lacking in ({"products": ()}, {"attention": ()}, {"pass_bytes_per_s": None}):
        with pytest.raises(BadInput, match="--shapes-of"):
            seconds_needed(work, replace(profile, **lacking))


def test_collectives_are_priced_between_the_measured_sizes() -> None:
    work = step_work(MODEL, TRAIN, PLAN)
    expected = sum(entry.count * (1e-5 + entry.bytes / 1e11) for entry in work.collectives)
    assert idle_link_seconds(work, profile_for(work)) == pytest.approx(expected)
    assert idle_link_seconds(work, replace(profile_for(work), collectives=())) is None


def test_lines_add_up_to_the_step_and_larger_gaps_are_explained() -> None:
    work = step_work(MODEL, TRAIN, PLAN)
    result = roofline(work, profile_for(work), breakdown(kernels_of(two_steps().events)), 95e-6)
    assert sum(line.took for line in result.lines) == pytest.approx(95e-6)
    by_kind = {line.kind: line for line in result.lines}
    assert by_kind["idle"].took == pytest.approx(15e-6), "the profiler's share is not the step's"
    assert "waiting for the host" in by_kind["idle"].why
    assert "10.0 µs of 20.0 µs" in by_kind["communication"].why and "on idle links" in by_kind["communication"].why
    assert "8×4×16 bf16, 2 calls" in by_kind["gemm"].why
    explained = {line.kind for line in result.lines if line.why}
    assert explained >= {line.kind for line in result.lines if abs(line.gap) > 0.01 * result.seconds and line.took}
    text = table_lines(result)
    assert text[len(result.lines) + 1].split()[:3] == ["step", f"{1e3 * result.needed:.2f}", "0.10"]
    assert from_plain(type(result), to_plain(result)) == result


def test_work_that_ran_faster_than_its_measured_rate_says_so() -> None:
    work = step_work(MODEL, TRAIN, PLAN)
    slow = replace(profile_for(work), pass_bytes_per_s=work.elementwise_bytes / 25e-6)
    result = roofline(work, slow, breakdown(kernels_of(two_steps().events)), 95e-6)
    line = next(line for line in result.lines if line.kind == "elementwise")
    assert (line.needed, line.took) == (pytest.approx(25e-6), pytest.approx(20e-6))
    assert line.why == "took 0.800 of the time that follows from the profile's rates"
