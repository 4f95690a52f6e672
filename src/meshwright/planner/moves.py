"""Options of a plan that the search decides one at a time: a list of moves, and the loop that tries them on the fastest plans.

The sweep decides mesh, micro-batch, schedule and layer strategies of all layouts. Everything else is a `Move`: plans that differ from a
plan in one option. The loop keeps those that fit and are fast. A new option of the search is one entry of `MOVES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.candidate import Candidate, PlanOption, fits, offloads, pins_of
from meshwright.planner.expert_moves import copies, copies_text, kept_copies, owners, placement_text
from meshwright.planner.explain import micro_batches_text, on_layers
from meshwright.planner.finalists import (
    SAME_TIME_TOLERANCE,
    PlanEstimator,
    fastest_first,
    is_large,
    plan_family,
    with_layers_eased,
    with_room_used,
)
from meshwright.planner.memory_moves import (
    Fits,
    fraction_reason,
    staging,
    staging_reason,
    state_on_device,
    sums_on_host,
    sums_reason,
    tile_reason,
    with_sums_on_host,
    with_tiles,
)
from meshwright.planner.space import SCHEDULES, Points, points, with_kernel_engines
from meshwright.planner.strategies import PLAIN
from meshwright.spec.plan import RECOMPUTES_MATMULS, Gradients, Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.copy_options import COPY_OPTIONS, GATHERS, TOKENS, CopyOption, copied_options, transport_fields
from meshwright.workload.groups import gathers_weights, shard_size

MAX_STARTS = 3
MANY_STARTS = 6
MAX_TRIED = 2
"""Fastest plans of unlike kinds on which a move is tried, and on which one is tried that moves state out of the device or back, as what
that gains differs most between plans; large plans are tried alone. The third is the most plans of a move from each that are simulated by
units.
"""
MOVE_SLOWDOWN = 1.05
"""Factor on a plan's estimated step time up to which a move of it is simulated by units."""


