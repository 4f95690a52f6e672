"""The closed form of the cost model for many points of the search space: seconds of a step, and bytes of the fullest rank.

A point is a mesh with a micro-batch size, a schedule and so on. Costs inside layers depend on few of its columns. So hundreds of thousands
of points share a few thousand different costs, and each of these is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from meshwright.costs.layer_costs import LayerCosts, layer_costs
from meshwright.costs.plan_costs import Pricing
from meshwright.costs.step import StepCost, step_cost
from meshwright.planner.candidate import (
    accumulation_of,
    mlp_tile_of,
    offload_fraction_of,
    offload_staging_of,
    pins_of,
    precision_of,
)
from meshwright.planner.schedule_choice import head_in_layers
from meshwright.planner.space import SCHEDULES, Points
from meshwright.planner.strategies import lowest_memory_end, strategy_set_of
from meshwright.spec.layout import V_SCHEDULES
from meshwright.spec.plan import LayerStrategy
from meshwright.spec.run import RunSpec
from meshwright.workload.expected_loads import received_room
from meshwright.workload.layout_bytes import layout_peak_bytes
from meshwright.workload.layouts import Layouts, layouts_of, strategy_columns
from meshwright.workload.plan_bytes import formats
from meshwright.workload.rank_layers import balanced_layers

ORDER_COLUMNS = {"ring stride", "ulysses stride", "shard stride", "replicate stride", "pipeline stride", "pace", "port"}
"""Columns of a mesh that depend only on the order of its axes on the network. They do not affect memory."""
OUTSIDE_LAYERS = {
    "pipeline",
    "replicate",
    "shard",
    "data",
    "copied",
    "pace",
    "shard stride",
    "replicate stride",
    "pipeline stride",
}
"""Columns of a mesh that do not affect the costs inside layers; it only matters whether there is a pipeline.

Apart from the mesh, these costs depend on the size of a micro-batch, and on whether the schedule runs two micro-batches together.
"""
CACHED_POINTS = 1 << 14
"""Points that are computed in one call, so few that the arrays stay in the processor's cache."""
T = TypeVar("T")


class SpaceCosts:
    """Computes costs of the points of a search space. Results that several points share are computed once and kept."""

    def __init__(self, run: RunSpec, pricing: Pricing, points: Points) -> None:
        self._run = run
        self._pricing = pricing
        self._points = points
        self.grid = strategy_set_of(run, points.offloads).grid
        """All layer settings that the run's strategies may use."""

    def inside_layers(self, indices: np.ndarray) -> LayerCosts:
        """Return the costs inside the layers for the points at `indices` (last axis), for all settings of `grid` (earlier axes)."""
        return select(self._by_layer_key, self._layer_keys[1][indices])

    @cached_property
    def lower_bounds(self) -> np.ndarray:
        """For each point, a lower bound on the seconds of a step with any strategy.

        It leaves out what depends on the strategy: exposed collectives of the shard axis, data traffic and the optimizer.
        """
        high_memory = LayerStrategy(reshard=False, recompute=self.grid.recomputes[0], gradients="whole")
        least_recompute = _mapped(self._by_layer_key, lambda column: column[(0,) * (column.ndim - 1)])
        bounds = []
        for start in range(0, len(self._points), CACHED_POINTS):
            part = np.arange(start, min(start + CACHED_POINTS, len(self._points)))
            cost = step_cost(
                self._pricing.shape,
                self._pricing.machine,
                layouts(self._run, self._points.take(part), high_memory),
                self._pricing.constants,
                layers=select(least_recompute, self._layer_keys[1][part]),
            )
            bounds.append(cost.seconds - (cost.exposed["shard"] + cost.exposed["data"] + cost.optimizer))
        return np.concatenate(bounds)

    def min_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Return for the points at `indices` the bytes of the fullest rank, with the strategy that needs the least memory."""
        keys = self._memory_keys[indices]
        # Each memory key that is not computed yet (NaN) is computed once, for the first of its points. Known keys become -1, which
        # `unique` sorts first, so the last entries of `first` belong to the unknown keys.
        unknown, first = np.unique(np.where(np.isnan(self._min_bytes[keys]), keys, -1), return_index=True)
        if len(unknown := unknown[unknown >= 0]):
            priced = self._points.take(indices[first[-len(unknown) :]])
            self._min_bytes[unknown] = least_bytes(self._run, priced)
        return self._min_bytes[keys]

    @cached_property
    def _layer_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """(for each key the first point that has it, for each point the index of its key).

        Points with equal keys have equal costs inside layers. A key combines mesh columns, micro-batch size and whether the schedule is
        paired into one number.
        """
        points = self._points
        by_mesh = self._mesh_numbers(OUTSIDE_LAYERS, points.mesh_columns["pipeline"] > 1)
        keys = by_mesh[points.mesh] * (int(points.micro.max()) + 1) + points.micro
        keys = 2 * keys + (points.schedule == SCHEDULES.index("paired"))
        _, first, index = np.unique(keys, return_index=True, return_inverse=True)
        return first, index.reshape(-1)

    @cached_property
    def _by_layer_key(self) -> LayerCosts:
        layout = self.grid.layouts(layouts(self._run, self._points.take(self._layer_keys[0]), self.grid.options[0]))
        return layer_costs(self._pricing.shape, self._pricing.machine, layout, self._pricing.constants)

    @cached_property
    def _memory_keys(self) -> np.ndarray:
        """For each point, the number of its memory key. Points with equal keys need equal memory.

        A key combines mesh columns, micro-batch size, schedule and virtual stages. Together with the global batch, mesh and micro-batch
        size determine the number of micro-batches, so it is not part of the key.
        """
        points = self._points
        keys = self._mesh_numbers(ORDER_COLUMNS)[points.mesh]
        for column in (points.micro, points.schedule, points.virtual):
            keys = keys * (int(column.max()) + 1) + column
        return np.unique(keys, return_inverse=True)[1].reshape(-1)

    @cached_property
    def _min_bytes(self) -> np.ndarray:
        """By memory key, the result of `min_bytes`; NaN if it is not computed yet."""
        return np.full(int(self._memory_keys.max(initial=-1)) + 1, np.nan)

    def _mesh_numbers(self, left_out: Collection[str], *more: np.ndarray) -> np.ndarray:
        """Return a number for each mesh. Meshes that differ only in the `left_out` columns have the same number."""
        columns = [column for name, column in self._points.mesh_columns.items() if name not in left_out]
        return np.unique(np.stack([*columns, *more], axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def least_bytes(run: RunSpec, points: Points) -> np.ndarray:
    """Return for each point the bytes of the fullest rank, with the strategy that needs the least memory."""
    end, _ = lowest_memory_end(run)
    # No strategy needs the least memory everywhere, so several are computed:
    # - Full recompute needs all activations of one block at a time. On a rank with few layers this may be more than it saves.
    # - An offloaded optimizer needs buffers for its chunks.
    # - Gradients that are reduced after every micro-batch need buffers while all activations are stored.
    grid = replace(strategy_set_of(run, points.offloads).grid, reshards=(end.reshard,))
    layout = grid.layouts(layouts(run, points, grid.options[0]))
    return grid.flat(peak_rank_bytes(run, layout), len(points)).min(axis=0)


def layouts(run: RunSpec, points: Points, layer: LayerStrategy) -> Layouts:
    """Return the cost model's columns for `points`, if all layers have the strategy `layer`."""
    pipeline = points.column("pipeline")
    v_placement = np.isin(points.schedule, [SCHEDULES.index(name) for name in V_SCHEDULES])
    strides = ("ring", "ulysses", "shard", "replicate", "pipeline")
    return layouts_of(
        run.model,
        run.train,
        precision_of(run),
        points.column,
        expert=points.column("expert"),
        schedule=points.schedule,
        virtual=points.virtual,
        micro_batch=points.micro,
        accumulate=points.accumulate,
        layers=balanced_layers(run.model.layers, head_in_layers(run), pipeline, points.virtual, v_placement),
        weights_by_copy_engine=points.column("copied"),
        tokens_by_copy_engine=points.column("tokens copied"),
        offload_fraction=offload_fraction_of(run),
        offload_staging=offload_staging_of(run),
        sums_on_host=float(accumulation_of(run) == "host"),
        slowest_rank_ratio=points.column("pace"),
        port=points.column("port"),
        **{f"{axis}_stride": points.column(f"{axis} stride") for axis in strides},
        **strategy_columns(layer),
    )


