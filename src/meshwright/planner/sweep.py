"""The first layer of the search: every point of the space priced in closed form, the most promising first.

A point's strategies (what is gathered again, recomputed, offloaded) are tried only if the point could still be among the best: a bound
below the time of any strategy is known before. So nothing is lost against trying all of them, and most are never tried.

Layers are alike, so of two ends of a strategy (say, no layer recomputed and all of them) only the number of layers at each end matters,
and both time and memory are a straight line between: the fewest layers that make the point fit are found without a search. Time is no
such line where one end moves activations to host memory and the other keeps them (`_Moving`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations, product

import numpy as np

from meshwright.costs.offload_costs import waiting_bytes
from meshwright.costs.plan_costs import Pricing
from meshwright.costs.step import StepCost, owned_params, step_cost
from meshwright.planner.candidate import compiles, host_budget, pins_of, precision_of
from meshwright.planner.schedule_choice import head_in_layers
from meshwright.planner.space import SCHEDULES, Points
from meshwright.schedules.registry import entry_of
from meshwright.spec.layout import V_SCHEDULES
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import (
    PARTIAL_RECOMPUTES,
    RECOMPUTE_MODES,
    Gradients,
    LayerStrategy,
    Offload,
    PlanPins,
    Recompute,
)
from meshwright.spec.run import RunSpec
from meshwright.workload.arrays import Array
from meshwright.workload.layout_bytes import planned
from meshwright.workload.layouts import Layouts, layouts_of, strategy_columns
from meshwright.workload.plan_bytes import formats
from meshwright.workload.rank_layers import balanced_layers

BATCH = 512
"""Points whose strategies are priced together: what is reached so far tells what of the others to leave, and arrays of them stay small."""
SAFETY = 0.97
"""Of a bound, since communication may hide under work that a strategy adds."""
SPLITTING = [number for number, name in enumerate(SCHEDULES) if entry_of(name).splits_backward]
"""Schedules, by number, that put weight gradients off."""


@dataclass(frozen=True)
class End:
    """A strategy that all layers have."""

    reshard: bool
    recompute: Recompute
    offload: Offload = "none"


@dataclass(frozen=True)
class Strategy:
    """As many layers as must be at the `lean` end, the others at the `rich` one."""

    rich: End
    lean: End
    gradients: Gradients = "shard"

    def layer(self, end: End, text: str = "all") -> LayerStrategy:
        """One of its ends, for the layers that `text` names."""
        return LayerStrategy(
            range=text, reshard=end.reshard, gradients=self.gradients, recompute=end.recompute, offload=end.offload
        )


MOVING: tuple[tuple[Offload, Offload], ...] = (("none", "activations"), ("optimizer", "both"))
"""What may wait in host memory, without and with activations."""
PLAIN = Strategy(End(False, "none"), End(False, "none"))


@dataclass(frozen=True)
class Swept:
    """The best points, fastest first, each with its best strategy."""

    points: Points
    strategies: tuple[Strategy, ...]
    seconds: np.ndarray
    priced: int
    """Points and strategies that were priced, or told by a bound not to be among the best."""


def sweep(run: RunSpec, pricing: Pricing, points: Points, room: float, *, best: int, reach: float = 1.0) -> Swept:
    """The `best` points of each family that fit `room` bytes by the closed form, of those that take up to `reach` times the fastest; with a
    reach of 1 the fastest alone. Empty when none fits."""
    bound, ways = lower_bounds(run, pricing, points), _ways(run, points.offloads)
    order = np.argsort(bound, kind="stable")
    found = _Best(best, reach, _families(points))
    priced = len(points)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        if bound[batch[0]] * SAFETY > found.limit:
            break
        batch = batch[bound[batch] * SAFETY < found.worst(batch)]
        batch = batch[_least(run, points.take(batch)) <= room]
        if not len(batch):
            continue
        rows, strategies, seconds = _weighed(run, pricing, points.take(batch), room, ways, found.worst(batch))
        found.add(batch[rows], strategies, seconds)
        priced += len(batch) * len(ways.strategies)
    rows, strategies, seconds = found.sorted()
    return Swept(points.take(rows), strategies, seconds, priced)


def _families(points: Points) -> np.ndarray:
    """By point, the number of its family, about which the closed form is wrong alike: the axes that split a model or a sequence, the
    schedule, and whether there are replicas."""
    by_mesh = [(mesh.inner, mesh.size("replicate") > 1) for mesh in points.meshes]
    numbers = {family: number for number, family in enumerate(dict.fromkeys(by_mesh))}
    return np.array([numbers[family] for family in by_mesh])[points.mesh] * len(SCHEDULES) + points.schedule


def strategies_in(run: RunSpec, pricing: Pricing, points: Points, room: float) -> list[Strategy | None]:
    """Each point's fastest strategy that fits `room` bytes by the closed form."""
    found: list[Strategy | None] = [None] * len(points)
    fastest = np.full(len(points), np.inf)
    for place, strategy, seconds in zip(
        *_weighed(run, pricing, points, room, _ways(run, points.offloads), fastest), strict=True
    ):
        if seconds < fastest[place]:
            found[place], fastest[place] = strategy, seconds
    return found


