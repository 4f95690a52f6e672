"""Searches for the best plan of a run, in five steps.

A pin is an option that the user's run fixes, as `plan.tensor=2` does. A move changes one option of a plan (`moves`).

1. `space` lists the layouts that are worth trying. A layout here is a mesh, a micro-batch and a schedule. `sweep` estimates step time and
   memory by formulas (the closed form) and skips layouts whose lower bound is too slow. It returns the fastest layouts of each family with
   their fastest layer strategies that fit. Layouts of a family have the same tensor, pipeline and context ranks, the same schedule and
   virtual stages, and about as many replicas (`sweep._families`).
2. `layout_search` makes plans of these layouts, checks their memory exactly, and simulates a step of each by whole stages. If the fastest
   plan takes time to save memory (by offload or recompute), steps 1 and 2 run once more for each option that may save memory in less time,
   with this option pinned: gradient sums in host memory, for example (`Move.beside`). If no plan fits, slower layouts are searched as well,
   and then the plans that need the least memory are tried with every move. `finalists` simulates the fastest plans again, unit by unit (a
   unit is a block, the embedding or the head).
3. `moves` makes new plans of the fastest plans of unlike kinds, by one move each, such as offload, reshard or transports. Of each move it
   keeps at most two plans, which fit and are estimated to be at most 5% slower than the chosen one, and simulates them by units.
4. For each option of the layout that has no pin, such as the number of tensor ranks, up to three other values are tried: further layouts of
   step 1 with such a value are simulated by stages, until a limit on the schedules' actions is reached. Those within 1% of the best plan
   are simulated by units, and then steps 3 and 4 run again.
5. The fastest plan that was simulated by units wins. For plans with offload, 1 to 3% are added to the simulated seconds, as the simulation
   is less certain there (`offload_penalty`). Plans within 1% of the fastest count as equal. Of these, plans that slow down by at most 5% on
   a network of 80% of the bandwidth (`robust`) come first, then plans that leave memory free where virtual stages need it, then the
   simplest. `reasons` says why the plan was chosen.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf

from meshwright.planner.candidate import (
    Candidate,
    SearchResult,
    fits,
    memory_budget,
    offload_penalty,
    untrainable,
)
from meshwright.planner.closed_form import SpaceCosts
from meshwright.planner.finalists import PlanEstimator, fastest_first, simplest, simulate_leading
from meshwright.planner.layout_search import LayoutSearch, pricing_of
from meshwright.planner.moves import relaxed_runs, with_moves
from meshwright.planner.reasons import no_layout, nothing_fits, reasons
from meshwright.planner.reprice import without_guess
from meshwright.planner.robust import FRAGILE, slowdown_function, why_robust
from meshwright.planner.sample_pins import with_hybrid_ranks
from meshwright.planner.sample_plan import searched_run, with_hybrid_axis
from meshwright.planner.space import points
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.run import RunSpec

GC_THRESHOLD = 1_000_000
"""Objects created between two scans of Python's garbage collector during a search."""


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
def search(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> SearchResult:
    """The best plan for `run` that obeys its pins.

    With `trainable` only plans that this release can train are searched, else all that it can plan. `memory_bytes` is the memory of one
    device when the chip table does not have it (on CPU, a rank's share of the host). If samples have different, known lengths,
    `with_hybrid_ranks` estimates whether hybrid ranks (ranks that share a long sample) are faster. If so, only plans with them are
    searched, and others only if none of these fits. If nothing fits, the search is repeated with further options switched on whose only
    benefit is less memory (`moves.relaxed_runs`). Raises BadInput when the pins cannot be met and OutOfResources when nothing fits.
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
        for relaxed in relaxed_runs(run):
            with suppress(BadInput, OutOfResources):
                return _search(relaxed, run, memory_bytes, trainable)
        raise


def _search(run: RunSpec, requested: RunSpec, memory_bytes: int | None, trainable: bool) -> SearchResult:
    """The five steps for `run`.

    `requested` is the run as the user gave it. `run` is the same run, or has further pins that `search` tries.
    """
    start = time.perf_counter()
    asked = run
    # Batches by tokens are searched as batches of so many sequences; step 5 gives the plan the axis and sizes that `asked` has.
    run = searched_run(run)
    requested = replace(requested, train=run.train)
    space = points(run, trainable=trainable)
    if not len(space):
        raise BadInput(no_layout(run))
    budget = memory_budget(run, memory_bytes)
    estimator = PlanEstimator(run)
    slowdown = slowdown_function(run, lambda plan: estimator.by_stages(plan).seconds)
    choose_ignoring_network = partial(simplest, budget=budget, penalty=partial(offload_penalty, run))
    choose = partial(choose_ignoring_network, fragile=lambda plan: slowdown(plan) > FRAGILE)

    layouts = LayoutSearch(run, space, budget, estimator)  # steps 1 and 2
    candidates = layouts.leading()
    if not candidates:
        raise OutOfResources(nothing_fits(run, layouts.smallest, budget or 0))
    candidates = simulate_leading(estimator, candidates)
    while True:  # steps 3 and 4
        candidates = with_moves(run, candidates, estimator, choose, budget)
        beside = layouts.alternatives(choose(candidates), candidates, requested)
        candidates = fastest_first([*candidates, *beside])
        # `alternatives` simulates by units what may be as fast as the choice.
        if not any(candidate.simulated for candidate in beside):
            break

    # Step 5
    best = choose(candidates)
    without_robustness = choose_ignoring_network(candidates)
    others = tuple(candidate for candidate in candidates if candidate is not best)
    why = reasons(best, others, requested, lambda plan: fits(run, plan, budget))
    if without_robustness is not best:
        why += (why_robust(best, without_robustness, slowdown),)
    best = replace(best, plan=replace(best.plan, why=why))
    best, *others = (
        replace(candidate, plan=with_hybrid_axis(asked, without_guess(run, candidate.plan)))
        for candidate in (best, *others)
    )
    return SearchResult(best, tuple(others), layouts.considered, time.perf_counter() - start)


def with_untrainable(
    run: RunSpec, answer: SearchResult, *, memory_bytes: int | None = None
) -> tuple[SearchResult, Candidate | None]:
    """`answer`, and the best plan of a search over untrainable plans too, where that is faster.

    The search does not try everything. If the larger one finds a faster trainable plan on its way, its answer replaces `answer`.
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
    return float(SpaceCosts(run, pricing_of(run, space), space).lower_bounds.min()) if len(space) else inf
