"""The work of a step against the closed forms that other parts of the program know."""

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


def plan_of(micro: int = 2, accumulate: int = 1, axes: dict[AxisName, int] | None = None, **other: Any) -> Plan:
    mesh = tuple(MeshAxis(axis=axis, size=size) for axis, size in (axes or {"shard": 1}).items())
    ranks = 1
    for axis in mesh:
        ranks *= axis.size if axis.axis in ("shard", "replicate") else 1
    return Plan(
        mesh=mesh,
        batch=BatchPlan(global_batch=micro * accumulate * ranks, micro_batch=micro, accumulate=accumulate),
        **other,
    )


@pytest.mark.parametrize("name", ["llama3-1b", "gpt3-13b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    "axes", [{"shard": 8}, {"tensor": 2}, {"pipeline": 2}, {"context_ring": 2, "context_ulysses": 2}]
)
def test_products_and_attention_are_the_models_flops(name: str, axes: dict[AxisName, int]) -> None:
    model, train = model_of(name), TrainSpec(steps=1, global_batch=2, seq_len=SEQ if name != "gpt3-13b" else 2048)
    plan = plan_of(2, 3, axes)
    work = step_work(model, train, plan)
    share = plan.ranks // plan.data_ranks
    tokens = 2 * 3 * train.seq_len
    scores = 12.0 * model.layers * model.heads * model.head_dim * train.seq_len / 2
    # A vocabulary that is cut into whole rows loses less than one row a rank.
    assert work.product_flops * share == pytest.approx(
        tokens * (flops_per_token(model, train.seq_len, causal=True) - scores), rel=1e-4
    )
    one = work.attention
    assert one.count * one.tokens * one.heads * one.head_dim * share == pytest.approx(
        tokens * model.layers * model.heads * model.head_dim
    )


def test_bytes_of_the_8b_model_are_those_of_fully_fused_passes() -> None:
    work = step_work(model_of("llama3-8b"), TrainSpec(steps=1, global_batch=2, seq_len=SEQ), plan_of())
    tokens = 2 * SEQ
    layer = 2 * (16 * 4096 + 4 * 40 * 128 + 8 * 14336)  # two norms, rotary embedding, SwiGLU
    assert work.elementwise_bytes / tokens == pytest.approx(32 * layer + 2 * 12 * 4096)
    assert work.loss_bytes / tokens == 4 * 128256
    assert work.quantise_bytes == 0


def test_fp8_layers_are_rounded_and_others_are_not() -> None:
    model, train = model_of("llama3-8b"), TrainSpec(steps=1, global_batch=2, seq_len=SEQ)
    low = Precision(linear="fp8_tensorwise")
    whole = step_work(model, train, plan_of(precision=low))
    strategies = (LayerStrategy(range="0-0", linear="compute"), LayerStrategy(range="1-31"))
    part = step_work(model, train, plan_of(precision=low, layers=strategies))
    assert part.quantise_bytes / whole.quantise_bytes == pytest.approx(31 / 32)
    assert {linear.format for linear in whole.linears} == {"fp8", "bf16"}, "the head stays"
    assert sum(linear.count for linear in whole.linears if linear.format == "fp8") == 4 * 32
    assert whole.product_flops == pytest.approx(part.product_flops)


def test_the_optimizer_steps_a_ranks_share() -> None:
    model, train = model_of("llama3-8b"), TrainSpec(steps=1, global_batch=8, seq_len=SEQ)
    work = step_work(model, train, plan_of(1, 1, {"shard": 8}))
    assert work.parameters == pytest.approx(parameter_count(model) / 8)


def test_collectives_follow_the_strategy() -> None:
    model, train = model_of("llama3-8b"), TrainSpec(steps=1, global_batch=8, seq_len=SEQ)
    weights = 2.0 * parameter_count(model)

    def gathered(plan: Plan) -> float:
        return sum(one.bytes * one.count for one in step_work(model, train, plan).collectives if one.op == "all_gather")

    kept, freed = LayerStrategy(reshard=False), LayerStrategy(reshard=True)
    assert gathered(plan_of(1, 4, {"shard": 8}, layers=(kept,))) == pytest.approx(weights)
    assert gathered(plan_of(1, 4, {"shard": 8}, layers=(freed,))) == pytest.approx(8 * weights)
    assert gathered(
        plan_of(1, 4, {"shard": 8}, layers=(kept,), precision=Precision(linear="fp8_tensorwise", gather="fp8"))
    ) == pytest.approx(weights / 2)
    both = step_work(model, train, plan_of(1, 1, {"replicate": 2, "shard": 4}, layers=(kept,))).collectives
    assert [one.op for one in both] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert not step_work(model, train, plan_of()).collectives


def test_a_sliding_window_is_another_attention_and_the_rest_is_the_same() -> None:
    model, train = model_of("llama3-1b"), TrainSpec(steps=1, global_batch=2, seq_len=SEQ)
    full, windowed, wide = (
        step_work(replace(model, sliding_window=window), train, plan_of()) for window in (None, 512, SEQ)
    )
    assert windowed == replace(full, attention=replace(full.attention, window=512)) and wide == full


def test_experts_on_ranks_of_their_own_get_the_rows_of_all_and_move_them() -> None:
    model, train = model_of("qwen3-30b-a3b"), TrainSpec(steps=1, global_batch=8, seq_len=4096)
    alone = step_work(model, train, plan_of(1, 1, {"shard": 8}, experts=ExpertPlan(expert=1, expert_shard=8)))
    spread = step_work(model, train, plan_of(1, 1, {"shard": 8}, experts=ExpertPlan(expert=4, expert_shard=2)))
    rows = 4096 * model.experts_per_token
    mine = {
        (linear.m, linear.count)
        for linear in spread.linears
        if (linear.k, linear.n) == (model.hidden, 2 * model.expert_hidden)
    }
    assert mine == {(rows // (model.experts // 4), model.layers * model.experts / 4)}
    assert spread.product_flops == pytest.approx(alone.product_flops)
    assert spread.parameters == alone.parameters == pytest.approx(parameter_count(model) / 8)
    moved = [one for one in spread.collectives if one.op == "all_to_all"]
    assert [(one.ranks, one.bytes, one.count) for one in moved] == [(4, rows * model.hidden * 2, 4 * model.layers)]
    assert {one.ranks for one in spread.collectives if one.op == "all_gather"} == {8, 2}
    assert not [one for one in alone.collectives if one.op == "all_to_all"]


def test_tokens_that_ranks_exchange_are_those_of_the_axes_pages() -> None:
    """Tables of docs/design/tensor.md and context.md."""
    model, train = model_of("llama3-8b"), TrainSpec(steps=1, global_batch=1, seq_len=SEQ)
    stream, keys = SEQ * 4096 * 2, SEQ // 2 * 2 * 8 * 128

    def last_collectives(axis: AxisName, model: ModelSpec = model) -> list[tuple[str, float, float]]:
        found = step_work(model, train, plan_of(1, 1, {axis: 2}, layers=(LayerStrategy(reshard=False),))).collectives
        return [(one.op, one.bytes, one.count / model.layers) for one in found][-2:]

    assert last_collectives("tensor") == [("all_gather", stream, 6), ("reduce_scatter", stream, 4)]
    beside = replace(model, parallel_block=True)
    assert last_collectives("tensor", beside) == [("all_gather", stream, 3), ("reduce_scatter", stream, 2)]
    assert last_collectives("context_ulysses")[-1] == ("all_to_all", SEQ // 2 * 2 * (32 + 8) * 128 * 2, 2)
    assert last_collectives("context_ring") == [("p2p", keys * 2, 2), ("p2p", keys * 4, 2)]