def smallest(run: RunSpec, points: Points, count: int) -> tuple[Points, Strategy]:
    """The points that need least memory, and the strategy that makes them so: what to say where nothing fits."""
    leanest, gradients = _leanest(run)
    ends = [replace(leanest, offload=offload) for offload in reversed(points.offloads)]
    strategies = [Strategy(end, end, gradients) for end in ends]
    strategy = strategies[0]
    if points.trainable:
        rows = [_trained(run, points, one.layer(one.rich)) for one in strategies]
        first = next((number for number, row in enumerate(rows) if row.any()), None)
        if first is not None:
            strategy, points = strategies[first], points.take(np.flatnonzero(rows[first]))
    return points.take(np.argsort(_least(run, points), kind="stable")[:count]), strategy


class _Best:
    """The `size` best points of each family, each with its strategies; none that takes `reach` times the fastest."""

    def __init__(self, size: int, reach: float, families: np.ndarray) -> None:
        self.size, self.reach, self.families = size, reach, families
        self.kept: dict[int, dict[int, list[tuple[float, Strategy]]]] = {}
        """By family and point."""
        self.limit = np.inf
        self._worst = np.full(int(families.max(initial=0)) + 1, np.inf)

    def worst(self, rows: np.ndarray) -> np.ndarray:
        """Seconds from which on a strategy of each point is not kept."""
        return np.minimum(self._worst[self.families[rows]], self.limit)

    def add(self, rows: np.ndarray, strategies: Sequence[Strategy], seconds: np.ndarray) -> None:
        """Points, each as often as it has strategies."""
        self.limit = min(self.limit, self.reach * float(seconds.min(initial=np.inf)) * (1 + 1e-12))
        touched = set()
        for at in map(int, np.flatnonzero(seconds < self.worst(rows))):
            row = int(rows[at])
            family = int(self.families[row])
            self.kept.setdefault(family, {}).setdefault(row, []).append((float(seconds[at]), strategies[at]))
            touched.add(family)
        for family in touched:
            points = sorted(self.kept[family].items(), key=lambda item: (_least_seconds(item[1]), item[0]))
            self.kept[family] = dict(points[: self.size])
            if len(points) >= self.size:
                self._worst[family] = _least_seconds(points[self.size - 1][1])

    def sorted(self) -> tuple[np.ndarray, tuple[Strategy, ...], np.ndarray]:
        ranked = sorted(
            (
                (seconds, row, strategy)
                for points in self.kept.values()
                for row, ways in points.items()
                for seconds, strategy in ways
                if seconds <= self.limit
            ),
            key=lambda way: way[:2],
        )
        return (
            np.array([row for _, row, _ in ranked], dtype=np.int64),
            tuple(strategy for _, _, strategy in ranked),
            np.array([seconds for seconds, _, _ in ranked]),
        )


def _least_seconds(ways: Sequence[tuple[float, Strategy]]) -> float:
    return min(seconds for seconds, _ in ways)


def lower_bounds(run: RunSpec, pricing: Pricing, points: Points) -> np.ndarray:
    """For every point, seconds that no strategy beats."""
    richest = LayerStrategy(reshard=False, recompute=recomputes(run)[0], gradients="whole")
    cost = _cost(pricing, layouts(run, points, richest))
    return cost.seconds - (cost.exposed["shard"] + cost.exposed["data"] + cost.optimizer)


def _least(run: RunSpec, points: Points) -> np.ndarray:
    """For every point, bytes that no strategy undercuts."""
    end, _ = _leanest(run)
    # Recomputing may need more than it saves: a block's activations whole, of a rank that has few. So may an optimizer in host memory: room
    # for its chunks. And gradients reduced in every micro-batch: buffers beside all activations.
    kinds = [
        LayerStrategy(reshard=end.reshard, recompute=mode, gradients=gradients, offload=offload)
        for mode, gradients, offload in product(recomputes(run), _sums(run), points.offloads)
    ]
    return bytes_of_rank(run, _under(layouts(run, points, kinds[0]), kinds)).min(axis=0)


