"""Second step of the search: makes Plans of the best layouts (points) of the closed-form sweep, and simulates them.

It checks the memory of each plan exactly. If a plan has two layer strategies, each pipeline rank gets the fewest layers
with the low-memory strategy with which it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import ceil, inf
from typing import Any, get_args

import numpy as np

from meshwright.planner.candidate import (
    SHARES,
    Candidate,
    compared_seconds,
    compiles,
    excess_by_rank,
    least_fitting,
    pins_of,
    precision_of,
    trainer_bytes,
)
from meshwright.planner.conflicts import conflicts
from meshwright.planner.reprice import reprice
from meshwright.planner.sample_plan import sample_plan
from meshwright.planner.schedule_choice import with_stages
from meshwright.planner.space import SCHEDULES, Points
from meshwright.planner.step_estimate import most_played
from meshwright.planner.strategies import OFFLOAD_PAIRS, Strategy, StrategyEnd
from meshwright.simulator.step_simulation import timing_of
from meshwright.simulator.timing import Timing
from meshwright.spec.layout import stage_table
from meshwright.spec.plan import (
    RECOMPUTE_MODES,
    RECOMPUTES_MATMULS,
    BatchPlan,
    ExpertPlan,
    LayerStrategy,
    MeshAxis,
    Offload,
    Plan,
)
from meshwright.spec.plan_keys import plan_fields
from meshwright.spec.run import RunSpec
from meshwright.workload.copy_options import COPY_OPTIONS, copied_options, transport_fields
from meshwright.workload.groups import copies_experts, moves_experts

MAX_SIMULATED = 12
"""Maximum number of plans that are simulated unit by unit.

A large plan takes a second to simulate unit by unit, so the other plans are only simulated by whole stages.
"""
MIN_SIMULATED = 3
"""Minimum number of plans that are simulated unit by unit."""
MAX_WORK = 60_000
"""No further plan is simulated unit by unit after the plans so far have taken more than this `_simulation_work`."""
UNTRIED_RATIO = 0.95
"""Assumed ratio of the time by units to the time by stages, for a family of plans (`plan_family`) of which none was
simulated by units.

Nine in ten of 175 random plans had a ratio of 0.99 to 1.01; on networks that expose all traffic, nine in ten of 120 had
0.96 to 1.04.
"""
SIBLING_RATIO = 0.97
"""The same for a family whose sibling has a plan that was simulated by units: a factor on the sibling's ratio, or on 1
if that is less.

Two families are siblings if they differ in one thing: the plans of one have replicas, the plans of the other have none.
"""
FEWEST_SLOW = 4
"""If at least this many families of a wider family were all slower than estimated, the others are expected to be slower
too.
"""
SLOW_RATIO = 0.9
"""The expected ratio of the others, relative to the least ratio of these families."""
ROOMY_SHARE = 0.93
"""A pipeline with virtual stages counts as crowded if it needs more than this share of the usable memory.

