"""The first layer of the search: every point of the space priced in closed form, the most promising first.

A point's strategies (what is gathered again, recomputed, offloaded) are tried only if the point could still be among the best: a bound
below the time of any strategy is known before. So nothing is lost against trying all of them, and most are never tried.

Layers are alike, so of two ends of a strategy (say, no layer recomputed and all of them) only the number of layers at each end matters,
and both time and memory are a straight line between: the fewest layers that make the point fit are found without a search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from meshwright.costs.footprint import planned
from meshwright.costs.idle import fill
from meshwright.costs.inputs import Layouts
from meshwright.costs.memory import bytes_of, formats
from meshwright.costs.of_plan import Pricing, gathered_bytes, state_bytes
from meshwright.costs.offload import waiting_bytes
from meshwright.costs.step import StepCost, owned_params, step_cost
from meshwright.planner.candidate import compiles, host_budget, pins_of, precision_of
from meshwright.planner.schedule_choice import head_in_layers
from meshwright.planner.space import SCHEDULES, Points
from meshwright.schedules.in_flight import in_flight
from meshwright.schedules.registry import entry_of
from meshwright.spec.layout import V_SCHEDULES
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import CHOOSING, RECOMPUTES, Gradients, Offload, PlanPins, Recompute
from meshwright.spec.run import RunSpec

BATCH = 2048
"""Points whose strategies are priced together."""
SAFETY = 0.97
"""Of a bound, since communication may hide under work that a strategy adds."""
SPLITTING = [number for number, name in enumerate(SCHEDULES) if entry_of(name).splits_backward]
"""Schedules, by number, that put weight gradients off."""


@dataclass(frozen=True)
class End:
    """A strategy that all layers have."""

    reshard: bool
    recompute: Recompute


@dataclass(frozen=True)
class Strategy:
    """As many layers as must be at the `lean` end, the others at the `rich` one."""

    rich: End
    lean: End
    gradients: Gradients = "shard"
    offload: Offload = "none"


AWAY = 1.01
"""What activations in host memory count: a plan without them that is as fast, as far as a prediction tells, has no memory to pin in its
first step, which takes minutes for hundreds of gigabytes."""
PLAIN = Strategy(End(False, "none"), End(False, "none"))


@dataclass(frozen=True)
class Swept:
    """The best points, fastest first, each with its best strategy."""

    points: Points
    strategies: tuple[Strategy, ...]
    seconds: np.ndarray
    priced: int
    """Points and strategies that were priced, bounds included."""


def sweep(run: RunSpec, pricing: Pricing, points: Points, room: float, *, best: int, prune: bool = True) -> Swept:
    """The `best` points that fit `room` bytes by the closed form. Without `prune` every strategy of every point is priced.

    Empty when no point fits.
    """
    bound, least = _bounds(run, pricing, points)
    order = np.argsort(bound, kind="stable")
    order = order[least[order] <= room]
    found = _Best(best)
    priced = len(points)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        if prune and found.full and bound[batch[0]] * SAFETY > found.worst:
            break
        for strategy, seconds in _strategies(run, pricing, points.take(batch), room):
            found.add(batch, strategy, seconds)
            priced += len(batch)
    rows, strategies, seconds = found.sorted()
    return Swept(points.take(rows), strategies, seconds, priced)


def smallest(run: RunSpec, pricing: Pricing, points: Points, count: int) -> tuple[Points, Strategy]:
    """The points that need least memory, and the strategy that makes them so: what to say where nothing fits."""
    _, least = _bounds(run, pricing, points)
    end, gradients, offload = _leanest(run, points.offloads)
    return points.take(np.argsort(least, kind="stable")[:count]), Strategy(end, end, gradients, offload)


class _Best:
    """The fastest strategy of each point seen, and the `size` best points of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: dict[int, tuple[float, Strategy]] = {}
        self.worst = np.inf

    @property
    def full(self) -> bool:
        return len(self.kept) >= self.size

    def add(self, rows: np.ndarray, strategy: Strategy, seconds: np.ndarray) -> None:
        for at in np.flatnonzero(seconds < self.worst):
            row, time = int(rows[at]), float(seconds[at])
            if row not in self.kept or time < self.kept[row][0]:
                self.kept[row] = (time, strategy)
        if len(self.kept) > self.size:
            self.kept = {row: self.kept[row] for row in self._ranked()[: self.size]}
        if self.full:
            self.worst = max(time for time, _ in self.kept.values())

    def sorted(self) -> tuple[np.ndarray, tuple[Strategy, ...], np.ndarray]:
        rows = self._ranked()
        kept = [self.kept[row] for row in rows]
        return (
            np.array(rows, dtype=np.int64),
            tuple(strategy for _, strategy in kept),
            np.array([time for time, _ in kept]),
        )

    def _ranked(self) -> list[int]:
        return sorted(self.kept, key=lambda row: (self.kept[row][0], row))


