"""Strides of a layout's groups. The default axis order is tensor, context, shard, replicate, pipeline, innermost first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.constants import constants
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.step import step_cost
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import AxisName, BatchPlan, MeshAxis, Plan
from meshwright.workload.layouts import Layouts, layout_of
from meshwright.workload.model_shape import shape_of

LLAMA = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
SHAPE, K = shape_of(LLAMA, 8192), constants("hopper", "default")
NETWORK = NetworkSpec(fabric="infiniband", port_gb_per_s=50)
MACHINE = machine_of(ClusterSpec(gpu="H100", nodes=64, gpus_per_node=8, network=NETWORK))
DEFAULT: tuple[AxisName, ...] = ("pipeline", "replicate", "shard", "context_ring", "tensor")
STRIDES = ("tensor_stride", "ring_stride", "ulysses_stride", "shard_stride", "replicate_stride", "pipeline_stride")


def layout_with(sizes: dict[AxisName, int], order: tuple[AxisName, ...] = DEFAULT) -> Layouts:
    mesh = tuple(MeshAxis(axis=axis, size=sizes.get(axis, 1)) for axis in order)
    batch = BatchPlan(global_batch=8 * sizes.get("replicate", 1) * sizes.get("shard", 1), micro_batch=1, accumulate=8)
    train = TrainSpec(steps=1, global_batch=batch.global_batch, seq_len=4096)
    return layout_of(LLAMA, train, Plan(mesh=mesh, batch=batch))


def seconds(layout: Layouts) -> float:
    return float(np.asarray(step_cost(SHAPE, MACHINE, layout, K).seconds))


@given(st.tuples(*[st.sampled_from((1, 2, 4))] * 5), st.sampled_from((0.0, 1.0, 3.0)))
@settings(deadline=None)  # the first example loads the constants
def test_strides_of_the_default_axis_order_are_the_default(sizes: tuple[int, ...], zero: float) -> None:
    with_strides = replace(layout_with(dict(zip(DEFAULT, sizes, strict=True))), zero=zero)
    without_strides = replace(with_strides, **dict.fromkeys(STRIDES, 0.0))
    assert seconds(with_strides) == seconds(without_strides)


def test_axis_order_decides_whether_gathers_or_replica_sums_cross_nodes() -> None:
    """Gathers use network ports if shards are on several nodes, and replica sums use links if replicas share a node."""
    sizes = {"replicate": 8, "shard": 8}
    shards_inside, replicas_inside = layout_with(sizes), layout_with(sizes, ("shard", "replicate"))
    assert (
        shards_inside.shard_step,
        shards_inside.replicate_step,
        replicas_inside.shard_step,
        replicas_inside.replicate_step,
    ) == (1, 8, 8, 1)
    default, swapped = (step_cost(SHAPE, MACHINE, layout, K).exposed for layout in (shards_inside, replicas_inside))
    assert swapped["shard"] > 3 * default["shard"]
    assert swapped["data"] < default["data"]
    assert replicas_inside.data_step == shards_inside.data_step == 1


def test_stage_boundaries_across_nodes_are_slower() -> None:
    sizes = {"pipeline": 8, "shard": 8}
    across, in_node = layout_with(sizes), layout_with(sizes, ("shard", "pipeline"))
    edges = [float(step_cost(SHAPE, MACHINE, layout, K).exposed["pipeline"]) for layout in (across, in_node)]
    assert edges[0] > edges[1]


def test_tensor_ranks_across_nodes_are_slow() -> None:
    sizes = {"shard": 8, "tensor": 8}
    inner, outer = layout_with(sizes), layout_with(sizes, ("tensor", "shard"))
    assert (inner.tensor_step, outer.tensor_step, outer.shard_step) == (1, 8, 1)
    inner_seconds, outer_seconds = (
        float(step_cost(SHAPE, MACHINE, layout, K).exposed["tensor"]) for layout in (inner, outer)
    )
    assert outer_seconds > 3 * inner_seconds


def test_strides_of_shards_with_replicas_and_context_ranks() -> None:
    """Eight ranks share a replica: two adjacent context ranks, and four such pairs with one pair of the other replica between."""
    layout = layout_with({"shard": 4, "replicate": 2, "context_ring": 2}, ("shard", "replicate", "context_ring"))
    assert (layout.shard_step, layout.ring_step, layout.replicate_step) == (2, 1, 2)
    assert layout.data_step == pytest.approx(1)