def _leanest(run: RunSpec) -> tuple[End, Gradients]:
    pins = pins_of(run)
    return End(_reshards(pins)[-1], recomputes(run)[-1]), _sums(run)[0]


@dataclass(frozen=True)
class _Ways:
    """The strategies that are tried, and what a layer may be under them."""

    strategies: tuple[Strategy, ...]
    kinds: tuple[LayerStrategy, ...]
    rich: np.ndarray
    """By strategy, the place of its ends among the kinds."""
    lean: np.ndarray
    moving: np.ndarray
    """Whether the lean end has activations in host memory where the rich one keeps them."""
    classes: tuple[np.ndarray, ...]
    """Places of the strategies about which the closed form is wrong alike: they recompute and move alike."""


def _ways(run: RunSpec, offloads: tuple[Offload, ...]) -> _Ways:
    return _ways_between(tuple(_pairs(run, offloads)), _sums(run))


@lru_cache(maxsize=8)
def _ways_between(pairs: tuple[tuple[End, End], ...], sums: tuple[Gradients, ...]) -> _Ways:
    strategies = [Strategy(rich, lean, gradients) for gradients in sums for rich, lean in pairs]
    ends = [[one.layer(one.rich), one.layer(one.lean)] for one in strategies]
    kinds = tuple(dict.fromkeys(kind for pair in ends for kind in pair))
    places = {kind: place for place, kind in enumerate(kinds)}
    rich, lean = np.array([[places[kind] for kind in pair] for pair in ends]).T
    moving = [
        not one.layer(one.rich).activations_offloaded and one.layer(one.lean).activations_offloaded
        for one in strategies
    ]
    alike = [(one.lean.recompute, one.lean.offload in ("activations", "both")) for one in strategies]
    classes = tuple(np.flatnonzero([one == kind for one in alike]) for kind in dict.fromkeys(alike))
    return _Ways(tuple(strategies), kinds, rich, lean, np.array(moving), classes)


def _weighed(
    run: RunSpec, pricing: Pricing, points: Points, room: float, ways: _Ways, worst: np.ndarray
) -> tuple[np.ndarray, list[Strategy], np.ndarray]:
    """The points, by place, of which a strategy takes less than their `worst` seconds, with the fastest of each class of strategies that
    does and its seconds."""
    plain = layouts(run, points, ways.kinds[0])
    seconds, able = ranked_seconds(pricing, _under(plain, ways.kinds)), _able(run, points, ways.kinds)
    # A mixture takes as long as the faster of its ends at least.
    near = np.flatnonzero(np.min(seconds, axis=0, where=able, initial=np.inf) < worst)
    if not len(near):
        return near, [], np.zeros(0)
    layout, legal = _taken(plain, near), able[:, near]
    priced = _Priced(seconds[:, near], *_held(run, pricing, _under(layout, ways.kinds)))
    moving = _Moving(run, pricing, layout, ways)
    mixed = np.where(legal[ways.rich] & legal[ways.lean], _mixed(run, priced, ways, room, moving), np.inf)
    rows, strategies, found = [], [], []
    for members in ways.classes:
        best = members[mixed[members].argmin(axis=0)]
        taken = mixed[best, np.arange(len(near))]
        kept = np.flatnonzero(taken < worst[near])
        rows.append(near[kept])
        strategies += [ways.strategies[number] for number in best[kept]]
        found.append(taken[kept])
    return np.concatenate(rows), strategies, np.concatenate(found)


def _able(run: RunSpec, points: Points, kinds: Sequence[LayerStrategy]) -> np.ndarray:
    """By kind and point, whether that is not another under a second name, or what this release does not train."""
    pins = pins_of(run)
    sharded = points.column("shard") * points.column("context") > 1
    many = (points.accumulate > 1) & (points.schedule != SCHEDULES.index("breadth_first"))
    able = np.ones((len(kinds), len(points)), bool)
    for row, kind in zip(able, kinds, strict=True):
        if kind.reshard and pins.reshard is None:
            row &= sharded
        if kind.gradients == "whole" and pins.gradients is None:
            row &= sharded & many  # reduced once a step in any case
        if points.trainable:
            row &= _trained(run, points, kind)
    return able


