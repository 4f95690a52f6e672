"""Work, memory and time of modules that predict further tokens, against sums by hand and the exact memory model."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cli.plan_words import facts
from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.plan_costs import pricing
from meshwright.simulator.step_simulation import memory_of
from meshwright.simulator.units import UnitCosts
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, flops_per_token, parameter_count, prediction_parameter_count
from meshwright.workload.arrays import side_by_side
from meshwright.workload.device_work import step_work
from meshwright.workload.layout_bytes import layout_memory
from meshwright.workload.layouts import layout_of
from meshwright.workload.plan_bytes import formats, memory_by_rank
from meshwright.workload.stage_parts import stage_part
from tests.slow import examples
from tests.workload.test_device_work import plan_of
from tests.workload.test_layout_bytes import random_plan
from tests.workload.test_plan_bytes import (
    BACKWARD_TEMPORARIES,
    BLOCK,
    HIDDEN,
    MODEL,
    SAVED,
    STREAM,
    TABLE,
    TOKENS,
    TRAIN,
    plan,
)

DEPTH = 2
PREDICTING = replace(MODEL, prediction_depth=DEPTH)
MODULE = BLOCK + 2 * HIDDEN * HIDDEN + 3 * HIDDEN
"""A block, the projection and three norms."""
V3 = from_plain(ModelSpec, {**MODEL_PRESETS["deepseek-v3"], "prediction_depth": 1})


def test_parameters_of_a_rank_are_those_of_the_module() -> None:
    assert (
        prediction_parameter_count(PREDICTING) == DEPTH * MODULE == parameter_count(PREDICTING) - parameter_count(MODEL)
    )
    with_modules, without = (
        stage_part(model, 2, 4, 1, ((range(4),), (range(4, 8),)), 1) for model in (PREDICTING, MODEL)
    )
    # Tensor ranks divide the block and the table, but not the projection and the norms.
    block, replicated = BLOCK - 2 * HIDDEN, 2 * HIDDEN * HIDDEN + 5 * HIDDEN
    assert with_modules.head - without.head == DEPTH * (block // 2 + replicated) + TABLE // 2
    on_one_rank = stage_part(PREDICTING, 1, 4, 1, ((range(8),),), 0)
    assert on_one_rank.head == on_one_rank.embed_head == DEPTH * MODULE + 2 * TABLE + HIDDEN
    experts = 256 * 3 * 7168 * 2048
    embed_head = [
        stage_part(replace(V3, prediction_depth=depth), 1, 64, 64, ((range(60),), (range(60, 61),)), 1)
        for depth in (0, 1)
    ]
    others = prediction_parameter_count(V3) - experts - 256  # every rank has all biases of the choice
    assert embed_head[1].head - embed_head[0].head == pytest.approx(others + 129280 * 7168 + experts // 64, abs=256)


def test_memory_of_the_modules_is_a_category_of_its_own() -> None:
    """The peak is in the head: its logits, and one more fp32 gradient of its weight for each module."""
    train = replace(TRAIN, loss_chunk=4096, seq_len=2048)
    (without,), (whole,) = (
        memory_by_rank(model, train, plan({"shard": 4}, reshard=True), cpu=False) for model in (MODEL, PREDICTING)
    )
    predictions = whole.pop("predictions")
    assert whole == without
    state = (4 + 4 + 8) * DEPTH * MODULE // 4
    # Both ends are one unit, gathered with the modules; the block gathered before has the buffer.
    gathered = 2 * (2 * TABLE + HIDDEN + DEPTH * MODULE + BLOCK) - 2 * 2 * (TABLE + HIDDEN)
    saved = DEPTH * (TOKENS * SAVED + 6 * STREAM) + BACKWARD_TEMPORARIES
    assert predictions == state + gathered + saved + 4 * DEPTH * TABLE
    first, last = memory_by_rank(
        PREDICTING, train, plan({"pipeline": 2, "shard": 2}), cpu=False, activation_peaks=(7e9, 3e9)
    )
    assert first["predictions"] == 0 and last["predictions"] > (4 + 4 + 8) * (DEPTH * MODULE + TABLE) // 2


@pytest.mark.parametrize("model", [replace(V3, layers=20, first_dense_layers=0), PREDICTING], ids=["v3", "dense"])
def test_the_closed_form_agrees_with_the_account_of_each_plan(model: ModelSpec) -> None:
    dice, train = random.Random(7), TrainSpec(steps=1, global_batch=1, seq_len=4096)
    drawn = (random_plan(model, dice) for _ in range(examples(12, 80)))
    plans = [drawn_plan for drawn_plan in drawn if drawn_plan is not None]
    exact = [
        max(sum(parts.values()) for parts in memory_of(model, train, drawn_plan, cpu=False)) for drawn_plan in plans
    ]
    layout = side_by_side([layout_of(model, train, drawn_plan) for drawn_plan in plans])
    closed = sum(layout_memory(model, layout, formats(train, plans[0].precision, cpu=False)).values())
    off = np.abs(closed / np.array(exact) - 1)
    assert off.max() < 0.06, (plans[int(off.argmax())], exact[int(off.argmax())])


@pytest.mark.parametrize("axes", [{"shard": 8}, {"tensor": 2}, {"pipeline": 2}, {"context_ring": 2}])
@pytest.mark.parametrize("model", [V3, PREDICTING], ids=["v3", "dense"])
def test_matmuls_and_attention_add_up_to_the_models_flops(model: ModelSpec, axes: dict) -> None:
    train, tested = TrainSpec(steps=1, global_batch=2, seq_len=4096), plan_of(2, 3, axes)
    work, share = step_work(model, train, tested), tested.ranks // tested.data_ranks
    blocks = model.layers + model.prediction_depth
    scores = 6 * blocks * (model.heads * model.head_dim + model.value_width) * train.seq_len / 2
    tokens = 2 * 3 * train.seq_len
    matmuls = tokens * (flops_per_token(model, train.seq_len, causal=True) - scores)
    assert work.matmul_flops * share == pytest.approx(matmuls, rel=2e-4)
    (attention,) = work.attention
    assert attention.count * share * attention.heads == pytest.approx(3 * blocks * model.heads)


def test_the_head_takes_the_time_of_its_modules() -> None:
    run = load_run(None, ["model=llama3-8b", "cluster=dgx-h100-16", "train.global_batch=16", "train.steps=10"])
    tested = plan_of(1, 2, {"shard": 8})
    costs = {}
    for depth in (0, DEPTH):
        model = replace(run.model, prediction_depth=depth)
        priced = pricing(model, run.train, tested, run.cluster)
        assert priced is not None
        costs[depth] = UnitCosts(model, tested, priced)
    base, block, embed = costs[0].compute("head").forward, costs[0].compute(31), costs[0].compute("embed")
    added = costs[DEPTH].compute("head").forward - base
    in_block = block.forward + block.backward_input + block.backward_weight
    lookup = embed.forward + embed.backward_input + embed.backward_weight
    projection = added / DEPTH - in_block - base - lookup
    # Of the same rate as the head's matmuls: 2·hidden² weights to vocabulary × hidden.
    assert 0 < projection < 1.2 * base * 2 * 4096 / 128256
    assert costs[DEPTH].compute(31) == block
    assert costs[DEPTH].parameters("head").count > costs[0].parameters("head").count + DEPTH * 218e6


def test_plan_prints_what_the_modules_cost() -> None:
    run = load_run(
        None, ["model=llama3-8b", "cluster=dgx-h100-16", "train.global_batch=16", "model.prediction_depth=2"]
    )
    tested = plan_of(1, 2, {"shard": 8})
    text = dict(facts(run, tested))["prediction"]
    without, whole = (
        flops_per_token(replace(run.model, prediction_depth=depth), 8192, causal=True) for depth in (0, 2)
    )
    share = 1 - without / whole
    assert text.startswith(f"2 modules with the head: 503M parameters, {share:.1%} of the FLOPs, ")
    assert "prediction" not in dict(facts(replace(run, model=replace(run.model, prediction_depth=0)), tested))