def select(columns: T, indices: np.ndarray) -> T:
    """Select the points `indices` in a dataclass of arrays whose last axis is points. Arrays with one entry hold for all points.

    The second of three points; `backward` is the same for all:

    >>> from meshwright.costs.compute import ForwardBackward
    >>> select(ForwardBackward(np.array([1.0, 2.0, 3.0]), np.array([4.0])), np.array([1]))
    ForwardBackward(forward=array([2.]), backward=array([4.]))
    """
    return _mapped(columns, lambda column: column[..., indices] if column.shape[-1] > 1 else column)


def _mapped(columns: T, function: Callable[[np.ndarray], np.ndarray]) -> T:
    """Apply `function` to all arrays of a dataclass, also in nested dataclasses, and return the new dataclass."""

    def mapped(value: Any) -> Any:
        if is_dataclass(value):
            return _mapped(value, function)
        return function(value) if isinstance(value, np.ndarray) and value.ndim else value

    instance: Any = columns
    return type(columns)(**{field.name: mapped(getattr(columns, field.name)) for field in fields(instance)})


def closed_form_cost(pricing: Pricing, layout: Layouts, layers: LayerCosts | None = None) -> StepCost:
    """Return the cost of a step by the closed form. `layers` is as in `step_cost`."""
    return step_cost(pricing.shape, pricing.machine, layout, pricing.constants, layers=layers)


def peak_rank_bytes(run: RunSpec, layout: Layouts) -> np.ndarray:
    """Return the bytes of the fullest rank by the closed form, under each layout."""
    byte_widths = formats(
        run.train,
        precision_of(run),
        cpu=run.cluster.is_cpu,
        model=run.model,
        offload_fraction=offload_fraction_of(run),
        offload_staging=offload_staging_of(run),
        accumulation=accumulation_of(run),
        mlp_tile=mlp_tile_of(run),
    )
    pins = pins_of(run)
    buffered_rows = received_room(pins.expert_exchange, pins.expert_receive_bound, layout.expert)
    busiest_rows = np.where(buffered_rows > 0, buffered_rows, layout.busiest_rows)
    layout = replace(layout, busiest_rows=busiest_rows, exchange_room=buffered_rows)
    return np.asarray(layout_peak_bytes(run.model, layout, byte_widths))