Fragmentation costs these pipelines an eighth more memory (on 4 H200s: 107 GiB instead of 95 GiB). Other plans ran at
full speed with all memory in use.
"""
SAME_TIME_TOLERANCE = 0.01
"""If the predicted step times of two plans differ by at most this share, the planner chooses the simpler plan."""


def plan_at(run: RunSpec, points: Points, index: int, strategy: Strategy, budget: int | None) -> Plan:
    """Return the plan of the point `index`, with the fewest low-memory layers with which it fits into `budget` bytes.

    `budget` is the usable memory of a device; None if it is not known. If the plan does not fit with any number of
    low-memory layers, all layers are low-memory. Raises ValueError if pinned stages are not in the order of the
    schedule.
    """
    mesh = points.meshes[points.mesh[index]]
    cluster = run.cluster
    pins = pins_of(run)
    pipeline = mesh.size("pipeline")
    axes = (
        MeshAxis(
            axis=name, size=mesh.size(name), crosses="node" if mesh.crosses(name, cluster.ranks_per_node) else "device"
        )
        for name in mesh.order
    )
    used = tuple(axis for axis in axes if axis.size > 1 or axis.axis == "shard")
    shards = mesh.size("shard") * mesh.context
    precision = precision_of(run)
    options: dict[str, Any] = {
        **transport_fields({option for option in COPY_OPTIONS if points.column(option.column)[index]}),
        "compile": compiles(run),
        **plan_fields(pins),
    }
    plan = Plan(
        mesh=used,
        batch=BatchPlan(
            global_batch=run.train.global_batch,
            micro_batch=int(points.micro[index]),
            accumulate=int(points.accumulate[index]),
        ),
        schedule=with_stages(run, SCHEDULES[points.schedule[index]], pipeline, int(points.virtual[index]), used),
        experts=_expert_plan(run, mesh.expert, shards // mesh.expert, mesh.size("tensor")),
        samples=sample_plan(run, precision),
        layers=pins.layers or (strategy.layer(strategy.high_memory),),
        precision=precision,
        **options,
    )
    if not pins.layers and strategy.high_memory != strategy.low_memory:
        plan = _with_fewest_low_memory_layers(run, plan, strategy, budget)
    return plan if pins.offload_fraction is not None else with_least_offloaded(run, plan, budget)


def with_least_offloaded(run: RunSpec, plan: Plan, budget: int | None) -> Plan:
    """Return the plan with the smallest share of its offloaded optimizer state in host memory with which it fits, in
    thousandths.

    The share is at most the plan's own share. It is 1 if no state is offloaded.
    """
    if not any(layer.optimizer_offloaded for layer in plan.layers):
        return replace(plan, offload_fraction=1.0)
    if budget is None or run.cluster.is_cpu:
        return plan

    def with_share(share: float) -> Plan:
        return replace(plan, offload_fraction=max(1, ceil(share * SHARES)) / SHARES)

    # Memory is linear in the share.
    plan_share = plan.offload_fraction
    least = 1 / SHARES
    pairs = zip(excess_by_rank(run, plan, budget), excess_by_rank(run, with_share(least), budget), strict=True)
    needed = [least + (plan_share - least) * max(0.0, below) / max(below - above, 1.0) for above, below in pairs]
    return with_share(min(plan_share, max(needed)))


def _expert_plan(run: RunSpec, expert: int, expert_shard: int, tensor: int) -> ExpertPlan | None:
    """Return how experts are divided, with the pinned exchange, placement and copies; None for a dense model.

    If a policy is pinned without a number of slots, a rank has as many slots as it has own experts.
    """
    if not run.model.experts:
        return None
    plan = ExpertPlan(expert=expert, expert_shard=expert_shard)
    pins = pins_of(run)
    ranks = expert * tensor
    if ranks == 1:
        return plan
    exchange = pins.expert_exchange or plan.exchange
    plan = replace(plan, exchange=exchange, receive_bound=pins.expert_receive_bound)
    if pins.expert_placement is not None:
        every = pins.expert_placement_every or plan.placement_every
        plan = replace(
            plan,
            placement=pins.expert_placement,
            placement_every=every,
            load_window=pins.expert_load_window or plan.load_window,
        )
    if pins.expert_policy in (None, "none"):
        return plan
    owned = run.model.experts // ranks
    slots = min(pins.expert_slots or owned, run.model.experts - owned)
    return replace(
        plan,
        policy=pins.expert_policy,
        slots=slots,
        keep=bool(pins.expert_keep),
        load_window=pins.expert_load_window or plan.load_window,
    )


class PlanEstimator:
    """Simulates plans by whole stages (fast) or by units, which are blocks (exact).

    Both use the same times of a plan's actions.
    """

    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self._timings: dict[Plan, Timing] = {}
        self._estimates: dict[Plan, Candidate] = {}

    def by_stages(self, plan: Plan) -> Candidate:
        """Return the plan with predictions from a simulation by whole stages."""
        if plan.without_prediction not in self._estimates:
            timing = self._timings[plan.without_prediction] = timing_of(
                self.run.model, self.run.train, plan, self.run.cluster
            )
            stage_estimate = Candidate(reprice(self.run, plan, by_units=False, timing=timing), simulated=False)
            self._estimates[plan.without_prediction] = replace(stage_estimate, estimated=stage_estimate.seconds)
        return self._estimates[plan.without_prediction]

    def by_units(self, candidate: Candidate) -> Candidate:
        """Return a candidate, which was estimated by stages before, with predictions from a simulation by units."""
        timing = self._timings[candidate.plan.without_prediction]
        return replace(candidate, plan=reprice(self.run, candidate.plan, timing=timing), simulated=True)


class Ranking:
    """Orders plans by their expected step time.

    That is the estimate, corrected by plans of the same families whose time is known.

    A plan has one family at each of several levels, the narrowest level first. The estimates of a family deviate by a
    similar factor. So the ratio of known to estimated time of the family's last plan corrects the estimates of the
    others:

    - The narrowest family of the plan with a known plan gives the ratio, times the factor of its level (`factors`).
    - A ratio of a widest family counts as at most 1. But if at least `FEWEST_SLOW` families of the next narrower level
      in it were all slower than estimated, the ratio is `SLOW_RATIO` times the least of their ratios.
    - If no family of the plan has a known plan, the ratio is `default_ratio`.

    Example with one level: the plans of a family are estimated to take 1.0 and 1.1 seconds. The first one is simulated
    and takes 0.98 seconds. So the second one is expected to take 1.1 · 0.98 = 1.08 seconds.
    """

    def __init__(
        self,
        estimates: Sequence[float],
        families: Sequence[tuple[object, ...]],
        default_ratio: float,
        factors: Sequence[float] = (),
    ) -> None:
        levels = range(len(families[0]) if families else 1)
        self.estimate = np.array(estimates, float)
        self.default_ratio = default_ratio
        self.factors = factors or (1.0,) * len(levels)
        self.families = [_number_by_first_appearance([names[level] for names in families]) for level in levels]
        self.ratios = [np.full(len(estimates), np.nan) for _ in levels]
        """By level and number of a family, the last known ratio."""
        self.least_ratio = np.full(len(estimates), np.inf)
        self.known_families = np.zeros(len(estimates), int)
        """Of the widest families: the least ratio, and how many families of the next level have a known plan."""
        self.seconds = np.full(len(estimates), np.nan)
        """By plan, the actual seconds; infinite where it has none, NaN where it was not tried."""

    def order(
        self,
        seconds: Callable[[int], float],
        min_effort: float = inf,
        among: np.ndarray | None = None,
        tolerance: float = SAME_TIME_TOLERANCE,
        efforts: np.ndarray | None = None,
    ) -> Iterator[int]:
        """Yield the indices of plans that were not tried, the most promising first.

        `seconds(index)` is called before an index is yielded.

        Only plans in the mask `among` are considered. Plans whose seconds are infinite are not yielded. The iteration
        ends at the first plan whose expected time exceeds the fastest of `among` by more than the share `tolerance`,
        but not before plans with a total effort of `min_effort` were yielded. The effort of a plan is 1, or its number
        in `efforts`.
        """
        among = np.ones(len(self.estimate), bool) if among is None else among
        effort = 0.0
        while (untried := among & np.isnan(self.seconds)).any():
            expected = np.where(untried, self._expected(), np.inf)
            index = int(expected.argmin())
            fastest = np.nanmin(self.seconds, where=among, initial=np.inf)
            if effort >= min_effort and expected[index] >= fastest * (1 + tolerance):
                return
            self.seconds[index] = seconds(index)
            self._learn(index)
            if self.seconds[index] < inf:
                effort += 1 if efforts is None else efforts[index]
                yield index

    def _learn(self, index: int) -> None:
        """Record the ratio of the plan `index` for its families.

        If it has no seconds, only record that its families were tried.
        """
        ratio = self.seconds[index] / self.estimate[index]
        numbers = [families[index] for families in self.families]
        if ratio == inf:
            for ratios, number in zip(self.ratios[:-1], numbers, strict=False):
                ratios[number] = 1.0 if np.isnan(ratios[number]) else ratios[number]
            return
        widest = numbers[-1]
        self.known_families[widest] += bool(np.isnan(self.ratios[-2][numbers[-2]]))
        self.least_ratio[widest] = min(self.least_ratio[widest], ratio)
        for ratios, number in zip(self.ratios, numbers, strict=True):
            ratios[number] = ratio

    def _expected(self) -> np.ndarray:
        """Return the expected seconds of all plans."""
        slow = (self.known_families >= FEWEST_SLOW) & (self.least_ratio > 1)
        widest = self.factors[-1] * np.minimum(1.0, self.ratios[-1])
        widest = np.where(slow, np.maximum(widest, SLOW_RATIO * self.least_ratio), widest)
        ratio = np.where(np.isnan(widest), self.default_ratio, widest)[self.families[-1]]
        for factor, ratios, families in reversed(list(zip(self.factors, self.ratios, self.families, strict=True))[:-1]):
            known = ratios[families]
            ratio = np.where(np.isnan(known), ratio, factor * known)
        return self.estimate * ratio


def _number_by_first_appearance(values: Sequence[object]) -> np.ndarray:
    """Return for each value its number among the different values, in the order of their first appearance.

    Equal values have equal numbers:

    >>> _number_by_first_appearance(["tensor", "shard", "tensor"])
    array([0, 1, 0])
    """
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def simulate_leading(estimator: PlanEstimator, estimated: Iterable[Candidate]) -> list[Candidate]:
    """Return all candidates: first the most promising ones, simulated by units, the fastest first, and then the others
    as estimated.
    """
    distinct = {candidate.plan.without_prediction: candidate for candidate in estimated}
    seconds_of = partial(compared_seconds, estimator.run)
    ranked = sorted(distinct.values(), key=seconds_of)
    simulated: dict[int, Candidate] = {}

    def seconds(index: int) -> float:
        simulated[index] = estimator.by_units(ranked[index])
        return seconds_of(simulated[index])

    families = []
    for plan in (candidate.plan for candidate in ranked):
        family = plan_family(plan), plan.layers[0].offload, plan.batch.micro_batch, plan.accumulation
        families.append(((plan.axis_size("replicate") > 1, *family), family))
    ranking = Ranking(list(map(seconds_of, ranked)), families, UNTRIED_RATIO, (1.0, SIBLING_RATIO))
    leading = set[int]()
    work = 0
    for index in ranking.order(seconds, MIN_SIMULATED):
        leading.add(index)
        work += _simulation_work(ranked[index].plan, estimator.run.model.layers)
        if len(leading) == MAX_SIMULATED or work > MAX_WORK:
            break
    return fastest_first(
        [*simulated.values(), *(candidate for index, candidate in enumerate(ranked) if index not in leading)]
    )


def plan_family(plan: Plan) -> tuple[object, ...]:
    """Return a key that is the same for plans with the same pipeline, tensor and context sizes and the same schedule."""
    axes = ("pipeline", "tensor", "context_ring", "context_ulysses")
    return (*(plan.axis_size(axis) for axis in axes), plan.schedule.name)


def fastest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates in the order of their seconds, those that were simulated by units first."""
    return sorted(candidates, key=lambda candidate: (not candidate.simulated, candidate.seconds))


