"""Second step of the search: turns the best layouts (points) of the closed-form sweep into Plans, and simulates them.

It checks the memory of each plan exactly. A plan with two layer strategies gives each pipeline rank the fewest layers of the low-memory
strategy with which it fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf

import numpy as np

from meshwright.planner.accumulation_choice import plans_with_sums_on_host
from meshwright.planner.candidate import (
    SHARES,
    Candidate,
    accumulation_of,
    compiles,
    fits,
    mlp_tile_of,
    offload_fraction_of,
    offload_staging_of,
    overfull_ranks,
    peak_bytes,
    pins_of,
    precision_of,
)
from meshwright.planner.reprice import reprice
from meshwright.planner.sample_plan import sample_plan
from meshwright.planner.schedule_choice import with_stages
from meshwright.planner.space import SCHEDULES, Points
from meshwright.planner.staging_choice import plans_with_staging, with_more_recompute
from meshwright.planner.step_estimate import most_played
from meshwright.planner.strategies import Strategy
from meshwright.simulator.step_simulation import timing_of
from meshwright.simulator.timing import Timing
from meshwright.spec.layout import stage_table
from meshwright.spec.plan import BatchPlan, ExpertPlan, Gradients, LayerStrategy, MeshAxis, Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.copy_options import COPY_OPTIONS, copied_options, engine_fields
from meshwright.workload.groups import balances_owners, copies_experts, shard_size

MAX_SIMULATED, MIN_SIMULATED, MAX_WORK = 12, 3, 60_000
"""Most and fewest plans that are simulated unit by unit, and the total `_simulation_work` after which no further plan is.

The other plans are only simulated by whole stages, as a large plan takes a second unit by unit.
"""
MAX_IMPROVED = 3
"""Fastest simulated plans whose neighbours (see `_neighbours`) are simulated too; only the fastest where plans are large."""
NEIGHBOUR_SLOWDOWN = 1.05
"""Factor on a plan's estimated step time up to which its neighbours are simulated."""
UNTRIED_RATIO = 0.95
"""Assumed ratio of the unit-by-unit time to the stage estimate, for a family (`plan_family`) without a simulated plan.

Of 175 random plans nine in ten had 0.99 to 1.01; of 120 on networks that expose all traffic, 0.96 to 1.04.
"""
ROOMY_SHARE = 0.93
"""Share of the usable memory above which a pipeline with virtual stages counts as crowded.

Fragmentation costs these pipelines an eighth more memory (on 4 H200s: 107 GiB instead of 95 GiB). Other plans ran at full speed with all
of the memory in use.
"""
SAME_TIME_TOLERANCE = 0.01
"""Relative difference of predicted step times below which the planner takes the simpler plan."""


def plan_at(run: RunSpec, points: Points, index: int, strategy: Strategy, budget: int | None) -> Plan:
    """The plan of the point at `index`, with the fewest low-memory layers that fit into `budget` bytes.

    All layers are low-memory where no number of them fits. `budget` is the usable memory of a device; None if unknown.

    Raises ValueError when the pinned stages are not in the schedule's order.
    """
    mesh = points.meshes[points.mesh[index]]
    cluster, pins, pipeline = run.cluster, pins_of(run), mesh.size("pipeline")
    axes = (
        MeshAxis(
            axis=name, size=mesh.size(name), crosses="node" if mesh.crosses(name, cluster.ranks_per_node) else "device"
        )
        for name in mesh.order
    )
    used = tuple(axis for axis in axes if axis.size > 1 or axis.axis == "shard")
    shards, precision = mesh.size("shard") * mesh.context, precision_of(run)
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
        **engine_fields({option for option in COPY_OPTIONS if points.column(option.column)[index]}),
        offload_fraction=offload_fraction_of(run),
        offload_staging=offload_staging_of(run),
        accumulation=accumulation_of(run),
        mlp_tile=mlp_tile_of(run),
        compile=compiles(run),
    )
    if pins.offload_fraction is None and not _may_offload_optimizer(plan, strategy):
        plan = replace(plan, offload_fraction=1.0)
    if pins.layers or strategy.high_memory == strategy.low_memory:
        return plan
    return _with_fewest_low_memory_layers(run, plan, strategy, budget)


def _may_offload_optimizer(plan: Plan, strategy: Strategy) -> bool:
    ends = [strategy.layer(end) for end in (strategy.high_memory, strategy.low_memory)]
    return any(layer.optimizer_offloaded for layer in (*plan.layers, *ends))