def _bounds(run: RunSpec, pricing: Pricing, points: Points) -> tuple[np.ndarray, np.ndarray]:
    """For every point, seconds that no strategy beats and bytes that none undercuts."""
    rich = layouts(run, points, End(reshard=False, recompute=recomputes(run)[0]), "whole", "none")
    cost = _cost(pricing, rich)
    hidden = cost.exposed["shard"] + cost.exposed["data"] + cost.optimizer
    end, gradients, _ = _leanest(run, points.offloads)
    # Recomputing may need more than it saves: a block's activations whole, of a rank that has few. So may an optimizer in host memory:
    # room for its chunks.
    leanest = [(replace(end, recompute=mode), offload) for mode in recomputes(run) for offload in points.offloads]
    return cost.seconds - hidden, np.min(
        [_memory(run, layouts(run, points, end, gradients, offload)) for end, offload in leanest], axis=0
    )


def _leanest(run: RunSpec, offloads: tuple[Offload, ...]) -> tuple[End, Gradients, Offload]:
    pins = pins_of(run)
    return End(_reshards(pins)[-1], recomputes(run)[-1]), pins.gradients or "shard", offloads[-1]


def _strategies(run: RunSpec, pricing: Pricing, points: Points, room: float) -> Iterator[tuple[Strategy, np.ndarray]]:
    """Every strategy with its seconds by point, infinite where it does not fit, or is another under a second name."""
    pins, layers = pins_of(run), run.model.layers
    sharded = points.column("shard") * points.column("context") > 1
    many = (points.accumulate > 1) & (points.schedule != SCHEDULES.index("breadth_first"))
    for gradients, offload in product(*_kinds(run, points)):
        own = np.ones(len(points), bool)
        if gradients == "whole" and pins.gradients is None:
            own &= sharded & many  # reduced once a step in any case
        away = offload != "none" and np.isfinite(host_budget(run))
        # Among what candidate.untrainable lets through.
        chooses = points.trainable and offload in ("activations", "both")
        if chooses and pins.schedule is None:
            own &= ~np.isin(points.schedule, SPLITTING)
        priced: dict[End, tuple[np.ndarray, np.ndarray]] = {}
        for rich, lean in _pairs(run):
            if chooses and not compiles(run) and pins.recompute is None and CHOOSING & {rich.recompute, lean.recompute}:
                continue
            for end in (rich, lean):
                if end not in priced:
                    priced[end] = price(run, pricing, layouts(run, points, end, gradients, offload))
            legal = own & (sharded | (not lean.reshard and not rich.reshard) | (pins.reshard is not None))
            share = _share(priced[rich][1], priced[lean][1], room, layers)
            legal &= share <= 1
            if rich != lean:
                legal &= share > 0  # else the rich end alone says the same
            mixed = [(1 - share) * a + share * b for a, b in zip(priced[rich], priced[lean], strict=True)]
            legal &= mixed[1] <= room * (1 + 1e-9)
            if away:
                waiting = [
                    _on_host(run, pricing, layouts(run, points, end, gradients, offload)) for end in (rich, lean)
                ]
                legal &= (1 - share) * waiting[0] + share * waiting[1] <= host_budget(run)
            yield Strategy(rich, lean, gradients, offload), np.where(legal, mixed[0], np.inf)


def _share(rich: np.ndarray, lean: np.ndarray, room: float, layers: int) -> np.ndarray:
    """The share of layers, in whole layers, that must be at the lean end; above 1 when even all do not suffice."""
    over = rich - room
    saved = np.where(rich > lean, rich - lean, 1e-9)
    share = np.where(over <= 0, 0.0, np.minimum(over / saved, 2.0))
    return np.ceil(np.minimum(share, 2.0) * layers - 1e-9) / layers


def _kinds(run: RunSpec, points: Points) -> tuple[list[Gradients], list[Offload]]:
    pins = pins_of(run)
    gradients: list[Gradients] = ["shard", "whole"] if pins.gradients is None else [pins.gradients]
    return gradients, list(points.offloads)


def _pairs(run: RunSpec) -> list[tuple[End, End]]:
    """A rich and a lean end between which memory may decide: they are one, or differ in gathering again, or in recomputing."""
    reshards, modes = _reshards(pins_of(run)), recomputes(run)
    pairs = [(end, end) for end in (End(reshard, mode) for mode in modes for reshard in reshards)]
    pairs += [(End(False, mode), End(True, mode)) for mode in modes if len(reshards) == 2]
    return pairs + [
        (End(reshard, rich), End(reshard, lean)) for reshard in reshards for rich, lean in combinations(modes, 2)
    ]


