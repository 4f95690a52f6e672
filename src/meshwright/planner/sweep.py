"""First step of the search: estimates every layout (point) in closed form, that is by formulas, the most promising first.

The strategies of a point (reshard, recompute, offload) are priced only if the point's lower bound allows it to be among the best. The
result is the same as if all strategies were priced.

A strategy has two layer settings, its high-memory and its low-memory end (say, without and with recompute). All layers have the same size,
so only the number of layers at each end matters. Memory and time are linear in that number, so a division gives the fewest low-memory
layers that fit. Time is not linear where one end offloads activations and the other does not (`_ActivationOffloadCosts`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.layer_costs import LayerCosts
from meshwright.costs.offload_costs import host_memory_bytes
from meshwright.costs.plan_costs import Pricing
from meshwright.costs.step import optimizer_seconds, owned_params
from meshwright.planner.candidate import host_budget, pins_of, precision_of
from meshwright.planner.closed_form import (
    SpaceCosts,
    closed_form_cost,
    layouts,
    least_bytes,
    peak_rank_bytes,
    select,
)
from meshwright.planner.conflicts import conflicts
from meshwright.planner.option_grid import OptionGrid
from meshwright.planner.space import SCHEDULES, Points
from meshwright.planner.strategies import (
    OFFLOAD_PAIRS,
    Strategy,
    StrategySet,
    lowest_memory_end,
    strategy_set_of,
)
from meshwright.spec.plan import LayerStrategy
from meshwright.spec.run import RunSpec
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts

BATCH_POINTS = 512
BATCH_GROWTH = 16
"""Points of the first batch that is priced in one call, and the limit on the growth of later ones.

Results of earlier batches exclude later points, so the first are small; a call costs as much as pricing a thousand points.
"""
BOUND_SAFETY = 0.97
"""Factor on a lower bound, as communication may overlap with compute that a strategy adds, such as recompute."""

MOST_REPLICAS = (1, 4, 16)
"""Limits between families: layouts with up to 1, 4, 16 or more replicas are in different ones."""


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep: the best points, the fastest first, each with its best strategy."""

    points: Points
    strategies: tuple[Strategy, ...]
    seconds: np.ndarray
    priced: int
    """As `SearchResult.considered`."""


def sweep(
    run: RunSpec,
    pricing: Pricing,
    points: Points,
    memory_limit: float,
    *,
    best: int,
    max_slowdown: float = 1.0,
    limit: float = np.inf,
    costs: SpaceCosts | None = None,
) -> SweepResult:
    """The `best` fastest points of each family that fit `memory_limit` bytes by the closed form; empty when none fits.

    Only points up to `max_slowdown` times the time of the fastest and below `limit` seconds are returned; with a `max_slowdown` of 1 the
    fastest alone. `costs` are those of `points`, if an earlier sweep has computed some.
    """
    costs = costs or SpaceCosts(run, pricing, points)
    bound = costs.lower_bounds
    strategy_set = strategy_set_of(run, points.offloads)
    order = np.argsort(bound, kind="stable")
    leaders = _FastestByFamily(best, max_slowdown, _families(points), limit)
    priced = len(points)
    for batch in _growing_batches(order):
        if bound[batch[0]] * BOUND_SAFETY > leaders.limit:
            break
        batch = batch[bound[batch] * BOUND_SAFETY < leaders.worst(batch)]
        batch = batch[costs.min_bytes(batch) <= memory_limit]
        if not len(batch):
            continue
        indices, strategies, seconds = _best_strategies(
            run,
            pricing,
            points.take(batch),
            memory_limit,
            strategy_set,
            leaders.worst(batch),
            costs.inside_layers(batch),
        )
        leaders.add(batch[indices], strategies, seconds)
        priced += len(batch) * len(strategy_set.strategies)
    indices, strategies, seconds = leaders.sorted()
    return SweepResult(points.take(indices), strategies, seconds, priced)


def _growing_batches(order: np.ndarray) -> Iterator[np.ndarray]:
    """`order` in consecutive parts, each as long as all before it, up to a limit."""
    start = 0
    while start < len(order):
        size = min(max(BATCH_POINTS, start), BATCH_POINTS * BATCH_GROWTH)
        yield order[start : start + size]
        start += size


