"""Options of a plan that the search decides one at a time: a list of moves, and the loop that tries them on the fastest
plans.

The sweep decides mesh, micro-batch, schedule and layer strategies of all layouts. Everything else is a `Move`: it makes
plans that differ from a given plan in one option. The loop keeps the plans that fit and are fast. A new option of the
search is one more entry of `MOVES`.
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
"""Maximum number of plans on which a move is tried: the fastest plans of different kinds.

Of large plans only the chosen one is tried.
"""
MANY_STARTS = 6
"""The same for a move that takes state off the device or puts it back, because its gain differs most between plans."""
MAX_TRIED = 2
"""Maximum number of plans that a move makes from one plan and that are simulated by units."""
MOVE_SLOWDOWN = 1.05
"""A plan that a move makes is simulated by units if its estimated step time is below the step time of the chosen plan
times this factor.
"""


def no_plans(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield no plans, for an option that is decided elsewhere."""
    yield from ()


@dataclass(frozen=True, kw_only=True)
class Move(PlanOption):
    """An option that the search decides on the plans of the fastest layouts: how its plans are made, and how the choice
    is explained.
    """

    plans: Callable[[RunSpec, Plan, int | None], Iterable[Plan]] = no_plans
    """Makes plans with other values of the option. The last argument is the usable memory of a device in bytes."""
    pinned: Callable[[RunSpec], RunSpec | None] = lambda run: None
    """Returns the run with the option pinned, for another search if nothing fits; None if that would not help."""
    beside: Callable[[Points], np.ndarray] | None = None
    """Chooses layouts that are also searched with the option pinned.

    That happens if the fastest plan spends time to save memory, because the option may spend less time.
    """
    value: Callable[[Plan], object] | None = None
    """Returns the value of the option in a plan. Sentences compare it with the values in other plans."""
    why: Callable[[RunSpec, Plan, Fits], str] = lambda run, plan, fits: ""
    """Returns a sentence about the option in a plan; empty if there is nothing to say.

    The last argument returns whether a plan fits.
    """
    starts: int = MAX_STARTS
    """Maximum number of plans on which the move is tried."""
    slowdown: float = MOVE_SLOWDOWN
    """Factor on the chosen plan's estimated seconds up to which plans of the move are simulated by units."""


def other_gradients(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield the plan with the other value of `gradients`: whole instead of shard, or shard instead of whole."""
    if shard_size(plan) > 1 and plan.batch.accumulate > 1 and not plan.layered:
        other: Gradients = "shard" if plan.layers[0].gradients == "whole" else "whole"
        yield replace(plan, layers=tuple(replace(layer, gradients=other) for layer in plan.layers))


def other_reshard(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield the plan with the other value of `reshard`.

    If it then does not fit, as many layers as needed save memory in another way.

    Weights are not freed if nothing else in the plan saves memory: gathering them again would only cost time.
    """
    saves = any(layer.reshard or layer.recompute != "none" or layer.offload != "none" for layer in plan.layers)
    if saves and gathers_weights(plan) and len({layer.reshard for layer in plan.layers}) == 1:
        toggled = replace(plan, layers=tuple(replace(layer, reshard=not layer.reshard) for layer in plan.layers))
        yield from [toggled] if fits(run, toggled, budget) else with_room_used(run, toggled, budget)


def reshard_reason(run: RunSpec, plan: Plan, fits: Fits) -> str:
    """Return why weights are gathered again for the backward, or on a single rank cast again; empty if they are not."""
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
    """Return the move from copy engines to NCCL kernels for one transfer.

    Kernels need no window. A window is device memory that other ranks map for copies.
    """

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
    """Return the candidates, and the plans that moves make from the chosen and the fastest of them, if they fit and may
    be fast.

    Each move also starts from what earlier moves found. Its plans with the best estimates are kept, and simulated by
    units if they may be fast.
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
    """Return the plans of a move from each of the leading kinds of candidates.

    If the move changes none of them, return its plans from the fastest other candidate that it changes.
    """
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
    """Return a key that is the same for plans of one kind.

    A move makes plans of similar speed from them, so the fastest of them is enough.
    """
    return (
        plan_family(plan),
        plan.batch.micro_batch,
        plan.accumulation,
        frozenset(replace(l, range="all") for l in plan.layers),
    )


def _fastest(estimator: PlanEstimator, plans: Sequence[Plan]) -> list[Candidate]:
    """Return the plans with the best estimates whose times cannot be distinguished."""
    estimates = sorted(map(estimator.by_stages, plans), key=lambda candidate: candidate.seconds)[:MAX_TRIED]
    return [estimate for estimate in estimates if estimate.seconds < (1 + SAME_TIME_TOLERANCE) * estimates[0].seconds]


def moved_to_fit(run: RunSpec, plans: Sequence[Plan], budget: int | None) -> list[Plan]:
    """Return the plans that fit, of `plans` and of what moves make from them."""
    moved = [plan for move in MOVES if move.free(run) for start in plans for plan in move.plans(run, start, budget)]
    return [
        plan for plan in dict.fromkeys(plan.without_prediction for plan in (*plans, *moved)) if fits(run, plan, budget)
    ]


def searched_beside(run: RunSpec, fastest: Plan, trainable: bool) -> Iterator[tuple[RunSpec, Points]]:
    """Yield the run with an option pinned that may save memory in less time than the fastest plan does, and the layouts
    for it.
    """
    saves = offloads(fastest) or any(layer.recompute in RECOMPUTES_MATMULS for layer in fastest.layers)
    if not saves:
        return
    for move in MOVES:
        pinned = move.pinned(run) if move.beside and move.free(run) else None
        if pinned is not None and move.beside:
            space = points(pinned, trainable=trainable)
            if (chosen := np.flatnonzero(move.beside(space))).size:
                yield pinned, space.take(chosen)


def relaxed_runs(run: RunSpec) -> Iterator[RunSpec]:
    """Yield the run with an option pinned that may let a plan fit if none fits."""
    for move in MOVES:
        relaxed = move.pinned(run) if move.free(run) else None
        if relaxed is not None:
            yield relaxed


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A restriction of a layout with which other layer strategies may fit.

    It is also tried if it may be about as fast.
    """

    points: Callable[[RunSpec, Points], Points | None]
    """Returns the layouts with the restriction; None if pins exclude it."""
    applies: Callable[[Points, Points, int, Plan | None], bool]
    """Returns whether to try it, from all layouts, the restricted layouts, the index of a layout, and its plan that
    fits (None: no plan fits).
    """
    slowdown: float
    """The restricted plan is only tried if the layout's plan takes at most this factor longer than the fastest plan."""


def _without_offload(run: RunSpec, points: Points) -> Points | None:
    """Return the layouts without offload; None if pins exclude that."""
    free = "none" in points.offloads and len(points.offloads) > 1 and not pins_of(run).layers
    return replace(points, offloads=("none",)) if free else None


def _copies_differ(points: Points, kernels: Points, index: int, plan: Plan | None) -> bool:
    """Return whether the layout uses copy engines, whose windows take memory, and its plan saves memory."""
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
"""Restrictions of a layout that are tried in addition to its best plan: without offload, and with kernels instead of
copy engines.
"""
