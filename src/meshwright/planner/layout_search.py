"""First part of the search: the layouts of a run as candidates, by the closed form and then by a simulation of whole stages."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from math import inf

import numpy as np

from meshwright.costs.plan_costs import Pricing
from meshwright.planner.candidate import Candidate, PlanOption, compared_seconds, fits, nearest_values
from meshwright.planner.closed_form import SpaceCosts
from meshwright.planner.conflicts import conflicts
from meshwright.planner.finalists import SAME_TIME_TOLERANCE, PlanEstimator, Ranking, plan_at
from meshwright.planner.moves import VARIANTS, moved_to_fit, searched_beside
from meshwright.planner.reprice import reprice
from meshwright.planner.space import SCHEDULES, Points, with_kernel_engines
from meshwright.planner.step_estimate import STAGES
from meshwright.planner.strategies import PLAIN, Strategy, lower_memory_strategies
from meshwright.planner.sweep import MOST_REPLICAS, SweepResult, smallest, strategies_in, sweep
from meshwright.simulator.step_simulation import require_cost_inputs
from meshwright.spec.plan import CONTEXT_AXES, RECOMPUTES_MATMULS, AxisName, Plan, ScheduleName
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import context_size, experts_over

POINTS_PER_FAMILY = 4
MAX_SLOWDOWN = 1.15
"""Points per family that the sweep returns, and the initial limit on their time relative to the fastest point.

The limit allows for errors of the closed form that differ between families. It grows if simulations are slower than expected.
"""
MAX_PER_FAMILY = 8
"""Maximum number of plans of one family that are simulated by whole stages (`estimated`)."""
MIN_EFFORT = 24.0
MAX_EFFORT = 240.0
ACTIONS_PER_EFFORT = 400.0
"""Least and most effort of stage simulations; between them only plans that are expected to be about as fast as the fastest are simulated.

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
SPLIT_RATIO = 0.975
"""On several nodes, the same for another number of shards: the closed form lets both shards and replicas hide behind the backward."""
VALUE_EFFORT = 4.0
ALL_VALUES_EFFORT = 10.0
"""Limits on the effort to find the fastest plan with another value of one option: for each such value, and for all together.

A layout that alone takes more effort than the first is not tried.
"""
StrategiesOf = Callable[[int], Iterator[Strategy]]
"""Strategies of a point, by its index."""
MAX_SMALLEST = 3
"""Plans with the least memory that the search checks before it reports that nothing fits."""


def pricing_of(run: RunSpec, space: Points) -> Pricing:
    """Machine, shape and constants of the cost model, shared by all points."""
    plain = plan_at(run, space, int(space.column("port").argmax()), PLAIN, None)
    return require_cost_inputs(run.model, run.train, plain, run.cluster)


@dataclass(frozen=True)
class LayoutOption(PlanOption):
    """An option that the sweep decides, with its values by point."""

    value: Callable[[Plan], object]
    column: Callable[[Points], np.ndarray]


def _axis(name: AxisName, *keys: str) -> LayoutOption:
    return LayoutOption(name, (name, *keys), lambda plan: plan.axis_size(name), lambda points: points.column(name))


LAYOUT_OPTIONS = (
    _axis("pipeline"),
    _axis("tensor"),
    LayoutOption("context", CONTEXT_AXES, context_size, lambda points: points.column("context")),
    _axis("replicate", "shard"),
    LayoutOption("expert ranks", ("expert",), experts_over, lambda points: points.column("expert")),
    LayoutOption(
        "schedule",
        ("schedule", "stages"),
        lambda p: p.schedule.name,
        lambda points: np.array(SCHEDULES)[points.schedule],
    ),
    LayoutOption("micro-batch", ("micro_batch",), lambda p: p.batch.micro_batch, lambda points: points.micro),
)
"""The options that the sweep decides, in the order in which they are explained."""