def _trained(run: RunSpec, points: Points, kind: LayerStrategy) -> np.ndarray:
    """By point, whether candidate.untrainable lets layers of this kind through. Where the pins ask for both of two things that do not go
    together, they are followed, and the plan says so."""
    pins, trained = pins_of(run), np.ones(len(points), bool)
    away = [layer for layer in pins.layers or (kind,) if layer.activations_offloaded]
    if away and not (pins.schedule and (pins.offload or pins.layers)):
        trained &= ~np.isin(points.schedule, SPLITTING)
    if away and not (pins.recompute and pins.offload) and not pins.layers and not compiles(run):
        trained &= kind.recompute not in PARTIAL_RECOMPUTES
    return trained


@dataclass(frozen=True)
class _Priced:
    """By kind and point, were it so for all layers."""

    seconds: np.ndarray
    bytes: np.ndarray
    """Of the fullest rank."""
    waiting: np.ndarray
    """Of one host's memory that all its devices take."""


def _held(run: RunSpec, pricing: Pricing, layout: Layouts) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the fullest rank, and of one host's memory that all its devices take."""
    each = waiting_bytes(pricing.shape, layout, owned_params(pricing.shape, layout))
    return bytes_of_rank(run, layout), run.cluster.gpus_per_node * np.asarray(each)


def _mixed(run: RunSpec, priced: _Priced, ways: _Ways, room: float, moving: _Moving) -> np.ndarray:
    """By strategy and point, seconds with as few layers at the lean end as fit; infinite where none does, or where the rich end alone says
    the same."""
    alone, rich = priced.bytes[ways.rich] <= room, priced.bytes[ways.rich]
    if len(moving.strategies):
        rich[moving.strategies] = moving.bytes()
    share = np.where(alone, 0.0, _share(rich, priced.bytes[ways.lean], room, run.model.layers))
    legal = (share <= 1) & ((share > 0) | (ways.rich == ways.lean)[:, None])

    def mean(rich: np.ndarray, by_kind: np.ndarray) -> np.ndarray:
        return (1 - share) * rich + share * by_kind[ways.lean]

    legal &= alone | (mean(rich, priced.bytes) <= room * (1 + 1e-9))
    legal &= mean(priced.waiting[ways.rich], priced.waiting) <= host_budget(run)
    seconds = mean(priced.seconds[ways.rich], priced.seconds)
    if legal[moving.strategies].any():
        seconds[moving.strategies] = moving.seconds(share[moving.strategies], priced.seconds)
    return np.where(legal, seconds, np.inf)


class _Moving:
    """What is no line between the ends: the strategies whose lean end moves activations that the rich one keeps."""

    def __init__(self, run: RunSpec, pricing: Pricing, layout: Layouts, ways: _Ways) -> None:
        self.strategies = np.flatnonzero(ways.moving)
        self._run, self._pricing, self._rich = run, pricing, ways.rich[self.strategies]
        self._lean = [ways.kinds[kind] for kind in ways.lean[self.strategies]]
        self._layout = layout

    def bytes(self) -> np.ndarray:
        """Of a rank that moves hardly anything, where some layers stay besides those that are kept."""
        return bytes_of_rank(self._run, self._moved(1e-9))

    def seconds(self, share: np.ndarray, by_kind: np.ndarray) -> np.ndarray:
        """With this share of the layers moved: the fewer, the longer the forward is that each copy may hide behind."""
        return (1 - share) * by_kind[self._rich] + share * ranked_seconds(self._pricing, self._moved(share))

    def _moved(self, share: Array) -> Layouts:
        return replace(_under(self._layout, self._lean), offload_activations=share)


def _share(rich: np.ndarray, lean: np.ndarray, room: float, layers: int) -> np.ndarray:
    """The share of layers, in whole layers, that must be at the lean end; above 1 when even all do not suffice."""
    over = rich - room
    saved = np.where(rich > lean, rich - lean, 1e-9)
    share = np.where(over <= 0, 0.0, np.minimum(over / saved, 2.0))
    return np.ceil(np.minimum(share, 2.0) * layers - 1e-9) / layers


