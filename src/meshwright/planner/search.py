"""Searches for the best plan: estimates all layouts in closed form, simulates the best, takes the simplest of the fastest.

Each step of the search is a module: `space` lists the layouts (points), `sweep` estimates their step times by formulas (the closed form),
`finalists` turns the fastest into plans and simulates them, and `reasons` explains the choice. Layouts with equal tensor, context and
pipeline sizes and schedule form a family; the closed form deviates by a similar factor for all of them.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from math import inf

from meshwright.costs.plan_costs import Pricing
from meshwright.planner.accumulation_choice import with_and_without_sums
from meshwright.planner.candidate import (
    Answer,
    Candidate,
    fits,
    memory_budget,
    offload_penalty,
    offloads,
    pins_of,
    untrainable,
)
from meshwright.planner.closed_form import SpaceCosts
from meshwright.planner.conflicts import conflicts
from meshwright.planner.expert_copies import add_copy_variants
from meshwright.planner.finalists import (
    PlanEstimator,
    add_better_neighbours,
    add_kernel_variants,
    most_promising_first,
    plan_at,
    simplest,
    simulate_leading,
)
from meshwright.planner.mlp_tiles import with_tiles
from meshwright.planner.reasons import no_layout, nothing_fits, reasons
from meshwright.planner.reprice import reprice, without_guess
from meshwright.planner.robust import FRAGILE, slowdown_function, why_robust
from meshwright.planner.sample_pins import with_hybrid_ranks
from meshwright.planner.sample_plan import searched_run, with_hybrid_axis
from meshwright.planner.space import SCHEDULES, Points, points, with_kernel_engines
from meshwright.planner.step_estimate import STAGES
from meshwright.planner.strategies import PLAIN, Strategy, lower_memory_strategies
from meshwright.planner.sweep import SweepResult, smallest, strategies_in, sweep
from meshwright.simulator.step_simulation import require_cost_inputs
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.plan import Plan, ScheduleName
from meshwright.spec.run import RunSpec

POINTS_PER_FAMILY, MAX_SLOWDOWN = 4, 1.15
"""Points per family that the sweep returns, and the initial limit on their time relative to the fastest point.

The limit allows for errors of the closed form that differ between families. It grows if simulations are slower than expected.
"""
MIN_ESTIMATES, MAX_PER_FAMILY = 24, 8
"""Fewest plans that are simulated by whole stages (`estimated`), and most of them in one family."""
MAX_EFFORT, ACTIONS_PER_EFFORT = 240.0, 400.0
"""Limit on the total effort of stage simulations.

A plan costs 1, and 1 more for every `ACTIONS_PER_EFFORT` schedule actions.
"""
MARGINS = (1.05, 0.97, 0.9, 0.8)
"""Factors on the usable memory in the closed form, whose memory deviates slightly from the exact computation of a plan.

The search tries the next factor if no plan fits with the previous one.
"""
TIGHTER_MARGINS = (0.97, 0.9)
"""Further factors for a point whose best strategy does not fit exactly: with less memory another strategy may be best."""
UNTRIED_RATIO = 0.95
"""Assumed ratio of the stage simulation to the closed form for a schedule of which no plan was simulated.

One of 1,500 plans had a lower ratio.
"""
SIBLING_RATIO = 0.97
"""On several nodes, factor on a schedule's ratio of estimate to closed form for its untried meshes and micro-batches.

With 1, 2 of 500 random runs missed a plan that was 2 to 4% faster.
"""
KERNEL_VARIANT_SLOWDOWN = 1.02
"""If a copy-engine plan is at most this factor slower than the fastest, the search also tries it with NCCL kernels.

Kernels need no window, the device memory that peers map for copies.
"""
NO_OFFLOAD_SLOWDOWN = 1.06
"""If a plan that offloads is at most this factor slower than the fastest, the search also tries it without."""
StrategiesOf = Callable[[int], Iterator[Strategy]]
"""Strategies of a point, by its index."""
GC_THRESHOLD = 1_000_000
"""Objects created between two scans of Python's garbage collector during a search."""
MAX_SMALLEST = 3
"""Plans with the least memory that the search checks before it reports that nothing fits."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Make Python's garbage collector scan rarely: it spent a fifth of the search time on the tuples of schedules."""
    thresholds = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@_rare_collections()