def same_layout(first: Plan, other: Plan) -> bool:
    """Return whether two plans are the same apart from predictions and reasons."""
    return first.without_prediction == other.without_prediction


def is_large(run: RunSpec, plan: Plan) -> bool:
    """Return whether a simulation of the plan by units takes long."""
    return _simulation_work(plan, run.model.layers) > MAX_WORK


def _simulation_work(plan: Plan, layers: int) -> int:
    """Return the work of a simulation by units: layers × simulated micro-batches × pipeline ranks."""
    ranks = plan.axis_size("pipeline")
    return ranks * min(plan.batch.accumulate, most_played(ranks)) * layers


def simplest(
    candidates: Sequence[Candidate],
    budget: int | None = None,
    penalty: Callable[[Plan], float] = lambda plan: 1.0,
    fragile: Callable[[Plan], bool] = lambda plan: False,
) -> Candidate:
    """Return the simplest of the plans whose step time is within `SAME_TIME_TOLERANCE` of the fastest.

    Plans that are not `fragile` are preferred. Among them, plans with virtual stages are preferred if they leave memory
    for fragmentation. Among those, the plan with the lowest `complexity` wins. `penalty` returns a factor on the
    seconds of a plan. `budget` is the usable memory of a device in bytes.
    """
    simulated = [candidate for candidate in candidates if candidate.simulated]
    fastest = min(candidate.seconds * penalty(candidate.plan) for candidate in simulated)
    equally_fast = [
        candidate
        for candidate in simulated
        if candidate.seconds * penalty(candidate.plan) <= fastest * (1 + SAME_TIME_TOLERANCE)
    ]
    roomy_bytes = inf if budget is None else ROOMY_SHARE * budget

    def crowded(plan: Plan) -> bool:
        return trainer_bytes(plan) > roomy_bytes and any(len(rank_stages) > 1 for rank_stages in plan.schedule.stages)

    return min(
        equally_fast,
        key=lambda candidate: (
            fragile(candidate.plan),
            crowded(candidate.plan),
            complexity(candidate.plan),
            candidate.seconds,
        ),
    )


