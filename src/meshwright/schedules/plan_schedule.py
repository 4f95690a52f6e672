"""Builds the schedule of a Plan for the simulator and the executor.

The FSDP units of a stage are its blocks. The first stage also has the embedding, as a unit before the first block. The last
stage also has final norm, head and loss, as a unit after the last block. The plan's layer strategies decide when a unit
is gathered and reduced; the embedding and the head follow the strategy of the adjacent block. `breadth_first` runs all
micro-batches of a unit before the next unit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

from meshwright.schedules.expand import Order, expand
from meshwright.schedules.looping import forward_only
from meshwright.schedules.registry import build, order_of
from meshwright.schedules.schedule import ComputeOrder, Schedule
from meshwright.schedules.unit_collectives import Gather, Reduce
from meshwright.spec.layout import stage_table
from meshwright.spec.plan import LayerStrategy, Plan

T = TypeVar("T")
ByUnit = tuple[tuple[T, ...], ...]
"""Values for each stage and unit."""


def training_schedule(plan: Plan, layers: int, micro_batches: int | None = None) -> Schedule:
    """Return a training step of a model with `layers` blocks, in actions of FSDP units.

    `micro_batches` is the number of micro-batches on a rank; None takes the plan's. Raises BadInput if the schedule does
    not support the plan's sizes.
    """
    strategies = unit_strategies(plan, layers)
    at_ends = _collects_at_ends(plan)
    gather = tuple(tuple(_gather(unit, at_ends) for unit in stage) for stage in strategies)
    reduce = tuple(tuple(_reduce(unit, at_ends) for unit in stage) for stage in strategies)
    name, ranks, planned, stages_per_rank = schedule_key(plan, layers)
    return _cached_expand(name, ranks, micro_batches or planned, stages_per_rank, _order(plan), gather, reduce)


def evaluation_schedule(plan: Plan, layers: int, micro_batches: int) -> Schedule:
    """Return a forward-only pass over the stages of the training schedule, in actions of FSDP units."""
    strategies = unit_strategies(plan, layers)
    at_ends = _collects_at_ends(plan)
    gather = [[_gather(unit, at_ends) for unit in stage] for stage in strategies]
    stage_passes = forward_only(stage_schedule(plan, layers).placement, micro_batches)
    unit_passes = expand(stage_passes, list(map(len, strategies)), order=_order(plan), gather=gather, reduce="never")
    return unit_passes.in_turns()


def stage_schedule(plan: Plan, layers: int) -> Schedule:
    """Return a step whose compute actions are whole stages, without gathers and reductions."""
    return _cached_build(*schedule_key(plan, layers))


def stages_of(plan: Plan, layers: int) -> tuple[range, ...]:
    """Return the layers of every virtual stage, in the order in which a micro-batch visits the stages."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), layers)
    return tuple(sorted((stage for stages in table for stage in stages), key=lambda stage: stage.start))


def schedule_key(plan: Plan, layers: int) -> tuple[str, int, int, int]:
    """Return the arguments of `registry.build` for a plan: name, ranks, micro-batches and stages per rank."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), layers)
    return plan.schedule.name, len(table), plan.batch.accumulate, len(table[0])


def unit_strategies(plan: Plan, layers: int) -> list[list[LayerStrategy]]:
    """Return the layer strategy of every unit, by stage and unit."""
    by_stage = []
    for stage in stages_of(plan, layers):
        blocks = list(plan.strategies(layers)[stage.start : stage.stop])
        # The strategy of the first block once more for the embedding, that of the last block once more for the head.
        by_stage.append([*blocks[: stage.start == 0], *blocks, *blocks[len(blocks) - (stage.stop == layers) :]])
    return by_stage


def _collects_at_ends(plan: Plan) -> bool:
    """Return whether units are gathered before a step's first micro-batch and reduced after its last.

    This is needed with a hybrid axis. Its ranks run different numbers of micro-batches and wait for each other in
    attention, so that a collective between two micro-batches could deadlock. In layered order (all micro-batches of a
    stage run through a unit before the next unit) it is not needed: all ranks have the same collectives between the same
    units.
    """
    return plan.axis_size("hybrid") > 1 and not plan.layered


def _gather(strategy: LayerStrategy, at_ends: bool) -> Gather:
    """Return when a unit of this strategy is gathered."""
    if at_ends:
        return "start"
    return "stretch" if strategy.reshard else "step"


def _reduce(strategy: LayerStrategy, at_ends: bool) -> Reduce:
    """Return when the gradients of a unit of this strategy are reduced."""
    if at_ends:
        return "end"
    return "stretch" if strategy.gradients == "shard" else "once"


def _order(plan: Plan) -> Order:
    return "layered" if plan.layered else "depth_first"


@lru_cache(maxsize=128)  # the planner needs the same orders for every batch and strategy
def cached_compute_order(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> ComputeOrder:
    """Return `registry.order_of`, cached."""
    return order_of(name, ranks, micro_batches, stages_per_rank)


@lru_cache(maxsize=32)
def _cached_build(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    return build(name, ranks, micro_batches, stages_per_rank)


@lru_cache(maxsize=16)  # consecutive plans of the planner often have the same schedule
def _cached_expand(
    name: str,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int,
    order: Order,
    gather: ByUnit[Gather],
    reduce: ByUnit[Reduce],
) -> Schedule:
    schedule = _cached_build(name, ranks, micro_batches, stages_per_rank)
    return expand(schedule, list(map(len, gather)), order=order, gather=gather, reduce=reduce)
