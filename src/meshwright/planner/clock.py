"""Step seconds of a plan for ranking: a quick estimate that plays whole stages, and the simulator's answer for the few that lead.

Both play few micro-batches and draw a straight line to the plan's number: past filling and draining, a schedule repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.schedules.of_plan import stage_schedule, training_schedule
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.of_plan import timing_of
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timing import Table, Timing
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

FEW, MORE = 3, 4
"""Micro-batches for each pipeline rank that are played instead of many."""


def simulated_seconds(run: RunSpec, plan: Plan) -> float:
    """Seconds of one step, unit by unit, with gathers and reductions."""
    timing = timing_of(run.model, run.train, plan, run.cluster)
    return _in_line(plan, lambda few: simulate(training_schedule(few, run.model.layers), timing).step_seconds)


def estimated_seconds(run: RunSpec, plan: Plan) -> float:
    """The same in a hundredth of the work: stages played whole, and of gathers and reductions what compute cannot hide."""
    timing = timing_of(run.model, run.train, plan, run.cluster)
    whole = replace(
        timing, forward=_summed(timing.forward), backward_input=_summed(timing.backward_input),
        backward_weight=_summed(timing.backward_weight), unshard=(), reduce=(), replicate=(),
    )  # fmt: skip
    played = _in_line(plan, lambda few: simulate(stage_schedule(few, run.model.layers), whole).step_seconds)
    schedule = stage_schedule(plan, run.model.layers)
    return played + max(_not_hidden(plan, timing, schedule, rank) for rank in range(schedule.ranks))


def _in_line(plan: Plan, seconds: Callable[[Plan], float]) -> float:
    """`seconds` of the plan, from two shorter ones when it has many micro-batches."""
    ranks, wanted = plan.axis_size("pipeline"), plan.batch.accumulate
    if wanted <= (MORE + 1) * ranks:
        return seconds(plan)
    # A remainder makes groups uneven; the short plans have the same one.
    few, more = (times * ranks + wanted % ranks for times in (FEW, MORE))
    first, second = (seconds(_with_micro_batches(plan, count)) for count in (few, more))
    return second + (second - first) / (more - few) * (wanted - more)


def _with_micro_batches(plan: Plan, count: int) -> Plan:
    return replace(plan, batch=replace(plan.batch, accumulate=count))


def _not_hidden(plan: Plan, timing: Timing, schedule: Schedule, rank: int) -> float:
    """Collective seconds of a rank beyond its compute, and what the hidden ones slow compute down by."""
    layer, many = plan.layers[0], plan.batch.accumulate
    times = 1 if plan.layered else many
    gathers = 2 * times if layer.reshard else 1
    reductions = times if layer.gradients == "shard" else 1
    held = schedule.placement[rank]
    travelling = gathers * _total(timing.unshard, held) + reductions * _total(timing.reduce, held)
    travelling += _total(timing.replicate, held)
    compute = many * sum(
        _total(table, held) for table in (timing.forward, timing.backward_input, timing.backward_weight)
    )
    return max(0.0, travelling - compute) + min(travelling, compute) * (1 - 1 / timing.collective_slowdown)


def _total(table: Table, stages: tuple[int, ...]) -> float:
    return sum(sum(table[stage]) for stage in stages) if table else 0.0


def _summed(table: Table) -> Table:
    return [[sum(row)] for row in table]