def _pairs(run: RunSpec, offloads: Sequence[Offload]) -> list[tuple[End, End]]:
    """A rich and a lean end between which memory may decide: they are one, or differ in gathering again, in recomputing, or in moving
    activations to host memory."""
    reshards, modes = _reshards(pins_of(run)), recomputes(run)
    pairs: list[tuple[End, End]] = []
    for away in offloads:
        pairs += [(end, end) for end in (End(reshard, mode, away) for mode in modes for reshard in reshards)]
        pairs += [(End(False, mode, away), End(True, mode, away)) for mode in modes if len(reshards) == 2]
        pairs += [
            (End(reshard, rich, away), End(reshard, lean, away))
            for reshard in reshards
            for rich, lean in combinations(modes, 2)
        ]
    for here, there in MOVING:
        if {here, there} <= set(offloads):
            pairs += [(End(reshard, mode, here), End(reshard, mode, there)) for mode in modes for reshard in reshards]
    return pairs


def leaner_than(run: RunSpec, strategy: Strategy) -> list[Strategy]:
    """The strategies that go on from the lean end of this one: gathering again, or where that is done recomputing more."""
    end, modes = strategy.lean, recomputes(run)
    leaner = [replace(end, reshard=_reshards(pins_of(run))[-1])]
    if leaner == [end]:
        leaner = [replace(end, recompute=mode) for mode in modes[modes.index(end.recompute) + 1 :]]
    return [replace(strategy, rich=end, lean=one) for one in leaner]


def _sums(run: RunSpec) -> tuple[Gradients, ...]:
    """What may be kept of gradients between micro-batches."""
    pinned = pins_of(run).gradients
    return ("shard", "whole") if pinned is None else (pinned,)


def _reshards(pins: PlanPins) -> list[bool]:
    return [False, True] if pins.reshard is None else [pins.reshard]


def recomputes(run: RunSpec) -> tuple[Recompute, ...]:
    """The modes that are tried, each leaner than the one before it."""
    pinned = pins_of(run).recompute
    if pinned is not None:
        return (pinned,)
    return tuple(mode for mode in RECOMPUTE_MODES if mode != "all_but_attention" or _attends_long(run))


def _attends_long(run: RunSpec) -> bool:
    """Whether attention's own products are at least a quarter of all others: else to repeat them costs next to nothing."""
    others = flops_per_token(run.model, 1, causal=True)
    return flops_per_token(run.model, run.train.seq_len, causal=True) >= 1.25 * others


def layouts(run: RunSpec, points: Points, layer: LayerStrategy) -> Layouts:
    """The cost model's columns for `points` with all layers as `layer` is."""
    pipeline = points.column("pipeline")
    vee = np.isin(points.schedule, [SCHEDULES.index(name) for name in V_SCHEDULES])
    strides = ("ring", "ulysses", "shard", "replicate", "pipeline")
    return layouts_of(
        run.model, run.train, precision_of(run), points.column, expert=points.column("expert"), schedule=points.schedule,
        virtual=points.virtual, micro_batch=points.micro, accumulate=points.accumulate,
        layers=balanced_layers(run.model.layers, head_in_layers(run), pipeline, points.virtual, vee),
        copied=points.column("copied"), tokens_copied=points.column("tokens copied"),
        slowest=points.column("pace"), port=points.column("port"),
        **{f"{axis}_stride": points.column(f"{axis} stride") for axis in strides}, **strategy_columns(layer),
    )  # fmt: skip


def _under(layout: Layouts, kinds: Sequence[LayerStrategy]) -> Layouts:
    """The same points under every one of these: a row each, of what depends on that."""
    rows = [strategy_columns(kind) for kind in kinds]
    return replace(layout, **{name: np.array([row[name] for row in rows])[:, np.newaxis] for name in rows[0]})


def _taken(layout: Layouts, rows: np.ndarray) -> Layouts:
    """Some of the points."""
    columns = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return Layouts(
        **{name: column[rows] if isinstance(column, np.ndarray) else column for name, column in columns.items()}
    )


def ranked_seconds(pricing: Pricing, layout: Layouts) -> np.ndarray:
    """Seconds of a step by the closed form."""
    return np.asarray(_cost(pricing, layout).seconds)


def _cost(pricing: Pricing, layout: Layouts) -> StepCost:
    return step_cost(pricing.shape, pricing.machine, layout, pricing.constants)


def bytes_of_rank(run: RunSpec, layout: Layouts) -> np.ndarray:
    """Bytes of the fullest rank by the closed form."""
    numbers = formats(run.train, precision_of(run), cpu=run.cluster.is_cpu)
    numbers = replace(numbers, window=layout.copied, token_window=0.0 if run.cluster.is_cpu else layout.tokens_copied)
    return np.asarray(sum(planned(run.model, layout, numbers).values()))
