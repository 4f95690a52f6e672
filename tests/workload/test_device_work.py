"""Work of a step on one device: FLOPs and bytes against independent closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, flops_per_token, parameter_count
from meshwright.spec.plan import AxisName, BatchPlan, ExpertPlan, LayerStrategy, MeshAxis, Plan, Precision
from meshwright.workload.device_work import step_work

SEQ = 8192


def model_of(name: str) -> ModelSpec:
    return from_plain(ModelSpec, MODEL_PRESETS[name])


def plan_of(micro: int = 2, accumulate: int = 1, axes: dict[AxisName, int] | None = None, **fields: Any) -> Plan:
    mesh = tuple(MeshAxis(axis=axis, size=size) for axis, size in (axes or {"shard": 1}).items())
    ranks = 1
    for axis in mesh:
        ranks *= axis.size if axis.axis in ("shard", "replicate") else 1
    return Plan(
        mesh=mesh,
        batch=BatchPlan(global_batch=micro * accumulate * ranks, micro_batch=micro, accumulate=accumulate),
        **fields,
    )


@pytest.mark.parametrize("name", ["llama3-1b", "gpt3-13b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    "axes", [{"shard": 8}, {"tensor": 2}, {"pipeline": 2}, {"context_ring": 2, "context_ulysses": 2}]
)
def test_matmuls_and_attention_add_up_to_the_models_flops(name: str, axes: dict[AxisName, int]) -> None:
    model, train = model_of(name), TrainSpec(steps=1, global_batch=2, seq_len=SEQ if name != "gpt3-13b" else 2048)
    plan = plan_of(2, 3, axes)
    work = step_work(model, train, plan)
    share = plan.ranks // plan.data_ranks
    tokens = 2 * 3 * train.seq_len
    scores = 12.0 * model.layers * model.heads * model.head_dim * train.seq_len / 2
    # Tensor ranks get whole rows of the vocabulary, so each loses less than one row.
    assert work.matmul_flops * share == pytest.approx(
        tokens * (flops_per_token(model, train.seq_len, causal=True) - scores), rel=1e-4
    )
    (attention,) = work.attention
    assert attention.count * attention.tokens * attention.heads * attention.head_dim * share == pytest.approx(
        tokens * model.layers * model.heads * model.head_dim
    )


def test_bytes_of_the_8b_model_equal_those_of_fully_fused_passes() -> None:
    work = step_work(model_of("llama3-8b"), TrainSpec(steps=1, global_batch=2, seq_len=SEQ), plan_of())
    tokens = 2 * SEQ
    layer = 2 * (16 * 4096 + 4 * 40 * 128 + 8 * 14336)  # two norms, rotary embedding, SwiGLU
    assert work.elementwise_bytes / tokens == pytest.approx(32 * layer + 2 * 12 * 4096)
    assert work.loss_bytes / tokens == 4 * 128256
    assert work.quantise_bytes == 0


def test_only_fp8_layers_are_rounded() -> None:
    model, train = model_of("llama3-8b"), TrainSpec(steps=1, global_batch=2, seq_len=SEQ)
    low = Precision(linear="fp8_tensorwise")
    all_layers = step_work(model, train, plan_of(precision=low))
    strategies = (LayerStrategy(range="0-0", linear="compute"), LayerStrategy(range="1-31"))
    without_first = step_work(model, train, plan_of(precision=low, layers=strategies))
    assert without_first.quantise_bytes / all_layers.quantise_bytes == pytest.approx(31 / 32)
    assert {linear.format for linear in all_layers.linears} == {"fp8", "bf16"}, "the head stays in bf16"
    assert sum(linear.count for linear in all_layers.linears if linear.format == "fp8") == 4 * 32
    assert all_layers.matmul_flops == pytest.approx(without_first.matmul_flops)


def test_experts_multiply_rows_in_fp8_and_weight_gradients_in_bf16() -> None:
    model, train = model_of("qwen3-30b-a3b"), TrainSpec(steps=1, global_batch=8, seq_len=4096)
    low, wide = (
        step_work(model, train, plan_of(8, precision=Precision(linear=linear))) for linear in ("fp8_rowwise", "compute")
    )
    tokens, routed = 8 * 4096, 8 * (2 * 2048 + 2 * 768 + 768)  # inputs and output gradients of a token's eight copies
    assert low.quantise_bytes == pytest.approx(tokens * 48 * (3 * routed + 4 * (2048 + 5120 + 4096 + 2048)))
    assert low.matmul_flops == pytest.approx(wide.matmul_flops)
    experts = 6 * tokens * 48 * 8 * 3 * 2048 * 768
    attention = 6 * tokens * 48 * (2048 * 5120 + 4096 * 2048)
    in_fp8 = sum(linear.flops for linear in low.linears if linear.format == "fp8")
    assert in_fp8 == pytest.approx(attention + experts * 2 / 3)


def test_the_optimizer_steps_a_ranks_share() -> None:
    model, train = model_of("llama3-8b"), TrainSpec(steps=1, global_batch=8, seq_len=SEQ)
    work = step_work(model, train, plan_of(1, 1, {"shard": 8}))
    assert work.parameters == pytest.approx(parameter_count(model) / 8)


def test_collectives_follow_the_strategy() -> None:
    model, train = model_of("llama3-8b"), TrainSpec(steps=1, global_batch=8, seq_len=SEQ)
    weights = 2.0 * parameter_count(model)

    def gathered(plan: Plan) -> float:
        return sum(
            collective.bytes * collective.count
            for collective in step_work(model, train, plan).collectives
            if collective.op == "all_gather"
        )

    kept, freed = LayerStrategy(reshard=False), LayerStrategy(reshard=True)
    assert gathered(plan_of(1, 4, {"shard": 8}, layers=(kept,))) == pytest.approx(weights)
    assert gathered(plan_of(1, 4, {"shard": 8}, layers=(freed,))) == pytest.approx(8 * weights)
    assert gathered(
        plan_of(1, 4, {"shard": 8}, layers=(kept,), precision=Precision(linear="fp8_tensorwise", gather="fp8"))
    ) == pytest.approx(weights / 2)
    both = step_work(model, train, plan_of(1, 1, {"replicate": 2, "shard": 4}, layers=(kept,))).collectives
    assert [collective.op for collective in both] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert not step_work(model, train, plan_of()).collectives


def test_a_sliding_window_changes_only_the_attention_work() -> None:
    model, train = model_of("llama3-1b"), TrainSpec(steps=1, global_batch=2, seq_len=SEQ)
    full, windowed, wide = (
        step_work(replace(model, sliding_window=window), train, plan_of()) for window in (None, 512, SEQ)
    )
    assert windowed == replace(full, attention=(replace(full.attention[0], window=512),)) and wide == full


def test_expert_ranks_receive_tokens_of_all_ranks_by_all_to_all() -> None:
    model, train = model_of("qwen3-30b-a3b"), TrainSpec(steps=1, global_batch=8, seq_len=4096)
    single = step_work(model, train, plan_of(1, 1, {"shard": 8}, experts=ExpertPlan(expert=1, expert_shard=8)))
    distributed = step_work(model, train, plan_of(1, 1, {"shard": 8}, experts=ExpertPlan(expert=4, expert_shard=2)))
    routed_tokens = 4096 * model.experts_per_token
    matmuls = {
        (linear.m, linear.count)
        for linear in distributed.linears
        if (linear.k, linear.n) == (model.hidden, 2 * model.expert_hidden)
    }
    assert matmuls == {(routed_tokens // (model.experts // 4), model.layers * model.experts / 4)}
    assert distributed.matmul_flops == pytest.approx(single.matmul_flops)
    assert distributed.parameters == single.parameters == pytest.approx(parameter_count(model) / 8)
    exchanges = [collective for collective in distributed.collectives if collective.op == "all_to_all"]
    assert [(collective.ranks, collective.bytes, collective.count) for collective in exchanges] == [
        (4, routed_tokens * model.hidden * 2, 4 * model.layers)
    ]
    assert {collective.ranks for collective in distributed.collectives if collective.op == "all_gather"} == {8, 2}
    assert not [collective for collective in single.collectives if collective.op == "all_to_all"]


def test_token_exchanges_equal_the_tables_of_the_design_pages() -> None:
    """Tables of docs/design/tensor.md and context.md."""
    model, train = model_of("llama3-8b"), TrainSpec(steps=1, global_batch=1, seq_len=SEQ)
    stream, keys = SEQ * 4096 * 2, SEQ // 2 * 2 * 8 * 128

    def all_collectives(axis: AxisName, model: ModelSpec) -> list[tuple[str, float, float]]:
        collectives = step_work(
            model, train, plan_of(1, 1, {axis: 2}, layers=(LayerStrategy(reshard=False),))
        ).collectives
        return [(collective.op, collective.bytes, collective.count / model.layers) for collective in collectives]

    def last_collectives(axis: AxisName, model: ModelSpec = model) -> list[tuple[str, float, float]]:
        return all_collectives(axis, model)[-2:]

    assert last_collectives("tensor") == [("all_gather", stream, 6), ("reduce_scatter", stream, 4)]
    parallel = replace(model, parallel_block=True)
    squares = ("all_reduce", 8 * SEQ, 2)  # of queries and of keys, in fp32, forward and backward
    assert squares in all_collectives("tensor", replace(model, qk_norm=True, qk_norm_whole=True))
    assert last_collectives("tensor", parallel) == [("all_gather", stream, 3), ("reduce_scatter", stream, 2)]
    assert last_collectives("context_ulysses")[-1] == ("all_to_all", SEQ // 2 * 2 * (32 + 8) * 128 * 2, 2)
    assert last_collectives("context_ring") == [("p2p", keys * 2, 2), ("p2p", keys * 4, 2)]
