"""Random plans: columns of a search and values derived from them equal those of each single plan."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.plan_costs import pricing
from meshwright.costs.step import step_cost
from meshwright.schedules.collective_counts import collective_counts
from meshwright.schedules.in_flight import NAMES
from meshwright.schedules.plan_schedule import stages_of, training_schedule
from meshwright.schedules.registry import refusal
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import STAGES_PER_RANK, balanced_stages
from meshwright.spec.model import ModelSpec, block_parameters
from meshwright.spec.plan import (
    AxisName,
    BatchPlan,
    ExpertPlan,
    LayerStrategy,
    MeshAxis,
    Plan,
    Recompute,
    SchedulePlan,
)
from meshwright.workload.layer_matmuls import layer_matmuls
from meshwright.workload.layer_messages import weight_collectives
from meshwright.workload.layouts import Layouts, layout_of, layouts_of, strategy_columns
from meshwright.workload.model_shape import shape_of
from meshwright.workload.rank_layers import balanced_layers
from meshwright.workload.step_shape import StepShape

MODELS = {name: from_plain(ModelSpec, MODEL_PRESETS[name]) for name in ("llama3-8b", "gpt3-13b", "qwen3-30b-a3b")}
TRAIN = TrainSpec(steps=1, global_batch=1, seq_len=4096)
HEAD = 1.5
"""Time of the head, in layers."""
AXES: tuple[AxisName, ...] = ("pipeline", "replicate", "shard", "context_ring", "context_ulysses", "tensor")


@st.composite
def plans(draw: Any, model: ModelSpec, strategy: LayerStrategy) -> Plan:
    sizes = {axis: draw(st.sampled_from((1, 2) if axis.startswith("context") else (1, 2, 4))) for axis in AXES}
    accumulate = draw(st.sampled_from((1, 2, 4, 8)))
    names = [name for name in NAMES if not refusal(name, sizes["pipeline"], accumulate, STAGES_PER_RANK.get(name, 1))]
    name = draw(st.sampled_from(names))
    table = balanced_stages(name, sizes["pipeline"], model.layers, HEAD)
    stages = tuple(tuple(f"{stage.start}-{stage.stop - 1}" for stage in stages) for stages in table)
    shards = sizes["shard"] * sizes["context_ring"] * sizes["context_ulysses"]
    expert = draw(st.sampled_from([size for size in (1, 2, 4) if shards % size == 0]))
    micro = draw(st.sampled_from((1, 2)))
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in sizes.items()),
        batch=BatchPlan(
            global_batch=micro * accumulate * sizes["replicate"] * sizes["shard"],
            micro_batch=micro,
            accumulate=accumulate,
        ),
        schedule=SchedulePlan(name=name, stages=() if len(table) == len(table[0]) == 1 else stages),
        layers=(strategy,),
        experts=ExpertPlan(expert=expert, expert_shard=shards // expert) if model.experts else None,
    )


strategies = st.builds(
    LayerStrategy,
    reshard=st.booleans(),
    gradients=st.sampled_from(("shard", "whole")),
    recompute=st.sampled_from(get_args(Recompute)),
    offload=st.sampled_from(("none", "activations", "both")),
)


@given(st.data(), st.sampled_from(sorted(MODELS)), strategies)
@settings(max_examples=40, deadline=None)
def test_search_columns_and_step_times_equal_those_of_single_plans(
    data: st.DataObject, name: str, strategy: LayerStrategy
) -> None:
    model = MODELS[name]
    drawn = data.draw(st.lists(plans(model, strategy), min_size=2, max_size=6))
    single = [layout_of(model, TRAIN, plan) for plan in drawn]

    def column(axis: str) -> np.ndarray:
        return np.array([plan.axis_size(axis) for plan in drawn])

    schedule = np.array([NAMES.index(plan.schedule.name) for plan in drawn])
    virtual = np.array([len(plan.schedule.stages[0]) if plan.schedule.stages else 1 for plan in drawn])
    vee = np.array([layout.vee for layout in single])
    strides = [field.name for field in fields(Layouts) if field.name.endswith("_stride")]
    batched = layouts_of(
        model,
        TRAIN,
        drawn[0].precision,
        column,
        schedule=schedule,
        virtual=np.where(column("pipeline") > 1, virtual, 1),
        expert=np.array([plan.experts.expert if plan.experts else 1 for plan in drawn]),
        micro_batch=np.array([plan.batch.micro_batch for plan in drawn]),
        accumulate=np.array([plan.batch.accumulate for plan in drawn]),
        layers=balanced_layers(model.layers, HEAD, column("pipeline"), virtual, vee),
        **{stride: np.array([getattr(layout, stride) for layout in single]) for stride in strides},
        **strategy_columns(strategy),
    )
    for field in fields(Layouts):
        values = np.broadcast_to(getattr(batched, field.name), len(drawn))
        assert values == pytest.approx([getattr(layout, field.name) for layout in single]), field.name
    priced = [pricing(model, TRAIN, plan, ClusterSpec(gpu="H200", nodes=64, gpus_per_node=8)) for plan in drawn]
    assert priced[0] is not None
    seconds = step_cost(priced[0].shape, priced[0].machine, batched, priced[0].constants).seconds
    single_seconds = [step_cost(p.shape, p.machine, p.layout, p.constants).seconds for p in priced if p is not None]
    assert np.asarray(seconds) == pytest.approx(
        np.concatenate([np.atleast_1d(seconds_of_plan) for seconds_of_plan in single_seconds]), rel=1e-9
    )


@given(st.data(), strategies)
@settings(max_examples=40, deadline=None)
def test_numbers_of_gathers_and_reductions_equal_those_of_the_schedule(
    data: st.DataObject, strategy: LayerStrategy
) -> None:
    model = MODELS["llama3-8b"]
    plan = data.draw(plans(model, strategy))
    counts = collective_counts(training_schedule(plan, model.layers))
    layout = replace(layout_of(model, TRAIN, plan), keep_gathered=0.0)
    expected = tuple(map(float, weight_collectives(layout)))
    for number, stage in enumerate(stages_of(plan, model.layers)):
        first = stage.start == 0
        # A unit at the end of a stage may keep its weights from a forward to the next action's backward.
        inner = range(first + 1, first + len(stage) - 1)
        assert all(counts[number, unit] == expected for unit in inner)


@pytest.mark.parametrize("name", [*sorted(MODELS), "deepseek-v2-lite", "deepseek-v3"])
def test_matmuls_multiply_every_matrix_of_a_block_once(name: str) -> None:
    model = from_plain(ModelSpec, MODEL_PRESETS[name])
    for kind in range(len(model.block_kinds)):
        shape = shape_of(model, TRAIN.seq_len, kind=kind)
        matmuls = layer_matmuls(shape, StepShape(1, 1, 16, max(1, model.experts), 1), 1)
        elements = sum(float(matmul.k * matmul.n * matmul.count * matmul.layers) for matmul in matmuls)
        matrices = [parameter.shape for parameter in block_parameters(model, kind) if len(parameter.shape) > 1]
        assert elements == model.layers * sum(map(prod, matrices))
        work, half = (
            sum(float(matmul.m * matmul.k * matmul.n) for matmul in matmuls if matmul.role == "linear")
            for matmuls in (layer_matmuls(shape, StepShape(1, 1, 16, 1, 1), width) for width in (1, 2))
        )
        assert half == work / 2
        assert shape.scatters == model.layers * (
            1 if model.block_kinds[kind].moe and not model.shared_expert_hidden else 2
        )