class LayoutSearch:
    """Searches the layouts `space` of a run for plans that fit into `budget` bytes of a device."""

    def __init__(self, run: RunSpec, space: Points, budget: int | None, estimator: PlanEstimator) -> None:
        self.run = run
        self.space = space
        self.budget = budget
        self.estimator = estimator
        self.pricing = pricing_of(run, space)
        self.memory_limit = inf if budget is None else budget * _largest_memory_ratio(run)
        self.considered = 0
        """As `SearchResult.considered`."""
        self._searched = set[tuple[str, object]]()
        self._beside: list[LayoutSearch] = []
        """Searches with one more pin: an option that saves memory in another way."""

    def leading(self) -> list[Candidate]:
        """The most promising layouts as plans that fit, estimated by stages; those of least memory if the closed form finds none.

        If they give up time to save memory, the layouts are also searched with each option pinned that saves it otherwise.
        """
        candidates = self._leading()
        if not candidates:
            return candidates
        fastest = min(candidates, key=lambda candidate: candidate.seconds)
        for run, space in searched_beside(self.run, fastest.plan, self.space.trainable):
            other = LayoutSearch(run, space, self.budget, self.estimator)
            candidates += other._leading(fastest.seconds)
            self._beside.append(other)
            self.considered += other.considered
        return candidates

    def _leading(self, limit: float = inf) -> list[Candidate]:
        """`leading` for `run` alone; layouts that are estimated to take longer than `limit` seconds may be left out."""
        costs = SpaceCosts(self.run, self.pricing, self.space)
        candidates, tried = self._fitting(costs, MAX_SLOWDOWN, limit)
        if tried and not candidates and limit == inf:
            # What fits may be much slower than what fits by the closed form only.
            candidates, _ = self._fitting(costs, inf, limit)
        # The closed form may overestimate memory by more than the margins.
        plans = (
            []
            if candidates or limit < inf
            else moved_to_fit(self.run, [least.plan for least in self.smallest], self.budget)
        )
        return candidates or [self.estimator.by_stages(plan) for plan in plans]

    def _fitting(self, costs: SpaceCosts, max_slowdown: float, limit: float) -> tuple[list[Candidate], bool]:
        """Plans that fit, and whether any layout fits by the closed form, with the largest factor on the usable memory.

        The layouts take at most `max_slowdown` times as long as the fastest, or longer if all are simulated slower.
        """
        tried = False
        for margin in MARGINS:
            memory_limit = margin * self.memory_limit
            while True:
                swept = sweep(
                    self.run,
                    self.pricing,
                    self.space,
                    memory_limit,
                    best=POINTS_PER_FAMILY,
                    max_slowdown=max_slowdown,
                    limit=limit / UNTRIED_RATIO,
                    costs=costs,
                )
                self.considered += swept.priced
                self._finalists = Finalists(self, swept, memory_limit)
                candidates = list(self._finalists.estimates())
                fastest = min((candidate.seconds for candidate in candidates), default=0.0)
                needed_slowdown = fastest / UNTRIED_RATIO / swept.seconds[0] if len(swept.seconds) else 0.0
                if needed_slowdown <= max_slowdown:
                    break
                max_slowdown = needed_slowdown
            tried = tried or len(swept.points) > 0
            if candidates or self.budget is None or not len(swept.points):  # with a smaller factor no other point fits
                break
        return candidates, tried

    @cached_property
    def smallest(self) -> list[Candidate]:
        """The plans that need the least memory."""
        space = with_kernel_engines(self.run, self.space)
        chosen, strategy = smallest(self.run, space, MAX_SMALLEST)
        plans = [plan_at(self.run, chosen, index, strategy, 0) for index in range(len(chosen))]
        return [Candidate(reprice(self.run, plan), fits=False) for plan in plans]

    def alternatives(self, best: Candidate, candidates: Sequence[Candidate], requested: RunSpec) -> list[Candidate]:
        """New candidates from a search of each other value that is named beside an option of `best`, as if it were pinned.

        Those that are estimated to be about as fast as `best` are simulated by units. `requested` has the user's pins.
        """
        found: list[Candidate] = []
        limit = (1 + SAME_TIME_TOLERANCE) * compared_seconds(self.run, self.estimator.by_stages(best.plan))
        for option in LAYOUT_OPTIONS:
            named = [other.plan for other in nearest_values(best, [*candidates, *found], option.value)]
            if not option.free(requested):
                continue
            for value in map(option.value, named):
                if (option.name, value) not in self._searched and self._finalists.values_effort < ALL_VALUES_EFFORT:
                    self._searched.add((option.name, value))
                    for finalists in (self._finalists, *(other._finalists for other in self._beside)):
                        among = option.column(finalists.points) == value
                        found += finalists.estimates(among)
        return [
            self.estimator.by_units(other) if compared_seconds(self.run, other) < limit else other for other in found
        ]