def _expert_plan(run: RunSpec, expert: int, expert_shard: int, tensor: int) -> ExpertPlan | None:
    """How experts are spread, with the pinned exchange and copies; a policy without slots gets as many as a rank owns experts."""
    if not run.model.experts:
        return None
    plan, pins, ranks = ExpertPlan(expert=expert, expert_shard=expert_shard), pins_of(run), expert * tensor
    if ranks == 1:
        return plan
    exchange = pins.expert_exchange or plan.exchange
    plan = replace(plan, exchange=exchange, receive_bound=pins.expert_receive_bound)
    if pins.expert_owners is not None:
        every = pins.expert_owners_every or plan.owners_every
        plan = replace(plan, owners=pins.expert_owners, owners_every=every, window=pins.expert_window or plan.window)
    if pins.expert_policy in (None, "none"):
        return plan
    owned = run.model.experts // ranks
    slots = min(pins.expert_slots or owned, run.model.experts - owned)
    return replace(
        plan,
        policy=pins.expert_policy,
        slots=slots,
        keep=bool(pins.expert_keep),
        window=pins.expert_window or plan.window,
    )


class PlanEstimator:
    """Simulates plans by whole stages (fast) or by units, i.e. blocks (exact); both share the timing of a plan's actions."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self._timings: dict[Plan, Timing] = {}
        self._estimates: dict[Plan, Candidate] = {}

    def by_stages(self, plan: Plan) -> Candidate:
        """The plan with predictions from whole stages."""
        if plan.without_prediction not in self._estimates:
            timing = self._timings[plan.without_prediction] = timing_of(
                self.run.model, self.run.train, plan, self.run.cluster
            )
            stage_estimate = Candidate(reprice(self.run, plan, by_units=False, timing=timing), simulated=False)
            self._estimates[plan.without_prediction] = replace(stage_estimate, estimated=stage_estimate.seconds)
        return self._estimates[plan.without_prediction]

    def by_units(self, candidate: Candidate) -> Candidate:
        """The candidate, already estimated by stages, with predictions from a unit-by-unit simulation."""
        timing = self._timings[candidate.plan.without_prediction]
        return replace(candidate, plan=reprice(self.run, candidate.plan, timing=timing), simulated=True)


def most_promising_first(
    estimates: Sequence[float],
    families: Sequence[tuple[object, object]],
    seconds: Callable[[int], float],
    default_ratio: float,
    min_plans: float = inf,
    sibling_ratio: float = 1.0,
) -> Iterator[int]:
    """Indices of `estimates`, the most promising plan first, each after `seconds(index)` has computed its actual step time.

    Plans of infinite seconds are left out. The estimates of a family deviate by a similar factor, so the ratio of actual to estimated time
    of the family's last plan corrects the estimates of the others. `families` has (family, wider family) of each plan. A family without a
    computed plan takes `sibling_ratio` times the ratio of its wider family, or `default_ratio` if that has none either. After `min_plans`
    plans the iterator ends at the first plan whose corrected estimate exceeds the fastest time by more than `SAME_TIME_TOLERANCE`.
    """
    estimate = np.array(estimates, dtype=float)
    family, wider_family = (_number_by_first_appearance([pair[level] for pair in families]) for level in (0, 1))
    family_ratio, wider_family_ratio = np.full(len(estimate), np.nan), np.full(len(estimate), np.nan)
    tried = np.zeros(len(estimate), bool)
    fastest, count = inf, 0
    while not tried.all():
        sibling = wider_family_ratio[wider_family]
        untried_ratio = np.where(np.isnan(sibling), default_ratio, sibling_ratio * sibling)
        ratio = np.where(np.isnan(family_ratio[family]), untried_ratio, family_ratio[family])
        expected = np.where(tried, np.inf, estimate * ratio)
        index = int(expected.argmin())
        if count >= min_plans and expected[index] >= fastest * (1 + SAME_TIME_TOLERANCE):
            return
        tried[index] = True
        actual = seconds(index)
        if actual < inf:
            family_ratio[family[index]] = actual / estimate[index]
            wider_family_ratio[wider_family[index]] = min(1.0, actual / estimate[index])
            fastest, count = min(fastest, actual), count + 1
            yield index
        elif np.isnan(family_ratio[family[index]]):
            family_ratio[family[index]] = 1.0


def _number_by_first_appearance(values: Sequence[object]) -> np.ndarray:
    """For each value the number of its first appearance among the distinct values."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def simulate_leading(estimator: PlanEstimator, estimated: Iterable[Candidate]) -> list[Candidate]:
    """All candidates: the most promising simulated by units, the fastest first, then the others as estimated."""
    ranked = sorted(estimated, key=_seconds_of)
    simulated: dict[int, Candidate] = {}

    def seconds(index: int) -> float:
        simulated[index] = estimator.by_units(ranked[index])
        return simulated[index].seconds

    families = [
        (plan_family(plan), plan.layers[0].offload, plan.batch.micro_batch)
        for plan in (candidate.plan for candidate in ranked)
    ]
    order = most_promising_first(
        [candidate.seconds for candidate in ranked],
        [(family, family) for family in families],
        seconds,
        UNTRIED_RATIO,
        MIN_SIMULATED,
    )
    leading, work = set[int](), 0
    for index in order:
        leading.add(index)
        work += _simulation_work(ranked[index].plan, estimator.run.model.layers)
        if len(leading) == MAX_SIMULATED or work > MAX_WORK:
            break
    others = [candidate for index, candidate in enumerate(ranked) if index not in leading]
    return sorted(simulated.values(), key=_seconds_of) + others