def _seconds_of(candidate: Candidate) -> float:
    return candidate.seconds


def complexity(plan: Plan) -> int:
    """Return the number of features that a reader of the plan must understand: axes, layer strategies, recompute,
    offload, copy engines.
    """
    axes = sum(axis.size > 1 for axis in plan.mesh)
    offload_parts = {"none": 0, "activations": 2, "optimizer": 2, "both": 3}
    layer_features = sum(
        (layer.recompute != "none") + offload_parts[layer.offload] + (layer.gradients == "whole")
        for layer in plan.layers
    )
    copy_engines = len(copied_options(plan))
    return (
        2 * axes
        + len(plan.layers)
        + layer_features
        + plan.layered
        + (plan.accumulation == "host")
        + (plan.offload_staging > 0)
        + copy_engines
        + copies_experts(plan)
        + moves_experts(plan)
    )


def with_room_used(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield a plan whose layers have two settings, with as few layers as possible that have the low-memory setting."""
    settings = _settings(plan)
    if len(settings) == 2 and pins_of(run).layers is None and settings[0].gradients == settings[1].gradients:
        high, low = (_end(layer) for layer in settings)
        yield _with_fewest_low_memory_layers(run, plan, Strategy(high, low, settings[0].gradients), budget)


def with_layers_eased(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield the plan with as many layers as fit that save less memory than all layers do now.

    These layers recompute less than now, keep their gathered weights, or keep their activations on the device.
    """
    settings = _settings(plan)
    pins = pins_of(run)
    if pins.layers is not None:
        return
    low = _end(settings[-1])
    gradients = settings[-1].gradients
    modes = RECOMPUTE_MODES[: RECOMPUTE_MODES.index(low.recompute)] if pins.recompute is None else ()
    eased = [
        replace(low, recompute=mode)
        for mode in modes
        if not (plan.mlp_tile and mode not in RECOMPUTES_MATMULS)
        and not conflicts(run, trainable=True, recompute=mode, offload=low.offload)
    ]
    eased += [replace(low, reshard=False)] if low.reshard and pins.reshard is None else []
    less = next((without for without, offload in OFFLOAD_PAIRS if offload == low.offload), None)
    eased += [replace(low, offload=less)] if less and pins.offload is None else []
    for high in eased:
        if high not in map(_end, settings):
            yield _with_fewest_low_memory_layers(run, plan, Strategy(high, low, gradients), budget)


def _settings(plan: Plan) -> list[LayerStrategy]:
    """Return the different settings of the plan's layers, the setting that needs most memory first."""

    def saving(layer: LayerStrategy) -> tuple[object, ...]:
        return RECOMPUTE_MODES.index(layer.recompute), layer.reshard, get_args(Offload).index(layer.offload)

    return sorted({replace(layer, range="all") for layer in plan.layers}, key=saving)


def _end(layer: LayerStrategy) -> StrategyEnd:
    return StrategyEnd(layer.reshard, layer.recompute, layer.offload)


def _with_fewest_low_memory_layers(run: RunSpec, plan: Plan, strategy: Strategy, budget: int | None) -> Plan:
    """Return `plan` with the fewest low-memory layers on each pipeline rank with which it fits."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), run.model.layers)
    layers_by_rank = [[layer for stage in rank_stages for layer in stage] for rank_stages in table]

    def with_low_memory(counts: Sequence[int]) -> Plan:
        low_memory = {layer for layers, count in zip(layers_by_rank, counts, strict=True) for layer in layers[:count]}
        return replace(plan, layers=_layers_by_range(run.model.layers, lambda layer: layer in low_memory, strategy))

    all_layers = [len(layers) for layers in layers_by_rank]
    return with_low_memory(
        least_fitting(all_layers, lambda counts: excess_by_rank(run, with_low_memory(counts), budget))
    )


def _layers_by_range(layers: int, low_memory: Callable[[int], bool], strategy: Strategy) -> tuple[LayerStrategy, ...]:
    """Return layer strategies by range. Consecutive layers with the same strategy form one range."""
    strategies = []
    for is_low_memory, group in groupby(range(layers), key=low_memory):
        indices = list(group)
        ends = f"{indices[0]}-{indices[-1]}" if len(indices) > 1 else str(indices[0])
        text = "all" if len(indices) == layers else ends
        strategies.append(strategy.layer(strategy.low_memory if is_low_memory else strategy.high_memory, text))
    return tuple(strategies)