class Finalists:
    """The layouts of a sweep in the order of their promise, as plans that fit, a few of each family."""

    def __init__(self, search: LayoutSearch, swept: SweepResult, memory_limit: float) -> None:
        self.search = search
        self.points = swept.points
        run = search.run
        self._family_counts = Counter[object]()
        self._families = [_families(swept.points, index, strategy) for index, strategy in enumerate(swept.strategies)]
        self._fastest = inf
        self.values_effort = 0.0
        played = np.minimum(swept.points.accumulate, STAGES[1] * swept.points.column("pipeline"))
        self._effort = 1 + swept.points.column("pipeline") * played * swept.points.virtual / ACTIONS_PER_EFFORT
        factors = (1.0, SPLIT_RATIO, SIBLING_RATIO) if run.cluster.nodes > 1 else (1.0, 1.0, 1.0)
        self._ranking = Ranking(swept.seconds.tolist(), self._families, UNTRIED_RATIO, factors)
        self._strategies_at = self._strategies_of(swept.points, swept.strategies.__getitem__)
        restricted = ((variant, variant.points(run, swept.points)) for variant in VARIANTS)
        self._variants = [
            (variant, points, self._strategies_of(points, self._best_strategy(points, memory_limit)))
            for variant, points in restricted
            if points is not None
        ]

    def estimates(self, among: np.ndarray | None = None) -> Iterator[Candidate]:
        """Estimates of the most promising layouts; of untried ones in the mask `among` that are expected to be the fastest there."""
        min_effort = MIN_EFFORT
        max_effort = MAX_EFFORT
        tolerance = SAME_TIME_TOLERANCE
        if among is not None:
            among = among & (self._effort <= VALUE_EFFORT)
            min_effort = 0.0
            max_effort = VALUE_EFFORT
            tolerance = -SAME_TIME_TOLERANCE
        new: list[Candidate] = []

        def seconds(index: int) -> float:
            family = *self.points.meshes[self.points.mesh[index]].inner, self._families[index][1]
            if self._family_counts[family] == MAX_PER_FAMILY:
                return inf
            estimates = self._estimates_of(index)
            new.extend(estimates)
            self._family_counts[family] += bool(estimates)
            fastest = min(map(partial(compared_seconds, self.search.run), estimates), default=inf)
            self._fastest = min(self._fastest, fastest)
            return fastest

        effort = 0.0
        for index in self._ranking.order(seconds, min_effort, among, tolerance, self._effort):
            yield from new
            new.clear()
            effort += self._effort[index]
            self.values_effort += 0.0 if among is None else self._effort[index]
            if effort >= max_effort:
                break

    def _estimates_of(self, index: int) -> list[Candidate]:
        """Estimates of the plans of the point at `index`: its first strategy that fits, and variants that may be fast."""
        estimator = self.search.estimator
        plan = self._first_to_fit(self.points, index, self._strategies_at(index))
        estimates = [] if plan is None else [estimator.by_stages(plan)]
        for variant, points, strategies_at in self._variants:
            slow = bool(estimates) and estimates[0].seconds > variant.slowdown * min(
                self._fastest, estimates[0].seconds
            )
            if slow or not variant.applies(self.points, points, index, plan):
                continue
            other = self._first_to_fit(points, index, strategies_at(index))
            if other is not None and (plan is None or other.layers != plan.layers):
                estimates.append(estimator.by_stages(other))
        return estimates

    def _first_to_fit(self, points: Points, index: int, strategies: Iterator[Strategy]) -> Plan | None:
        run = self.search.run
        budget = self.search.budget
        plans = (plan_at(run, points, index, strategy, budget) for strategy in strategies)
        return next((plan for plan in plans if fits(run, plan, budget)), None)

    def _best_strategy(self, points: Points, memory_limit: float) -> Callable[[int], Strategy | None]:
        """The fastest strategy of each point by the closed form, by its index; computed at the first call."""
        strategies = cache(partial(strategies_in, self.search.run, self.search.pricing, points, memory_limit))
        return lambda index: strategies()[index]

    def _strategies_of(self, points: Points, best_at: Callable[[int], Strategy | None]) -> StrategiesOf:
        """Strategies of each point in the order to try: the best, the best for less memory, then lower-memory ones."""
        run = self.search.run
        limit = self.search.memory_limit
        tighter_at = [self._best_strategy(points, part * limit) for part in TIGHTER_MARGINS]

        @cache
        def conflicting(schedule: ScheduleName, strategy: Strategy) -> bool:
            ends = strategy.high_memory, strategy.low_memory
            return any(
                conflicts(
                    run, trainable=points.trainable, schedule=schedule, recompute=end.recompute, offload=end.offload
                )
                for end in ends
            )

        def of_point(index: int) -> Iterator[Strategy]:
            first = best_at(index)
            tried = set[Strategy]()
            lower_memory = lower_memory_strategies(run, first) if first else []
            schedule = SCHEDULES[points.schedule[index]]
            for strategy in chain([first], (tighter(index) for tighter in tighter_at), lower_memory):
                if strategy is not None and strategy not in tried and not conflicting(schedule, strategy):
                    tried.add(strategy)
                    yield strategy

        return of_point


