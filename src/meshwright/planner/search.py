"""Choosing a plan: every layout in closed form, the best of them simulated, the simplest of the fastest taken.

The layers of the search are modules: what may be chosen (`space`), its price and what need not be priced (`sweep`), the leading few as
explicit plans (`finalists`), and why (`reasons`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from meshwright.costs.of_plan import Pricing
from meshwright.planner.candidate import Answer, Candidate, budget_of, fits
from meshwright.planner.finalists import improved, judged, kernel_twins, plan_at, simplest, with_kernels
from meshwright.planner.reasons import no_layout, nothing_fits, reasons
from meshwright.planner.reprice import repriced
from meshwright.planner.space import Points, by_kernels, points
from meshwright.planner.sweep import PLAIN, Strategy, Swept, leaner_than, smallest, sweep
from meshwright.simulator.of_plan import priced_or_refused
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

KEPT = 256
"""Points that the sweep hands on."""
FINALISTS, ALIKE = 28, 4
"""Plans that are estimated by whole stages, and how many of them may be of one kind: the closed form may be wrong about all of that."""
MARGINS = (1.05, 0.97, 0.9, 0.8)
"""Of the memory that may be filled, what the closed form is asked for: it strays a little from the exact account, which judges. The next is
tried where no plan of the one before fits."""
NAMED = 3
"""Plans that are written out where none fits."""


def search(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = False) -> Answer:
    """The best plan for `run` around its pins, over all axes, or with `trainable` over what this release can train.

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
    considered, candidates = 0, []
    for margin in MARGINS:
        swept = sweep(run, priced, space, margin * room, best=KEPT)
        considered += swept.priced
        candidates = judged(run, _plans(run, swept, budget))
        if candidates or budget is None:
            break
    if not candidates:  # the closed form may be too high by more than the margins
        least = _smallest(run, space)
        candidates = judged(run, [one.plan for one in least if fits(run, one.plan, budget)])
        if not candidates:
            raise OutOfResources(nothing_fits(run, least, budget or 0))
    candidates = improved(run, candidates, budget)
    candidates = with_kernels(run, candidates, simplest(candidates, budget))
    best = simplest(candidates, budget)
    others = tuple(one for one in candidates if one is not best)
    best = replace(best, plan=replace(best.plan, why=reasons(best, others, run, lambda plan: fits(run, plan, budget))))
    return Answer(best, others, considered, time.perf_counter() - begun)


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


def _plans(run: RunSpec, swept: Swept, budget: int | None) -> Iterator[Plan]:
    """The leading points that fit, as plans, a few of each kind."""
    seen: Counter[object] = Counter()
    many = 0
    for row, strategy in enumerate(swept.strategies):
        points = swept.points
        kind = *points.meshes[points.mesh[row]].inner, int(points.schedule[row])
        if seen[kind] == ALIKE:
            continue
        found = [plan for plan in _written(run, points, row, strategy, budget) if fits(run, plan, budget)]
        yield from found
        seen[kind] += bool(found)
        many += len(found)
        if many >= FINALISTS:
            return


def _written(run: RunSpec, points: Points, row: int, strategy: Strategy, budget: int | None) -> Iterator[Plan]:
    """The plan of one point, those with leaner layers where that is a little too large, and the one without the windows of what is copied
    where that leaves memory for other layers."""
    plan = plan_at(run, points, row, strategy, budget)
    yield plan
    roomy = fits(run, plan, budget)
    for leaner in [] if roomy else leaner_than(run, strategy):
        yield plan_at(run, points, row, leaner, budget)
    if not any(kernel_twins(run, plan)):
        return
    if strategy.rich != strategy.lean or not roomy:
        other = plan_at(run, by_kernels(run, points), row, strategy, budget)
        if other.layers != plan.layers or not roomy:
            yield other


def _smallest(run: RunSpec, space: Points) -> list[Candidate]:
    space = by_kernels(run, space)
    chosen, strategy = smallest(run, space, NAMED)
    plans = [plan_at(run, chosen, row, strategy, 0) for row in range(len(chosen))]
    return [Candidate(repriced(run, plan), fits=False) for plan in plans]