def plan_family(plan: Plan) -> tuple[object, ...]:
    """Key of plans with the same pipeline, tensor and context sizes and the same schedule."""
    axes = ("pipeline", "tensor", "context_ring", "context_ulysses")
    return (*(plan.axis_size(axis) for axis in axes), plan.schedule.name)


def add_better_neighbours(run: RunSpec, candidates: Sequence[Candidate], budget: int | None) -> list[Candidate]:
    """The candidates and faster neighbours of the leading ones, the fastest first.

    Neighbours differ in what the closed form predicts worst: whether gradients and gathered weights stay whole between micro-batches. Of
    an offloaded optimizer, as much state as fits stays on the device, or is fetched before its update. Sums of gradients in host memory
    leave room for activations.
    """
    leading = 1 if _simulation_work(candidates[0].plan, run.model.layers) > MAX_WORK else MAX_IMPROVED
    better, simulated_plans = [], [candidate.plan for candidate in candidates if candidate.simulated]
    for candidate in candidates[:leading]:
        plans = [
            plan
            for plan in (
                *_neighbours(run, candidate.plan),
                *_with_state_on_device(run, candidate.plan, budget),
                *plans_with_sums_on_host(run, candidate.plan),
            )
            if not any(same_layout(plan, other) for other in simulated_plans)
        ]
        for plan in plans:
            simulated_plans.append(plan)
            if fits(run, plan, budget) and _promising(run, plan, candidate):
                better.append(replace(candidate, plan=reprice(run, plan), estimated=None))
    better += [Candidate(reprice(run, plan)) for plan in plans_with_staging(run, candidates, budget)]
    better = [
        candidate for candidate in better if candidate.seconds < candidates[0].seconds * (1 + SAME_TIME_TOLERANCE)
    ]
    return sorted([*better, *(candidate for candidate in candidates if candidate.simulated)], key=_seconds_of) + [
        candidate for candidate in candidates if not candidate.simulated
    ]