def _families(points: Points, index: int, strategy: Strategy) -> tuple[tuple[object, ...], ...]:
    """The families of a point, the narrowest first; within each the closed form deviates by a similar factor.

    Recompute of attention alone hardly matters. A single strategy of all layers leaves no choice where the exact memory is larger, and many
    virtual stages need more strategies for their memory than few. Across nodes the closed form deviates otherwise where more of the traffic
    is that of shards, and less that of replicas.
    """
    mesh = points.meshes[points.mesh[index]]
    schedule = int(points.schedule[index])
    end = strategy.low_memory
    saving = (
        end.recompute in RECOMPUTES_MATMULS,
        end.reshard,
        end.offload,
        strategy.gradients,
        end == strategy.high_memory,
    )
    sizes = (
        mesh.size("pipeline"),
        mesh.size("tensor"),
        mesh.context,
        mesh.expert,
        bisect_left(MOST_REPLICAS, mesh.size("replicate")),
        int(points.micro[index]),
    )
    family = schedule, int(points.virtual[index]), *saving, *sizes
    return (mesh.size("shard"), *family), family, (schedule, mesh.size("pipeline"), int(points.accumulate[index]))


def _largest_memory_ratio(run: RunSpec) -> float:
    """Memory of the largest device divided by that of the smallest: a stage may be placed on the larger devices only."""
    sizes = [
        replace(run.cluster, gpu=group.gpu or run.cluster.gpu, groups=()).memory_bytes() for group in run.cluster.groups
    ]
    known_sizes = [size for size in (*sizes, replace(run.cluster, groups=()).memory_bytes()) if size]
    return max(known_sizes) / min(known_sizes) if known_sizes else 1.0
