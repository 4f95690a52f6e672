"""Where a layout's groups lie: by default tensor, context, shards, replicas, pipeline from the innermost outward."""

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


def laid(sizes: dict[AxisName, int], order: tuple[AxisName, ...] = DEFAULT) -> Layouts:
    mesh = tuple(MeshAxis(axis=axis, size=sizes.get(axis, 1)) for axis in order)
    batch = BatchPlan(global_batch=8 * sizes.get("replicate", 1) * sizes.get("shard", 1), micro_batch=1, accumulate=8)
    train = TrainSpec(steps=1, global_batch=batch.global_batch, seq_len=4096)
    return layout_of(LLAMA, train, Plan(mesh=mesh, batch=batch))


def seconds(layout: Layouts) -> float:
    return float(np.asarray(step_cost(SHAPE, MACHINE, layout, K).seconds))


@given(st.tuples(*[st.sampled_from((1, 2, 4))] * 5), st.sampled_from((0.0, 1.0, 3.0)))
@settings(deadline=None)  # the first example loads the constants
def test_in_the_default_order_strides_change_nothing(sizes: tuple[int, ...], zero: float) -> None:
    placed = replace(laid(dict(zip(DEFAULT, sizes, strict=True))), zero=zero)
    unsaid = replace(placed, **dict.fromkeys(STRIDES, 0.0))
    assert seconds(placed) == seconds(unsaid)


def test_copies_inside_and_shards_across() -> None:
    """Gathers go by ports where shards lie across nodes, and sums over copies by links where these share a node."""
    sizes = {"replicate": 8, "shard": 8}
    outside, inside = laid(sizes), laid(sizes, ("shard", "replicate"))
    assert (outside.shard_step, outside.replicate_step, inside.shard_step, inside.replicate_step) == (1, 8, 8, 1)
    cost, turned = (step_cost(SHAPE, MACHINE, layout, K).exposed for layout in (outside, inside))
    assert turned["shard"] > 3 * cost["shard"]
    assert turned["data"] < cost["data"]
    assert inside.data_step == outside.data_step == 1


def test_a_boundary_goes_by_what_it_crosses() -> None:
    sizes = {"pipeline": 8, "shard": 8}
    across, beside = laid(sizes), laid(sizes, ("shard", "pipeline"))
    edges = [float(step_cost(SHAPE, MACHINE, layout, K).exposed["pipeline"]) for layout in (across, beside)]
    assert edges[0] > edges[1]


def test_tensor_ranks_across_nodes_are_slow() -> None:
    sizes = {"shard": 8, "tensor": 8}
    inner, outer = laid(sizes), laid(sizes, ("tensor", "shard"))
    assert (inner.tensor_step, outer.tensor_step, outer.shard_step) == (1, 8, 1)
    cost, turned = (float(step_cost(SHAPE, MACHINE, layout, K).exposed["tensor"]) for layout in (inner, outer))
    assert turned > 3 * cost


def test_shards_with_copies_between_them_and_their_context_ranks() -> None:
    """Eight hold a copy: two context ranks side by side, four such pairs two pairs apart."""
    layout = laid({"shard": 4, "replicate": 2, "context_ring": 2}, ("shard", "replicate", "context_ring"))
    assert (layout.shard_step, layout.ring_step, layout.replicate_step) == (2, 1, 2)
    assert layout.data_step == pytest.approx(1)
