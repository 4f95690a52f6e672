"""Choosing a plan: every layout in closed form, the best of them simulated, the simplest of the fastest taken.

The layers of the search are modules: what may be chosen (`space`), its price and what need not be priced (`sweep`), the leading few as
explicit plans (`finalists`), and why (`reasons`).
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from math import inf

from meshwright.costs.plan_costs import Pricing
from meshwright.planner.candidate import (
    Answer,
    Candidate,
    budget_of,
    counts,
    fits,
    moves_activations,
    pins_of,
    untrainable,
)
from meshwright.planner.finalists import Judge, improved, in_turn, judged, plan_at, simplest, with_kernels
from meshwright.planner.reasons import no_layout, nothing_fits, reasons
from meshwright.planner.reprice import repriced, without_guess
from meshwright.planner.robust import FRAGILE, losses, why_robust
from meshwright.planner.space import Points, by_kernels, points
from meshwright.planner.step_estimate import STAGES
from meshwright.planner.sweep import (
    MOVING,
    PLAIN,
    Strategy,
    Swept,
    leaner_than,
    lower_bounds,
    smallest,
    strategies_in,
    sweep,
)  # fmt: skip
from meshwright.simulator.step_simulation import priced_or_refused
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

KEPT, REACH = 4, 1.15
"""Points of each family that the sweep hands on, and times the fastest that they may take at first: how much further the closed form
strays of one family than of another. It is asked for more where estimates are as much slower."""
LEAST, ALIKE = 24, 8
"""Plans that are estimated by whole stages in any case, and how many of them may have axes and schedule alike."""
EFFORT, EASY = 240.0, 400.0
"""What estimates may cost in all where slower ones than the fastest are not ruled out, and actions of a schedule that cost as much as the
rest of one plan does."""
MARGINS = (1.05, 0.97, 0.9, 0.8)
"""Of the memory that may be filled, what the closed form is asked for: it strays a little from the exact account, which judges. The next is
tried where no plan of the one before fits."""
TIGHTER = (0.97, 0.9)
"""The same for a point whose best strategy is too large by the exact account: what is best in so much less may be another one."""
HOPE = 0.95
"""Of the closed form's seconds, what plans of a schedule that was not estimated yet may take: of 1,500 plans of three questions one took
less."""
WITHIN = 0.97
"""On several nodes, of what a schedule's plans took of the closed form's seconds, what those of another mesh or micro-batch may take. At 1,
2 of 500 drawn questions missed a plan that was 2 to 4% faster."""
TWINS = 1.02
"""Times the fastest estimate up to which a plan with copies is estimated with kernels too: what the memory of the windows is worth."""
KEEPING = 1.06
"""The same of a plan that moves activations, up to which the one that keeps them is estimated too."""
Ways = Callable[[int], Iterator[Strategy]]
"""Strategies of a point, by its row."""
COLLECTED = 1_000_000
"""Objects made between two scans of Python's garbage collector during a search."""
NAMED = 3
"""Plans that are written out where none fits."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Make Python's garbage collector scan rarely: schedules are hundreds of thousands of tuples, and scanning them took a fifth of a
    search."""
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTED, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@_rare_collections()
def search(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> Answer:
    """The best plan for `run` around its pins, over what this release can train, or without `trainable` over all it can plan.

    `memory_bytes` is one device's memory when the chip table does not know it (the host's share on CPU).
    Raises BadInput when the pins cannot be met and OutOfResources when nothing fits.
    """
    begun = time.perf_counter()
    space = points(run, trainable=trainable)
    if not len(space):
        raise BadInput(no_layout(run))
    budget = budget_of(run, memory_bytes)
    priced = _pricing(run, space)
    room = inf if budget is None else budget * _largest(run)
    judge = Judge(run)
    considered, candidates = 0, []
    for margin in MARGINS:
        reach = REACH
        while True:
            swept = sweep(run, priced, space, margin * room, best=KEPT, reach=reach)
            considered += swept.priced
            ways = _ways(run, priced, swept.points, swept.strategies.__getitem__, room)
            keeping = _keeping(run, priced, swept.points, room, margin)
            candidates = _finalists(run, swept, ways, keeping, budget, judge)
            fastest = min((one.seconds for one in candidates), default=0.0)
            needed = fastest / HOPE / swept.seconds[0] if len(swept.seconds) else 0.0
            if needed <= reach:
                break
            reach = needed
        if candidates or budget is None or not len(swept.points):  # less room has no more in it
            break
    if not candidates:  # the closed form may be too high by more than the margins
        least = _smallest(run, space)
        candidates = [judge.estimated(one.plan) for one in least if fits(run, one.plan, budget)]
        if not candidates:
            raise OutOfResources(nothing_fits(run, least, budget or 0))
    candidates = improved(run, judged(judge, candidates), budget)
    loss = losses(run)
    by_seconds = partial(simplest, budget=budget, counts=partial(counts, run))
    chosen = partial(by_seconds, fragile=lambda plan: loss(plan) > FRAGILE)
    candidates = with_kernels(run, candidates, chosen(candidates))
    best, otherwise = chosen(candidates), by_seconds(candidates)
    others = tuple(one for one in candidates if one is not best)
    why = reasons(best, others, run, lambda plan: fits(run, plan, budget))
    why += (why_robust(best, otherwise, loss),) if otherwise is not best else ()
    best = replace(best, plan=replace(best.plan, why=why))
    best, *others = (replace(one, plan=without_guess(run, one.plan)) for one in (best, *others))
    return Answer(best, tuple(others), considered, time.perf_counter() - begun)


def with_untrainable(
    run: RunSpec, answer: Answer, *, memory_bytes: int | None = None
) -> tuple[Answer, Candidate | None]:
    """`answer`, and the best plan of a search over what this release can plan but not train too, where that is faster.

    Where the larger search finds a faster plan that can be trained, its answer takes the place of `answer`.
    """
    wide = search(run, memory_bytes=memory_bytes, trainable=False)
    if wide.best.seconds >= answer.best.seconds:
        return answer, None
    return (answer, wide.best) if untrainable(wide.best.plan) else (wide, None)


def seconds_bound(run: RunSpec, *, trainable: bool = True) -> float:
    """Seconds of a step by the closed form that no plan beats, whatever memory it needs; infinite where there is no layout.

    A hundredth of a search. Raises BadInput where the cost model has no rates for the cluster.
    """
    space = points(run, trainable=trainable)
    return float(lower_bounds(run, _pricing(run, space), space).min()) if len(space) else inf


def _pricing(run: RunSpec, space: Points) -> Pricing:
    """Machine, shape and constants, which are the same for all points but for the network that unlike nodes leave them."""
    plain = plan_at(run, space, int(space.column("port").argmax()), PLAIN, None)
    return priced_or_refused(run.model, run.train, plain, run.cluster)


def _largest(run: RunSpec) -> float:
    """Memory of the largest device over the smallest's: on unlike nodes a stage may have the larger ones to itself."""
    sizes = [
        replace(run.cluster, gpu=group.gpu or run.cluster.gpu, groups=()).memory_bytes() for group in run.cluster.groups
    ]
    known = [size for size in (*sizes, replace(run.cluster, groups=()).memory_bytes()) if size]
    return max(known) / min(known) if known else 1.0


def _finalists(
    run: RunSpec, swept: Swept, ways: Ways, keeping: Ways | None, budget: int | None, judge: Judge
) -> list[Candidate]:
    """The points that promise most and fit, as estimated plans, a few of each kind."""
    points, seen = swept.points, Counter[object]()
    kinds = [_kinds(points, row, strategy) for row, strategy in enumerate(swept.strategies)]
    found: list[Candidate] = []

    def seconds(row: int) -> float:
        alike = *points.meshes[points.mesh[row]].inner, kinds[row][0]
        if seen[alike] == ALIKE:
            return inf
        fastest = min((one.seconds for one in found), default=inf)
        tried: list[Candidate] = []
        for plan in _written(run, points, row, ways, keeping, budget):
            tried.append(judge.estimated(plan))
            if tried[0].seconds > (KEEPING if moves_activations(plan) else TWINS) * fastest:
                break
        found.extend(tried)
        seen[alike] += bool(tried)
        return min((one.seconds for one in tried), default=inf)

    within, effort = WITHIN if run.cluster.nodes > 1 else 1.0, 0.0
    for row in in_turn(swept.seconds.tolist(), kinds, seconds, HOPE, LEAST, within):
        pipeline = points.column("pipeline")[row]
        effort += 1 + pipeline * min(points.accumulate[row], STAGES[1] * pipeline) * points.virtual[row] / EASY
        if effort >= EFFORT:
            break
    return found


def _kinds(points: Points, row: int, strategy: Strategy) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """A point's kind, about which the closed form is wrong alike, and a wider one."""
    mesh, schedule = points.meshes[points.mesh[row]], int(points.schedule[row])
    sizes = mesh.size("pipeline"), mesh.size("tensor"), mesh.size("replicate") > 1, int(points.micro[row])
    return (schedule, strategy.lean, strategy.gradients, *sizes), (schedule, *sizes[:1])


def _ways(run: RunSpec, priced: Pricing, points: Points, best: Callable[[int], Strategy | None], room: float) -> Ways:
    """By point, the strategies to try until one fits by the exact account: the best, the best in less room, then what goes on from it."""

    fastest_in = cache(partial(strategies_in, run, priced, points))

    def of_point(row: int) -> Iterator[Strategy]:
        first, known = best(row), set[Strategy]()
        on = leaner_than(run, first) if first else []
        tighter = (fastest_in(part * room)[row] for part in TIGHTER)
        for strategy in chain([first], tighter, on):
            if strategy is not None and strategy not in known:
                known.add(strategy)
                yield strategy

    return of_point


def _keeping(run: RunSpec, priced: Pricing, points: Points, room: float, margin: float) -> Ways | None:
    """By point, the strategies that keep activations on the device, likewise, the best one in `margin` of the room as the sweep has it;
    None where the pins say what waits on the host."""
    here = tuple(offload for offload, _ in MOVING if offload in points.offloads)
    if here in ((), points.offloads) or pins_of(run).layers:
        return None
    kept = replace(points, offloads=here)
    return _ways(run, priced, kept, strategies_in(run, priced, kept, margin * room).__getitem__, room)


def _written(
    run: RunSpec, points: Points, row: int, ways: Ways, keeping: Ways | None, budget: int | None
) -> Iterator[Plan]:
    """The plan of one point under the first of its `ways` that fits; where that moves activations, the one that keeps them; and the one
    without the windows of what is copied where that leaves memory for other layers."""
    plan = _first_to_fit(run, points, row, ways(row), budget)
    if plan is not None:
        yield plan
    if plan is not None and moves_activations(plan) and keeping:
        kept = _first_to_fit(run, points, row, keeping(row), budget)
        if kept is not None:
            yield kept
    plain, richest = by_kernels(run, points), next(ways(row))
    copies = any(points.column(name)[row] != plain.column(name)[row] for name in ("copied", "tokens copied"))
    if copies and (plan is None or plan.layers != (richest.layer(richest.rich),)):
        other = _first_to_fit(run, plain, row, ways(row), budget)
        if other is not None and (plan is None or other.layers != plan.layers):
            yield other


def _first_to_fit(run: RunSpec, points: Points, row: int, ways: Iterator[Strategy], budget: int | None) -> Plan | None:
    plans = (plan_at(run, points, row, strategy, budget) for strategy in ways)
    return next((plan for plan in plans if fits(run, plan, budget)), None)


def _smallest(run: RunSpec, space: Points) -> list[Candidate]:
    space = by_kernels(run, space)
    chosen, strategy = smallest(run, space, NAMED)
    plans = [plan_at(run, chosen, row, strategy, 0) for row in range(len(chosen))]
    return [Candidate(repriced(run, plan), fits=False) for plan in plans]