def search(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> Answer:
    """The best plan for `run` that obeys its pins.

    With `trainable` only plans that this release can train are searched, else all that it can plan. `memory_bytes` is the memory of one
    device when the chip table does not have it (on CPU, a rank's share of the host). Samples of known lengths get hybrid ranks where that
    is faster; where nothing fits, feed-forward networks in tiles are tried. Raises BadInput when the pins cannot be met and OutOfResources
    when nothing fits.
    """
    hybrid, why = with_hybrid_ranks(run, memory_bytes)
    if why:
        with suppress(BadInput, OutOfResources):
            answer = _search(hybrid, run, memory_bytes, trainable)
            return replace(
                answer, best=replace(answer.best, plan=replace(answer.best.plan, why=(why, *answer.best.plan.why)))
            )
    try:
        return _search(run, run, memory_bytes, trainable)
    except OutOfResources:
        tiled = with_tiles(run)
        if tiled is not None:
            with suppress(BadInput, OutOfResources):
                return _search(tiled, run, memory_bytes, trainable)
        raise


def _search(run: RunSpec, requested: RunSpec, memory_bytes: int | None, trainable: bool) -> Answer:
    """`search` of `run`, which has the pins of `requested`, and those that `search` tries."""
    start, pinned, run = time.perf_counter(), run, searched_run(run)
    requested = replace(requested, train=run.train)
    space = points(run, trainable=trainable)
    if not len(space):
        raise BadInput(no_layout(run))
    budget = memory_budget(run, memory_bytes)
    pricing_inputs = _pricing(run, space)
    memory_limit = inf if budget is None else budget * _largest_memory_ratio(run)
    estimator, costs = PlanEstimator(run), SpaceCosts(run, pricing_inputs, space)
    considered, candidates = 0, []
    for margin in MARGINS:
        max_slowdown = MAX_SLOWDOWN
        while True:
            swept = sweep(
                run,
                pricing_inputs,
                space,
                margin * memory_limit,
                best=POINTS_PER_FAMILY,
                max_slowdown=max_slowdown,
                costs=costs,
            )
            considered += swept.priced
            strategies_at = _strategies_to_try(
                run, pricing_inputs, swept.points, swept.strategies.__getitem__, memory_limit
            )
            strategies_without_offload_at = _strategies_without_offload(
                run, pricing_inputs, swept.points, memory_limit, margin
            )
            candidates = _finalists(run, swept, strategies_at, strategies_without_offload_at, budget, estimator)
            fastest = min((candidate.seconds for candidate in candidates), default=0.0)
            needed_slowdown = fastest / UNTRIED_RATIO / swept.seconds[0] if len(swept.seconds) else 0.0
            if needed_slowdown <= max_slowdown:
                break
            max_slowdown = needed_slowdown
        if candidates or budget is None or not len(swept.points):  # with a smaller factor no other point fits
            break
    if not candidates:  # the closed form may overestimate memory by more than the margins
        least = _smallest_plans(run, space)
        tried = [plan for candidate in least for plan in with_and_without_sums(run, candidate.plan)]
        candidates = [estimator.by_stages(plan) for plan in tried if fits(run, plan, budget)]
        if not candidates:
            raise OutOfResources(nothing_fits(run, least, budget or 0))
    candidates = add_better_neighbours(run, simulate_leading(estimator, candidates), budget)
    slowdown = slowdown_function(run, lambda plan: estimator.by_stages(plan).seconds)
    by_seconds = partial(simplest, budget=budget, penalty=partial(offload_penalty, run))
    chosen = partial(by_seconds, fragile=lambda plan: slowdown(plan) > FRAGILE)
    candidates = add_copy_variants(run, candidates, chosen(candidates), budget)
    candidates = add_kernel_variants(run, candidates, chosen(candidates))
    best, fastest_choice = chosen(candidates), by_seconds(candidates)
    others = tuple(candidate for candidate in candidates if candidate is not best)
    why = reasons(best, others, requested, lambda plan: fits(run, plan, budget))
    why += (why_robust(best, fastest_choice, slowdown),) if fastest_choice is not best else ()
    best = replace(best, plan=replace(best.plan, why=why))
    best, *others = (
        replace(candidate, plan=with_hybrid_axis(pinned, without_guess(run, candidate.plan)))
        for candidate in (best, *others)
    )
    return Answer(best, tuple(others), considered, time.perf_counter() - start)


def with_untrainable(
    run: RunSpec, answer: Answer, *, memory_bytes: int | None = None
) -> tuple[Answer, Candidate | None]:
    """`answer`, and the best plan of a search over untrainable plans too, where that is faster.

    If the larger search finds a faster trainable plan, its answer replaces `answer`.
    """
    wider_search = search(run, memory_bytes=memory_bytes, trainable=False)
    if wider_search.best.seconds >= answer.best.seconds:
        return answer, None
    return (answer, wider_search.best) if untrainable(wider_search.best.plan) else (wider_search, None)


def seconds_bound(run: RunSpec, *, trainable: bool = True) -> float:
    """Lower bound by the closed form on the seconds of a step, with unlimited memory; infinite where there is no layout.

    Takes a hundredth of a search. Raises BadInput where the cost model has no rates for the cluster.
    """
    space = points(run, trainable=trainable)
    return float(SpaceCosts(run, _pricing(run, space), space).lower_bounds.min()) if len(space) else inf


def _pricing(run: RunSpec, space: Points) -> Pricing:
    """Machine, shape and constants of the cost model, shared by all points."""
    plain = plan_at(run, space, int(space.column("port").argmax()), PLAIN, None)
    return require_cost_inputs(run.model, run.train, plain, run.cluster)


def _largest_memory_ratio(run: RunSpec) -> float:
    """Memory of the largest device divided by that of the smallest: a stage may be placed on the larger devices only."""
    sizes = [
        replace(run.cluster, gpu=group.gpu or run.cluster.gpu, groups=()).memory_bytes() for group in run.cluster.groups
    ]
    known_sizes = [size for size in (*sizes, replace(run.cluster, groups=()).memory_bytes()) if size]
    return max(known_sizes) / min(known_sizes) if known_sizes else 1.0


def _finalists(
    run: RunSpec,
    swept: SweepResult,
    strategies_at: StrategiesOf,
    strategies_without_offload_at: StrategiesOf | None,
    budget: int | None,
    estimator: PlanEstimator,
) -> list[Candidate]:
    """The most promising points as plans that fit, estimated by stages, a few of each family."""
    points, family_counts = swept.points, Counter[object]()
    families = [_families(points, index, strategy) for index, strategy in enumerate(swept.strategies)]
    estimated: list[Candidate] = []

    def seconds(index: int) -> float:
        family = *points.meshes[points.mesh[index]].inner, families[index][0]
        if family_counts[family] == MAX_PER_FAMILY:
            return inf
        fastest = min((candidate.seconds for candidate in estimated), default=inf)
        estimates: list[Candidate] = []
        for plan in _plans_of_point(run, points, index, strategies_at, strategies_without_offload_at, budget):
            estimates.append(estimator.by_stages(plan))
            if estimates[0].seconds > (NO_OFFLOAD_SLOWDOWN if offloads(plan) else KERNEL_VARIANT_SLOWDOWN) * fastest:
                break
        estimated.extend(estimates)
        family_counts[family] += bool(estimates)
        return min((candidate.seconds for candidate in estimates), default=inf)

    sibling_ratio, effort = SIBLING_RATIO if run.cluster.nodes > 1 else 1.0, 0.0
    for index in most_promising_first(
        swept.seconds.tolist(), families, seconds, UNTRIED_RATIO, MIN_ESTIMATES, sibling_ratio
    ):
        pipeline = points.column("pipeline")[index]
        effort += (
            1
            + pipeline
            * min(points.accumulate[index], STAGES[1] * pipeline)
            * points.virtual[index]
            / ACTIONS_PER_EFFORT
        )
        if effort >= MAX_EFFORT:
            break
    return estimated


def _families(points: Points, index: int, strategy: Strategy) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """(family, wider family) of a point; within each the closed form deviates by a similar factor."""
    mesh, schedule = points.meshes[points.mesh[index]], int(points.schedule[index])
    sizes = mesh.size("pipeline"), mesh.size("tensor"), mesh.size("replicate") > 1, int(points.micro[index])
    return (schedule, strategy.low_memory, strategy.gradients, *sizes), (schedule, *sizes[:1])


def _strategies_to_try(
    run: RunSpec,
    pricing_inputs: Pricing,
    points: Points,
    best_at: Callable[[int], Strategy | None],
    memory_limit: float,
) -> StrategiesOf:
    """Strategies of each point in the order to try: the best, the best for less memory, then lower-memory ones."""

    fastest_in = cache(partial(strategies_in, run, pricing_inputs, points))

    @cache
    def conflicting(schedule: ScheduleName, strategy: Strategy) -> bool:
        return any(
            conflicts(run, trainable=points.trainable, schedule=schedule, recompute=end.recompute, offload=end.offload)
            for end in (strategy.high_memory, strategy.low_memory)
        )

    def of_point(index: int) -> Iterator[Strategy]:
        first, tried = best_at(index), set[Strategy]()
        lower_memory = lower_memory_strategies(run, first) if first else []
        tighter = (fastest_in(part * memory_limit)[index] for part in TIGHTER_MARGINS)
        schedule = SCHEDULES[points.schedule[index]]
        for strategy in chain([first], tighter, lower_memory):
            if strategy is not None and strategy not in tried and not conflicting(schedule, strategy):
                tried.add(strategy)
                yield strategy

    return of_point


def _strategies_without_offload(
    run: RunSpec, pricing_inputs: Pricing, points: Points, memory_limit: float, margin: float
) -> StrategiesOf | None:
    """Strategies of each point without offload, in the same order; None where pins decide the offload."""
    if "none" not in points.offloads or len(points.offloads) == 1 or pins_of(run).layers:
        return None
    points_without_offload = replace(points, offloads=("none",))

    return _strategies_to_try(
        run,
        pricing_inputs,
        points_without_offload,
        strategies_in(run, pricing_inputs, points_without_offload, margin * memory_limit).__getitem__,
        memory_limit,
    )


def _plans_of_point(
    run: RunSpec,
    points: Points,
    index: int,
    strategies_at: StrategiesOf,
    without_offload_at: StrategiesOf | None,
    budget: int | None,
) -> Iterator[Plan]:
    """Plans of the point at `index`: with the first strategy that fits, and up to two variants of it.

    If it offloads, the plan that does not; and the plan with kernels in place of copy engines, where the memory of their
    windows allows other layer strategies.
    """
    plan = _first_to_fit(run, points, index, strategies_at(index), budget)
    if plan is not None:
        yield plan
    if plan is not None and offloads(plan) and without_offload_at:
        plan_without_offload = _first_to_fit(run, points, index, without_offload_at(index), budget)
        if plan_without_offload is not None:
            yield plan_without_offload
    kernel_points, first_strategy = with_kernel_engines(run, points), next(strategies_at(index))
    copies = any(
        points.column(name)[index] != kernel_points.column(name)[index] for name in ("copied", "tokens copied")
    )
    if copies and (plan is None or plan.layers != (first_strategy.layer(first_strategy.high_memory),)):
        kernel_plan = _first_to_fit(run, kernel_points, index, strategies_at(index), budget)
        if kernel_plan is not None and (plan is None or kernel_plan.layers != plan.layers):
            yield kernel_plan


def _first_to_fit(
    run: RunSpec, points: Points, index: int, strategies: Iterator[Strategy], budget: int | None
) -> Plan | None:
    plans = (plan_at(run, points, index, strategy, budget) for strategy in strategies)
    return next((plan for plan in plans if fits(run, plan, budget)), None)


def _smallest_plans(run: RunSpec, space: Points) -> list[Candidate]:
    space = with_kernel_engines(run, space)
    chosen, strategy = smallest(run, space, MAX_SMALLEST)
    plans = [plan_at(run, chosen, index, strategy, 0) for index in range(len(chosen))]
    return [Candidate(reprice(run, plan), fits=False) for plan in plans]