def kernel_variants(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """The plan with NCCL kernels in place of each copy engine that is not pinned."""
    pins = pins_of(run)
    for option in copied_options(plan):
        if option.pin(pins) is None:
            yield replace(plan, **engine_fields(set(copied_options(plan)) - {option}))


def add_kernel_variants(run: RunSpec, candidates: Sequence[Candidate], chosen: Candidate) -> list[Candidate]:
    """The candidates and the kernel variants of the chosen one, the fastest first."""
    simulated_plans = [candidate.plan for candidate in candidates if candidate.simulated]
    variants = [
        plan
        for plan in kernel_variants(run, chosen.plan)
        if not any(same_layout(plan, other) for other in simulated_plans)
    ]
    added = [replace(chosen, plan=reprice(run, plan), simulated=True, estimated=None) for plan in variants]
    return (
        sorted([*candidates, *added], key=lambda candidate: (not candidate.simulated, candidate.seconds))
        if added
        else list(candidates)
    )


def _promising(run: RunSpec, plan: Plan, neighbour: Candidate) -> bool:
    """Whether `plan`, estimated by stages, is not much slower than its neighbour."""
    if neighbour.estimated is None:
        return True
    return Candidate(reprice(run, plan, by_units=False)).seconds < neighbour.estimated * NEIGHBOUR_SLOWDOWN


def same_layout(first: Plan, other: Plan) -> bool:
    """Whether two plans are the same apart from predictions and reasons."""
    return first.without_prediction == other.without_prediction


def _simulation_work(plan: Plan, layers: int) -> int:
    """Work of a unit-by-unit simulation: layers × simulated micro-batches × pipeline ranks."""
    ranks = plan.axis_size("pipeline")
    return ranks * min(plan.batch.accumulate, most_played(ranks)) * layers


def _neighbours(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """The plan with `gradients` toggled between whole and shard, and with `reshard` toggled."""
    pins = pins_of(run)
    if pins.layers or shard_size(plan) == 1:
        return
    if pins.gradients is None and plan.batch.accumulate > 1 and not plan.layered:
        other: Gradients = "shard" if plan.layers[0].gradients == "whole" else "whole"
        yield replace(plan, layers=tuple(replace(layer, gradients=other) for layer in plan.layers))
    if pins.reshard is None and len({layer.reshard for layer in plan.layers}) == 1:
        yield replace(plan, layers=tuple(replace(layer, reshard=not layer.reshard) for layer in plan.layers))


def _with_state_on_device(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """The plan with the least offloaded optimizer state that fits, in thousandths of all.

    Also with more recomputation or offloaded activations: state that stays on the device is not copied, which may pay for it.
    """
    pins = pins_of(run)
    if budget is None or run.cluster.is_cpu or pins.offload_fraction is not None:
        return
    if not any(layer.optimizer_offloaded for layer in plan.layers):
        return
    for layers in (*with_more_recompute(run, plan), *_with_all_activations_offloaded(run, plan)):
        shared = partial(_with_share, plan, layers)
        share = bisect_left(
            range(1, SHARES), True, key=lambda share: not any(overfull_ranks(run, shared(share), budget))
        )
        if share + 1 < SHARES:
            yield shared(share + 1)


def _with_all_activations_offloaded(run: RunSpec, plan: Plan) -> Iterator[tuple[LayerStrategy, ...]]:
    """The layers of a plan that offloads the activations of some, with those of all that offload their optimizer."""
    pins = pins_of(run)
    if pins.offload is not None or pins.layers is not None or not any(layer.offload == "both" for layer in plan.layers):
        return
    layers = [replace(layer, offload="both") if layer.optimizer_offloaded else layer for layer in plan.layers]
    alike = {replace(layer, range="all") for layer in layers}
    if any(layer.offload == "optimizer" for layer in plan.layers):
        yield tuple(alike) if len(alike) == 1 else tuple(layers)


def _with_share(plan: Plan, layers: tuple[LayerStrategy, ...], share: int) -> Plan:
    """The plan with other layers and `share` thousandths of the offloaded optimizer state in host memory."""
    return replace(plan, layers=layers, offload_fraction=share / SHARES)


def simplest(
    candidates: Sequence[Candidate],
    budget: int | None = None,
    penalty: Callable[[Plan], float] = lambda plan: 1.0,
    fragile: Callable[[Plan], bool] = lambda plan: False,
) -> Candidate:
    """The simplest of the plans whose step time is within `SAME_TIME_TOLERANCE` of the fastest.

    Plans that are not `fragile` come first, then plans with virtual stages that leave memory for fragmentation, then those with the lowest
    `complexity`. `penalty` is a factor on the seconds of a plan.
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
        return peak_bytes(plan) > roomy_bytes and any(len(rank_stages) > 1 for rank_stages in plan.schedule.stages)

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
    """Number of features that a reader of the plan must understand: axes, layer strategies, recompute, offload, engines."""
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
        + balances_owners(plan)
    )


def _with_fewest_low_memory_layers(run: RunSpec, plan: Plan, strategy: Strategy, budget: int | None) -> Plan:
    """`plan` with the fewest low-memory layers on each pipeline rank with which it fits, found by bisection."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), run.model.layers)
    layers_by_rank = [[layer for stage in rank_stages for layer in stage] for rank_stages in table]

    def with_low_memory(counts: Sequence[int]) -> Plan:
        low_memory = {layer for layers, count in zip(layers_by_rank, counts, strict=True) for layer in layers[:count]}
        return replace(plan, layers=_layers_by_range(run.model.layers, lambda layer: layer in low_memory, strategy))

    fewest, most = [0] * len(layers_by_rank), [len(layers) for layers in layers_by_rank]
    while any(lower < upper for lower, upper in zip(fewest, most, strict=True)):
        middle = [(lower + upper) // 2 for lower, upper in zip(fewest, most, strict=True)]
        for rank, too_full in enumerate(overfull_ranks(run, with_low_memory(middle), budget)):
            if too_full and fewest[rank] < most[rank]:
                fewest[rank] = middle[rank] + 1
            else:
                most[rank] = middle[rank]
    return with_low_memory(fewest)


def _layers_by_range(layers: int, low_memory: Callable[[int], bool], strategy: Strategy) -> tuple[LayerStrategy, ...]:
    """Layer strategies by range: consecutive layers with the same strategy form one range."""
    strategies = []
    for is_low_memory, group in groupby(range(layers), key=low_memory):
        indices = list(group)
        ends = f"{indices[0]}-{indices[-1]}" if len(indices) > 1 else str(indices[0])
        text = "all" if len(indices) == layers else ends
        strategies.append(strategy.layer(strategy.low_memory if is_low_memory else strategy.high_memory, text))
    return tuple(strategies)