def leaner_than(run: RunSpec, strategy: Strategy) -> list[Strategy]:
    """The strategies that go on from the lean end of this one: gathering again, or where that is done recomputing more."""
    end, modes = strategy.lean, recomputes(run)
    leaner = [End(_reshards(pins_of(run))[-1], end.recompute)]
    if leaner == [end]:
        leaner = [replace(end, recompute=mode) for mode in modes[modes.index(end.recompute) + 1 :]]
    return [replace(strategy, rich=end, lean=one) for one in leaner]


def _reshards(pins: PlanPins) -> list[bool]:
    return [False, True] if pins.reshard is None else [pins.reshard]


def recomputes(run: RunSpec) -> tuple[Recompute, ...]:
    """The modes that are tried, each leaner than the one before it."""
    pinned = pins_of(run).recompute
    if pinned is not None:
        return (pinned,)
    return tuple(mode for mode in RECOMPUTES if mode != "all_but_attention" or _attends_long(run))


def _attends_long(run: RunSpec) -> bool:
    """Whether attention's own products are at least a quarter of all others: else to repeat them costs next to nothing."""
    others = flops_per_token(run.model, 1, causal=True)
    return flops_per_token(run.model, run.train.seq_len, causal=True) >= 1.25 * others


def layouts(run: RunSpec, points: Points, end: End, gradients: Gradients, offload: Offload) -> Layouts:
    """The cost model's columns for `points` with one strategy for all layers."""
    pipeline, tensor, context = points.column("pipeline"), points.column("tensor"), points.column("context")
    shards, data = points.column("shard") * context, points.column("data")
    precision = precision_of(run)
    schedule = points.schedule, pipeline, points.accumulate, points.virtual
    return Layouts(
        tensor=tensor, pipeline=pipeline, virtual=points.virtual.astype(float), context=context,
        expert=points.column("expert") * tensor if run.model.experts else 1.0,
        data=data, zero=np.where(shards > 1, 3.0, 0.0), shards=shards, micro_batch=points.micro.astype(float),
        global_batch=float(run.train.global_batch), seq=float(run.train.seq_len), recompute=float(RECOMPUTES.index(end.recompute)),
        keep_gathered=float(not end.reshard), gather_once=float(not end.reshard), reduce_once=float(gradients == "whole"),
        offload=float(offload in ("optimizer", "both")), offload_activations=float(offload in ("activations", "both")),
        ulysses=points.column("context_ulysses"),
        layered=(points.schedule == SCHEDULES.index("breadth_first")).astype(float), sequence=(tensor > 1).astype(float),
        vee=np.isin(points.schedule, [SCHEDULES.index(name) for name in V_SCHEDULES]).astype(float),
        in_flight=in_flight(*schedule), in_flight_last=in_flight(*schedule, pipeline - 1), loss_chunk=float(run.train.loss_chunk),
        copied=points.column("copied"), exchanged=float(pins_of(run).reduce_engine == "exchange"),
        tokens_copied=points.column("tokens copied"), gathered_bytes=gathered_bytes(precision), state_bytes=state_bytes(precision),
        replica_bytes=float(bytes_of(precision.reduce_replicas or precision.stored)),
        fill=fill(points.schedule, pipeline, points.accumulate), slowest=points.column("pace"), port=points.column("port"),
        ring_stride=points.column("ring stride"), ulysses_stride=points.column("ulysses stride"),
        shard_stride=points.column("shard stride"),
        replicate_stride=points.column("replicate stride"), pipeline_stride=points.column("pipeline stride"),
    )  # fmt: skip


def price(run: RunSpec, pricing: Pricing, layout: Layouts) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a step, as plans are ranked by them, and bytes of the fullest rank, by the closed form."""
    handicap = np.where(np.asarray(layout.offload_activations) > 0, AWAY, 1.0)
    return np.asarray(_cost(pricing, layout).seconds) * handicap, _memory(run, layout)


def _on_host(run: RunSpec, pricing: Pricing, layout: Layouts) -> np.ndarray:
    """Bytes of one host's memory that all its devices take."""
    each = waiting_bytes(pricing.shape, layout, owned_params(pricing.shape, layout))
    return run.cluster.gpus_per_node * np.asarray(each)


def _cost(pricing: Pricing, layout: Layouts) -> StepCost:
    return step_cost(pricing.shape, pricing.machine, layout, pricing.constants)


def _memory(run: RunSpec, layout: Layouts) -> np.ndarray:
    precision, engine = precision_of(run), pins_of(run).reduce_engine or "kernel"
    numbers = formats(run.train, precision, cpu=run.cluster.is_cpu, reduce_engine=engine, added=layout.added_up)
    numbers = replace(numbers, window=layout.copied, token_window=0.0 if run.cluster.is_cpu else layout.tokens_copied)
    return np.asarray(sum(planned(run.model, layout, numbers, head=head_in_layers(run)).values()))