def _families(points: Points) -> np.ndarray:
    """Family number of each point.

    Points of a family share the axes that split a model or a sequence, the schedule, the number of virtual stages, and about the number
    of replicas (`MOST_REPLICAS`). The closed form deviates by a similar factor for all of them.
    """
    by_mesh = [(mesh.inner, bisect_left(MOST_REPLICAS, mesh.size("replicate"))) for mesh in points.meshes]
    number_of = {family: number for number, family in enumerate(dict.fromkeys(by_mesh))}
    number = np.array([number_of[family] for family in by_mesh])[points.mesh]
    for column in (points.schedule, points.virtual):
        number = number * (int(column.max(initial=0)) + 1) + column
    return np.unique(number, return_inverse=True)[1].reshape(-1)


def strategies_in(run: RunSpec, pricing: Pricing, points: Points, memory_limit: float) -> list[Strategy | None]:
    """Each point's fastest strategy that fits `memory_limit` bytes by the closed form."""
    best: list[Strategy | None] = [None] * len(points)
    fastest = np.full(len(points), np.inf)
    for index, strategy, seconds in zip(
        *_best_strategies(run, pricing, points, memory_limit, strategy_set_of(run, points.offloads), fastest),
        strict=True,
    ):
        if seconds < fastest[index]:
            best[index] = strategy
            fastest[index] = seconds
    return best


def smallest(run: RunSpec, points: Points, count: int) -> tuple[Points, Strategy]:
    """The `count` points that need the least memory, with their strategy of least memory; used in the error when nothing fits."""
    lowest_memory, gradients = lowest_memory_end(run)
    ends = [replace(lowest_memory, offload=offload) for offload in reversed(points.offloads)]
    strategies = [Strategy(end, end, gradients) for end in ends]
    strategy = strategies[0]
    compatible = _compatible(run, points, [strategy.layer(strategy.high_memory) for strategy in strategies])
    if compatible.any():
        first = int(compatible.any(axis=1).argmax())
        strategy = strategies[first]
        points = points.take(np.flatnonzero(compatible[first]))
    return points.take(np.argsort(least_bytes(run, points), kind="stable")[:count]), strategy


class _FastestByFamily:
    """Collects the `size` fastest points of each family with their strategies, up to `max_slowdown` times the fastest."""

    def __init__(self, size: int, max_slowdown: float, families: np.ndarray, limit: float) -> None:
        self.size = size
        self.max_slowdown = max_slowdown
        self.families = families
        self.strategies_by_point: dict[int, dict[int, list[tuple[float, Strategy]]]] = {}
        """By family, then by point index: (seconds, strategy) of the accepted strategies."""
        self.limit = limit
        self._worst = np.full(int(families.max(initial=0)) + 1, np.inf)

    def worst(self, indices: np.ndarray) -> np.ndarray:
        """For each point, seconds from which its strategies are rejected."""
        return np.minimum(self._worst[self.families[indices]], self.limit)

    def add(self, indices: np.ndarray, strategies: Sequence[Strategy], seconds: np.ndarray) -> None:
        """Add entries of (point index, strategy, seconds); a point may have several."""
        self.limit = min(self.limit, self.max_slowdown * float(seconds.min(initial=np.inf)) * (1 + 1e-12))
        changed_families = set()
        for position in map(int, np.flatnonzero(seconds < self.worst(indices))):
            index = int(indices[position])
            family = int(self.families[index])
            self.strategies_by_point.setdefault(family, {}).setdefault(index, []).append(
                (float(seconds[position]), strategies[position])
            )
            changed_families.add(family)
        for family in changed_families:
            points = sorted(
                self.strategies_by_point[family].items(), key=lambda item: (_least_seconds(item[1]), item[0])
            )
            self.strategies_by_point[family] = dict(points[: self.size])
            if len(points) >= self.size:
                self._worst[family] = _least_seconds(points[self.size - 1][1])

    def sorted(self) -> tuple[np.ndarray, tuple[Strategy, ...], np.ndarray]:
        ranked = sorted(
            (
                (seconds, index, strategy)
                for points in self.strategies_by_point.values()
                for index, candidates in points.items()
                for seconds, strategy in candidates
                if seconds <= self.limit
            ),
            key=lambda entry: entry[:2],
        )
        return (
            np.array([index for _, index, _ in ranked], dtype=np.int64),
            tuple(strategy for _, _, strategy in ranked),
            np.array([seconds for seconds, _, _ in ranked]),
        )


def _least_seconds(candidates: Sequence[tuple[float, Strategy]]) -> float:
    return min(seconds for seconds, _ in candidates)