def no_plans(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """No plans: the option is decided elsewhere."""
    yield from ()


@dataclass(frozen=True, kw_only=True)
class Move(PlanOption):
    """An option that the search decides on plans of the fastest layouts: its candidates, and how the choice is explained."""

    plans: Callable[[RunSpec, Plan, int | None], Iterable[Plan]] = no_plans
    """The plan with other values of the option where it may have them; the last argument is the usable memory of a device."""
    pinned: Callable[[RunSpec], RunSpec | None] = lambda run: None
    """The run with the option pinned, for another search where nothing fits; None where that would not help."""
    beside: Callable[[Points], np.ndarray] | None = None
    """Selects layouts that are also searched with the option pinned, if the fastest plan takes time to save memory: the option may take
less time."""
    value: Callable[[Plan], object] | None = None
    """The option's value in a plan; sentences compare it with those of other plans."""
    why: Callable[[RunSpec, Plan, Fits], str] = lambda run, plan, fits: ""
    """A sentence about the option in a plan, given whether plans fit; empty where there is nothing to say."""
    starts: int = MAX_STARTS
    slowdown: float = MOVE_SLOWDOWN
    """Factor on the chosen plan's estimated seconds up to which plans of the move are simulated by units."""


def other_gradients(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """The plan with `gradients` toggled between whole and shard."""
    if shard_size(plan) > 1 and plan.batch.accumulate > 1 and not plan.layered:
        other: Gradients = "shard" if plan.layers[0].gradients == "whole" else "whole"
        yield replace(plan, layers=tuple(replace(layer, gradients=other) for layer in plan.layers))


def other_reshard(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """The plan with `reshard` toggled; if it then does not fit, with as many layers that save memory otherwise as it needs.

    Weights are not freed where nothing else saves memory: gathering them again would only take time.
    """
    saves = any(layer.reshard or layer.recompute != "none" or layer.offload != "none" for layer in plan.layers)
    if saves and gathers_weights(plan) and len({layer.reshard for layer in plan.layers}) == 1:
        toggled = replace(plan, layers=tuple(replace(layer, reshard=not layer.reshard) for layer in plan.layers))
        yield from [toggled] if fits(run, toggled, budget) else with_room_used(run, toggled, budget)


def reshard_reason(run: RunSpec, plan: Plan, fits: Fits) -> str:
    """Why weights are gathered, or cast on one rank, again for the backward."""
    resharded = [layer for layer in plan.layers if layer.reshard]
    if not resharded or not gathers_weights(plan):
        return ""
    gathered = replace(plan, layers=tuple(replace(layer, reshard=False) for layer in plan.layers))
    micro_batches = f"if they stayed gathered, {micro_batches_text(plan)} would not fit into memory"
    where = on_layers(resharded, run.model.layers)
    why = "keeping them gathered is no faster"
    again = "gathered" if shard_size(plan) > 1 else "cast"
    return f"weights freed after the forward and {again} again for the backward on {where}: {why if fits(gathered) else micro_batches}"


def _kernels(option: CopyOption) -> Move:
    """The move from a copy engine to NCCL kernels, which need no window: the device memory that peers map for copies."""

    def plans(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
        if option in copied_options(plan):
            yield replace(plan, **transport_fields(set(copied_options(plan)) - {option}))

    return Move(name=option.transfer_name, keys=(option.key,), plans=plans, starts=1)


MOVES = (
    Move(name="gradients", keys=("gradients", "layers"), plans=other_gradients, value=lambda p: p.layers[-1].gradients),
    Move(name="reshard", keys=("reshard", "layers"), plans=other_reshard, why=reshard_reason),
    Move(
        name="offload_fraction",
        keys=("offload_fraction",),
        plans=state_on_device,
        why=fraction_reason,
        starts=MANY_STARTS,
    ),
    Move(name="offload_staging", keys=("offload_staging",), plans=staging, why=staging_reason),
    Move(
        name="accumulation",
        keys=("accumulation",),
        plans=sums_on_host,
        pinned=with_sums_on_host,
        beside=lambda points: (points.accumulate > 1) & (points.schedule != SCHEDULES.index("breadth_first")),
        why=sums_reason,
        starts=MANY_STARTS,
    ),
    Move(name="copies of experts:", keys=("expert_policy",), plans=copies, value=copies_text),
    Move(name="expert placement:", keys=("expert_placement",), plans=owners, value=placement_text),
    Move(name="kept copies", keys=("expert_keep",), plans=kept_copies),
    Move(name="mlp_tile", keys=("mlp_tile", "layers"), pinned=with_tiles, why=tile_reason),
    Move(name="eased", keys=("layers",), plans=with_layers_eased, slowdown=1.0),
    _kernels(GATHERS),
    _kernels(TOKENS),
    Move(name="room", keys=("layers",), plans=with_room_used, starts=1),
)
"""All moves, in the order in which they are tried and explained."""


def with_moves(
    run: RunSpec,
    candidates: Sequence[Candidate],
    estimator: PlanEstimator,
    choose: Callable[[Sequence[Candidate]], Candidate],
    budget: int | None,
    moves: Sequence[Move] = MOVES,
) -> list[Candidate]:
    """The candidates and the plans that moves make of the chosen and the fastest of them: those that fit and may be fast.

    A move starts from what earlier moves found. Its fastest plans by estimate are kept, and simulated by units where they may be fast.
    """
    found = fastest_first(candidates)
    tried = {candidate.plan.without_prediction for candidate in found if candidate.simulated}
    for move in (move for move in moves if move.free(run)):
        chosen = choose(found)
        limit = move.slowdown * estimator.by_stages(chosen.plan).seconds
        for plans in _starts(run, move, chosen, found, budget):
            fitting = [plan for plan in plans if plan.without_prediction not in tried and fits(run, plan, budget)]
            for estimate in _fastest(estimator, fitting):
                tried.add(estimate.plan.without_prediction)
                found.append(estimator.by_units(estimate) if estimate.seconds < limit else estimate)
        found = fastest_first(found)
    return found


def _starts(
    run: RunSpec, move: Move, chosen: Candidate, candidates: Sequence[Candidate], budget: int | None
) -> list[list[Plan]]:
    """The plans of a move from each of the leading kinds of candidates; if it changes none of them, from the fastest that it changes."""
    kinds = {_kind(chosen.plan): chosen}
    for candidate in candidates:
        if candidate.simulated:
            kinds.setdefault(_kind(candidate.plan), candidate)
    starts = list(kinds.values())
    leading = 1 if is_large(run, chosen.plan) else move.starts
    changed = [list(move.plans(run, start.plan, budget)) for start in starts[:leading]]
    later = (list(move.plans(run, start.plan, budget)) for start in starts[leading:])
    return changed if any(changed) else [next(filter(None, later), [])]


def _kind(plan: Plan) -> object:
    """Key of plans from which a move makes plans that are about as fast: the fastest of them is enough of a start."""
    return (
        plan_family(plan),
        plan.batch.micro_batch,
        plan.accumulation,
        frozenset(replace(l, range="all") for l in plan.layers),
    )


def _fastest(estimator: PlanEstimator, plans: Sequence[Plan]) -> list[Candidate]:
    """The plans with the best estimates, as far as these cannot be told apart."""
    estimates = sorted(map(estimator.by_stages, plans), key=lambda candidate: candidate.seconds)[:MAX_TRIED]
    return [estimate for estimate in estimates if estimate.seconds < (1 + SAME_TIME_TOLERANCE) * estimates[0].seconds]


def moved_to_fit(run: RunSpec, plans: Sequence[Plan], budget: int | None) -> list[Plan]:
    """Those of the plans and of what moves make of them that fit."""
    moved = [plan for move in MOVES if move.free(run) for start in plans for plan in move.plans(run, start, budget)]
    return [
        plan for plan in dict.fromkeys(plan.without_prediction for plan in (*plans, *moved)) if fits(run, plan, budget)
    ]


def searched_beside(run: RunSpec, fastest: Plan, trainable: bool) -> Iterator[tuple[RunSpec, Points]]:
    """The run with each option pinned that may save memory in less time than the fastest plan does, and the layouts for it."""
    saves = offloads(fastest) or any(layer.recompute in RECOMPUTES_MATMULS for layer in fastest.layers)
    for move in MOVES if saves else ():
        pinned = move.pinned(run) if move.beside and move.free(run) else None
        if pinned is not None and move.beside:
            space = points(pinned, trainable=trainable)
            if (chosen := np.flatnonzero(move.beside(space))).size:
                yield pinned, space.take(chosen)


def relaxed_runs(run: RunSpec) -> Iterator[RunSpec]:
    """The run with each option pinned that may let a plan fit where none does."""
    for move in MOVES:
        relaxed = move.pinned(run) if move.free(run) else None
        if relaxed is not None:
            yield relaxed


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A restriction of a layout, with which other layer strategies may fit: also tried where it may be about as fast."""

    points: Callable[[RunSpec, Points], Points | None]
    """The layouts with the restriction; None where pins exclude it."""
    applies: Callable[[Points, Points, int, Plan | None], bool]
    """Given layouts, restricted layouts, an index and the plan of that layout that fits (None: no plan fits), whether to try it."""
    slowdown: float
    """Greatest factor between the plan and the fastest of all, for the restricted plan to be tried too."""


def _without_offload(run: RunSpec, points: Points) -> Points | None:
    free = "none" in points.offloads and len(points.offloads) > 1 and not pins_of(run).layers
    return replace(points, offloads=("none",)) if free else None


def _copies_differ(points: Points, kernels: Points, index: int, plan: Plan | None) -> bool:
    """Whether the layout has copy engines, whose windows take memory, and its plan saves memory."""
    plain = PLAIN.layer(PLAIN.high_memory)
    saves = plan is None or any(replace(layer, gradients=plain.gradients) != plain for layer in plan.layers)
    return saves and any(
        points.column(option.column)[index] != kernels.column(option.column)[index] for option in COPY_OPTIONS
    )


VARIANTS = (
    Variant(
        points=_without_offload,
        applies=lambda points, restricted, index, plan: plan is not None and offloads(plan),
        slowdown=1.06,
    ),
    Variant(points=with_kernel_engines, applies=_copies_differ, slowdown=1.02),
)
"""Restrictions of a layout that are tried beside its best plan: without offload, and kernels in place of copy engines."""
