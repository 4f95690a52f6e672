"""Which schedules a run may take, with their stages written out."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from meshwright.planner.candidate import pins_of
from meshwright.schedules.registry import refusal
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import balanced_stages, stage_table
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import PlanPins, ScheduleName, SchedulePlan
from meshwright.spec.run import RunSpec


def schedules_for(run: RunSpec, micro_batches: int) -> list[SchedulePlan]:
    """The pinned schedule, or every one that can run so many micro-batches on the pinned pipeline; 1F1B where nothing would choose between
    them. Empty when the pinned one needs more micro-batches.

    Raises BadInput when the pinned stages are in no schedule's order.
    """
    pins = pins_of(run)
    pipeline = pins.pipeline or 1
    chosen: tuple[ScheduleName, ...] = ("1f1b",) if run.cluster.gpu not in CHIPS else get_args(ScheduleName)
    names = (pins.schedule,) if pins.schedule else chosen if pipeline > 1 else ("1f1b",)
    found, last = [], None
    for name in names:
        try:
            schedule, per_rank = _with_stages(name, pins, pipeline, run)
        except ValueError as error:
            last = error
            continue
        if not micro_batches or refusal(name, pipeline, micro_batches, per_rank) is None:
            found.append(schedule)
    if last is not None and not found and len(names) > 1:
        raise BadInput(f"plan.stages: no schedule runs them on {pipeline} pipeline ranks: {last}")
    return found


def pinned_refusal(run: RunSpec, micro_batches: int) -> str | None:
    """Why the pinned schedule cannot be made for so many micro-batches, or None when it can or none is pinned."""
    pins = pins_of(run)
    if pins.schedule is None:
        return None
    pipeline = pins.pipeline or 1
    return refusal(pins.schedule, pipeline, micro_batches, _with_stages(pins.schedule, pins, pipeline, run)[1])


def _with_stages(name: ScheduleName, pins: PlanPins, pipeline: int, run: RunSpec) -> tuple[SchedulePlan, int]:
    """The schedule with its stages written out, and the stages of each rank. Raises ValueError as `stage_table` does."""
    layers = run.model.layers
    if pins.stages:
        table = stage_table(SchedulePlan(name=name, stages=pins.stages), pipeline, layers)
    else:
        # A breadth-first pipeline gets a stage for every layer (the modular pipeline, arXiv 2106.02679): larger ones would keep all
        # micro-batches to themselves until their last layer, and the ranks behind them idle.
        each = layers // pipeline if name == "breadth_first" and pipeline > 1 else None
        table = balanced_stages(name, pipeline, layers, _head_in_layers(run), each)
    if len(table) == len(table[0]) == 1:
        return SchedulePlan(name=name), 1
    texts = tuple(tuple(f"{held.start}-{held.stop - 1}" for held in row) for row in table)
    return SchedulePlan(name=name, stages=texts), len(table[0])


def _head_in_layers(run: RunSpec) -> float:
    """How many blocks' arithmetic the head makes."""
    model, seq = run.model, run.train.seq_len
    one, two = (flops_per_token(replace(model, layers=layers), seq, causal=True) for layers in (1, 2))
    return (2 * one - two) / (two - one)