def _best_strategies(
    run: RunSpec,
    pricing: Pricing,
    points: Points,
    memory_limit: float,
    strategy_set: StrategySet,
    worst: np.ndarray,
    layers: LayerCosts | None = None,
) -> tuple[np.ndarray, list[Strategy], np.ndarray]:
    """(point index, strategy, seconds) of the fastest fitting strategy of each class, where below the point's `worst` seconds."""
    grid = strategy_set.grid
    base_layout = layouts(run, points, grid.options[0])
    cost = closed_form_cost(pricing, grid.layouts(base_layout), layers)
    seconds = grid.flat(cost.seconds, len(points))
    update = grid.flat(cost.optimizer, len(points))
    applicable = _applicable(run, points, grid.options)
    # A mixture of two settings takes at least as long as the faster of them. Offloaded state may stay on the device in part.
    least = seconds - grid.offloads_optimizer[:, None] * update
    promising = np.flatnonzero(np.min(least, axis=0, where=applicable, initial=np.inf) < worst)
    if not len(promising):
        return promising, [], np.zeros(0)
    layout = select(base_layout, promising)
    allowed = applicable[:, promising]
    worst = worst[promising]
    layers = layers and select(layers, promising)
    memory_needs = _memory_needs(run, pricing, grid.layouts(layout))
    priced = _UniformCosts(seconds[:, promising], *(grid.flat(needs, len(promising)) for needs in memory_needs))
    possible = allowed & (least[:, promising] < worst)
    forward = grid.flat(cost.forward, len(points))[:, promising]
    uniform = _with_state_on_device(
        run, pricing, layout, grid, priced, memory_limit, possible, forward, update[:, promising]
    )
    activation_offload = _ActivationOffloadCosts(run, pricing, layout, strategy_set, layers)
    mixed = _strategy_seconds(run, priced, uniform, strategy_set, memory_limit, activation_offload, allowed, worst)
    indices = []
    strategies = []
    seconds_by_class = []
    for members in strategy_set.classes:
        best = members[mixed[members].argmin(axis=0)]
        best_seconds = mixed[best, np.arange(len(promising))]
        accepted = np.flatnonzero(best_seconds < worst)
        indices.append(promising[accepted])
        strategies += [strategy_set.strategies[position] for position in best[accepted]]
        seconds_by_class.append(best_seconds[accepted])
    return np.concatenate(indices), strategies, np.concatenate(seconds_by_class)


def _applicable(run: RunSpec, points: Points, options: Sequence[LayerStrategy]) -> np.ndarray:
    """(layer settings, points): whether the setting differs from the other settings there, and breaks no rule with its schedule."""
    pins = pins_of(run)
    precision = precision_of(run)
    sharded = points.column("shard") * points.column("context") > 1
    accumulates = (points.accumulate > 1) & (points.schedule != SCHEDULES.index("breadth_first"))
    everywhere = np.ones(len(points), bool)
    conflicting = conflicts(
        run,
        trainable=points.trainable,
        schedule=np.array(SCHEDULES)[:, None],
        expert=points.column("expert"),
        tensor=points.column("tensor"),
    )
    by_schedule = np.broadcast_to(conflicting, (len(SCHEDULES), len(points)))
    compatible = _compatible(run, points, options) & ~by_schedule[points.schedule, np.arange(len(points))]
    allowed = {}
    """By setting, whether a point allows it. With whole gradients elsewhere every rank reduces once a step anyway."""
    allowed["reshard"] = sharded | (precision.compute != precision.stored) if pins.reshard is None else everywhere
    allowed["whole"] = sharded & accumulates if pins.gradients is None else everywhere
    return np.array(
        [
            compatible[index]
            & (allowed["reshard"] if option.reshard else everywhere)
            & (allowed["whole"] if option.gradients == "whole" else everywhere)
            for index, option in enumerate(options)
        ]
    )


def _compatible(run: RunSpec, points: Points, options: Sequence[LayerStrategy]) -> np.ndarray:
    """(layer settings, points): whether the setting breaks no rule with the point's schedule."""
    conflicting = conflicts(
        run,
        trainable=points.trainable,
        schedule=np.array(SCHEDULES),
        recompute=np.array([[option.recompute] for option in options]),
        offload=np.array([[option.offload] for option in options]),
    )
    return ~np.broadcast_to(conflicting, (len(options), len(SCHEDULES)))[:, points.schedule]


@dataclass(frozen=True)
class _UniformCosts:
    """(layer settings, points): costs if all layers had that setting."""

    seconds: np.ndarray
    bytes: np.ndarray
    """Bytes of device memory on the fullest rank."""
    host_bytes: np.ndarray
    """Bytes of host memory that all devices of one host use together."""


def _memory_needs(run: RunSpec, pricing: Pricing, layout: Layouts) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the fullest rank, and of host memory that all devices of one host use together."""
    bytes_per_device = host_memory_bytes(pricing.shape, layout, owned_params(pricing.shape, layout))
    return peak_rank_bytes(run, layout), run.cluster.gpus_per_node * np.asarray(bytes_per_device)


def _with_state_on_device(
    run: RunSpec,
    pricing: Pricing,
    layout: Layouts,
    grid: OptionGrid,
    priced: _UniformCosts,
    memory_limit: float,
    possible: np.ndarray,
    forward: np.ndarray,
    update: np.ndarray,
) -> _UniformCosts:
    """The costs with as much of the offloaded optimizer state on the device as fits there, where a setting is `possible`.

    `priced` has the costs with all of it in host memory, or the share that a pin or the hosts' memory allows. `forward` and `update` are
    those of the `StepCost`; only the update depends on the share.
    """
    if pins_of(run).offload_fraction is not None:
        return priced
    state = grid.offloads_optimizer[:, None] * np.asarray(owned_params(pricing.shape, layout) * layout.state_bytes)
    free = np.clip((memory_limit - priced.bytes) / np.maximum(state, 1.0), 0.0, 1.0)
    kept = np.where(possible & (state > 0), free, 0.0)
    chosen = np.flatnonzero((kept > 0).any(axis=0))
    if not len(chosen):
        return priced
    part = grid.layouts(select(layout, chosen))
    part = replace(part, state_bytes=part.state_bytes * (1 - grid.spread(kept[:, chosen])))
    shorter = optimizer_seconds(
        pricing.shape, pricing.machine, part, pricing.constants, grid.spread(forward[:, chosen])
    )
    seconds = priced.seconds.copy()
    seconds[:, chosen] += grid.flat(shorter, len(chosen)) - update[:, chosen]
    host_bytes = priced.host_bytes - run.cluster.gpus_per_node * kept * state
    return _UniformCosts(seconds, priced.bytes + kept * state, host_bytes)


def _strategy_seconds(
    run: RunSpec,
    priced: _UniformCosts,
    uniform: _UniformCosts,
    strategy_set: StrategySet,
    memory_limit: float,
    activation_offload: _ActivationOffloadCosts,
    applicable: np.ndarray,
    worst: np.ndarray,
) -> np.ndarray:
    """Seconds by strategy and point with the fewest low-memory layers that fit.

    Infinite where none fit, where no low-memory layer is needed (the strategy whose two ends both are the high-memory end covers that
    case), and where the seconds cannot be below `worst`. Mixtures are computed only where they are possible: for one pair in ten.
    """
    high = strategy_set.high_memory
    low = strategy_set.low_memory
    fits = applicable & (priced.bytes <= memory_limit)
    fast = priced.seconds < worst
    seconds = np.full((len(high), len(worst)), np.inf)
    seconds[high == low] = np.where(fits & (uniform.host_bytes <= host_budget(run)), uniform.seconds, np.inf)[
        high[high == low]
    ]
    possible = (applicable & (priced.bytes > memory_limit))[high] & fits[low] & (fast[high] | fast[low])
    # Offload of activations makes no step faster, but it may hide other communication.
    offloads = strategy_set.adds_activation_offload
    possible[offloads] &= (priced.seconds * BOUND_SAFETY < worst)[high[offloads]]
    strategies, columns = np.nonzero(possible)
    high = high[strategies]
    low = low[strategies]
    offloading = activation_offload.of(strategies, columns)
    high_bytes = priced.bytes[high, columns]
    high_bytes[offloading.pairs] = offloading.bytes()
    low_bytes = priced.bytes[low, columns]
    share = _low_memory_share(high_bytes, low_bytes, memory_limit, run.model.layers)

    def mean(high_values: np.ndarray, low_values: np.ndarray) -> np.ndarray:
        return (1 - share) * high_values + share * low_values

    low_seconds = priced.seconds[low, columns]
    low_seconds[offloading.pairs] = offloading.low_memory_seconds(share[offloading.pairs])
    allowed = (share > 0) & (share <= 1) & (mean(high_bytes, low_bytes) <= memory_limit * (1 + 1e-9))
    allowed &= mean(priced.host_bytes[high, columns], priced.host_bytes[low, columns]) <= host_budget(run)
    seconds[strategies, columns] = np.where(allowed, mean(priced.seconds[high, columns], low_seconds), np.inf)
    return seconds


class _ActivationOffloadCosts:
    """Costs of strategies whose low-memory end offloads activations: offload cost is not linear in the number of layers moved."""

    def __init__(
        self, run: RunSpec, pricing: Pricing, layout: Layouts, strategy_set: StrategySet, layers: LayerCosts | None
    ) -> None:
        self.run = run
        self.pricing = pricing
        self.layout = layout
        self.layers = layers
        offloads = strategy_set.grid.offloads
        self.grid = replace(strategy_set.grid, offloads=tuple(pair[1] for pair in OFFLOAD_PAIRS if pair[1] in offloads))
        """The low-memory ends of these strategies."""
        position_of = {option: position for position, option in enumerate(self.grid.options)}
        low_memory = [strategy_set.grid.options[option] for option in strategy_set.low_memory]
        self.positions = np.array([position_of.get(option, -1) for option in low_memory], dtype=np.int64)
        """By strategy, its low-memory end in `grid`; -1 for others."""
        self.adds_offload = strategy_set.adds_activation_offload

    def of(self, strategies: np.ndarray, points: np.ndarray) -> _OffloadingPairs:
        """Return the pairs (strategy, point) whose low-memory end adds offload."""
        pairs = np.flatnonzero(self.adds_offload[strategies])
        distinct, columns = np.unique(points[pairs], return_inverse=True)
        return _OffloadingPairs(self, pairs, distinct, self.positions[strategies[pairs]], columns.reshape(-1))


@dataclass(frozen=True)
class _OffloadingPairs:
    """Pairs (strategy, point), computed in one array of all such strategies at all such points."""

    costs: _ActivationOffloadCosts
    pairs: np.ndarray
    points: np.ndarray
    ends: np.ndarray
    columns: np.ndarray
    """By pair: index of the low-memory end, and of the point in `points`."""

    def bytes(self) -> np.ndarray:
        """Bytes of the fullest rank as the share of offloaded layers approaches 0, including the buffers of the copies."""
        if not len(self.pairs):
            return np.zeros(0)
        return self._by_pair(peak_rank_bytes(self.costs.run, self._with_share_offloaded(1e-9)))

    def low_memory_seconds(self, share: np.ndarray) -> np.ndarray:
        """Seconds of the low-memory layers, a `share` of all: the fewer, the more forward compute each copy overlaps with."""
        if not len(self.pairs):
            return np.zeros(0)
        shares = np.zeros((len(self.costs.grid.options), len(self.points)))
        shares[self.ends, self.columns] = share
        layout = self._with_share_offloaded(self.costs.grid.spread(shares))
        layers = self.costs.layers and select(self.costs.layers, self.points)
        return self._by_pair(closed_form_cost(self.costs.pricing, layout, layers).seconds)

    def _with_share_offloaded(self, share: Array) -> Layouts:
        layout = self.costs.grid.layouts(select(self.costs.layout, self.points))
        return replace(layout, offload_activations=share)

    def _by_pair(self, costs: np.ndarray) -> np.ndarray:
        return self.costs.grid.flat(costs, len(self.points))[self.ends, self.columns]


def _low_memory_share(high_memory: np.ndarray, low_memory: np.ndarray, memory_limit: float, layers: int) -> np.ndarray:
    """Fewest layers with the low-memory setting that fit, as a share of all layers; above 1 if all of them do not fit.

    A plan of 32 layers needs 90 GB, 50 GB if all recompute, and has 80 GB: 8 layers recompute and save 40 · 8/32 GB.

    >>> _low_memory_share(np.array([90.0]), np.array([50.0]), memory_limit=80.0, layers=32) * 32
    array([8.])
    """
    excess_bytes = high_memory - memory_limit
    saved_bytes = np.where(high_memory > low_memory, high_memory - low_memory, 1e-9)
    share = np.where(excess_bytes <= 0, 0.0, np.minimum(excess_bytes / saved_bytes, 2.0))
    return np.ceil(np.minimum(share, 2.0) * layers - 1e-9) / layers
